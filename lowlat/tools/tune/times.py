"""This module keeps the times of all plans that a run timed, which derived plans are held to."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from lowlat.errors import ConfigError
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.tools.tune.sweep import Swept

__all__ = ["PlanTimes", "TimedPlan", "read_times", "times_of"]


class TimedPlan(msgspec.Struct, frozen=True):
    """A plan's knobs, and the microseconds of its launch."""

    knobs: dict[str, bool | int]
    us: float


class PlanTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times measured on one GPU, by kind of launch and key.

    source  how they were measured
    """

    gpu: str
    capability: tuple[int, int]
    num_multiprocessors: int
    shared_bytes: int
    peak_gb_s: float
    driver: str
    commit: str
    source: str
    launches: dict[str, dict[str, tuple[TimedPlan, ...]]]

    @property
    def facts(self) -> Gpu:
        """The GPU as plans are derived for it, without a table."""
        return Gpu(self.num_multiprocessors, self.shared_bytes, self.capability, self.peak_gb_s)

    def write(self, path: Path) -> None:
        """Write them as JSON, a launch a line, whole or not at all."""
        kinds = []
        for kind, launches in sorted(self.launches.items()):
            lines = [
                f"  {msgspec.json.encode(key).decode()}: {msgspec.json.encode(plans).decode()}"
                for key, plans in sorted(launches.items())
            ]
            kinds.append(f" {msgspec.json.encode(kind).decode()}: {{\n" + ",\n".join(lines) + "\n }")
        head = msgspec.json.encode(msgspec.structs.replace(self, launches={})).decode().removesuffix("{}}")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(head + "{\n" + ",\n".join(kinds) + "\n}}\n", encoding="utf-8")
        part.replace(path)


def read_times(path: Path) -> PlanTimes:
    """The times in a file. Raises ConfigError for one that cannot be read or has another form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PlanTimes)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no times of plans: {error}; `lowlat tune --times {path}` writes them") from error


def times_of(swept: Iterable[Swept], gpu: str, facts: Gpu, *, driver: str, commit: str) -> PlanTimes:
    """The times of all plans of launches that were swept; plans that failed are left out."""
    launches: dict[str, dict[str, tuple[TimedPlan, ...]]] = {}
    for each in swept:
        timed = zip(each.shape.candidates, each.times_us, strict=False)
        plans = tuple(TimedPlan(dict(plan.knobs), round(us, 3)) for plan, us in timed if us < float("inf"))
        launches.setdefault(each.shape.kind, {})[each.shape.key] = plans
    return PlanTimes(
        gpu=gpu, capability=facts.capability, num_multiprocessors=facts.num_multiprocessors,
        shared_bytes=facts.shared_bytes, peak_gb_s=facts.peak_gb_s, driver=driver, commit=commit,
        source="lowlat tune: graphs of copies of a launch, means over contexts and routings", launches=launches,
    )  # fmt: skip
