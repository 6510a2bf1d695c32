"""This module has the table of one GPU's tuned plans, and chooses a launch's plan by it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lowlat.errors import ConfigError

__all__ = ["SHIPPED", "Entry", "Fact", "Knobs", "Plan", "Planned", "TuningTable", "choose_plan", "key_of", "read_table"]

SHIPPED = Path(__file__).parent / "tables"
FORMAT = 2
Knobs = Mapping[str, int | bool]
Fact = int | bool | str | None


class GpuSizes(Protocol):
    """A GPU's sizes, as `Gpu` has them."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """SMs."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one block may have, bytes."""
        ...


class Plan(Protocol):
    """How a launch is cut."""

    @property
    def knobs(self) -> Knobs:
        """The numbers that a table may choose: none of them changes any bit of the result."""
        ...


P = TypeVar("P", bound=Plan)


@dataclass(frozen=True)
class Entry:
    """The fastest plan of a launch on a GPU.

    knobs       of the fastest plan, or of the derived one where none was faster by more than noise
    default_us  time of the plan that is derived without a table; 0.0: not measured
    best_us     time of these knobs' plan
    stages      where the launch was met, as `EAGLE3_FC`
    cases       both times by case, as contexts of attention, of which those above are geometric means; none: one case
    """

    knobs: Knobs
    default_us: float = 0.0
    best_us: float = 0.0
    stages: tuple[str, ...] = ()
    cases: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TuningTable:
    """One GPU's tuned plans, by kind of launch and key.

    GPU              its name, as the driver has it
    num_multiprocessors, shared_bytes, capability, peak_gb_s  as `Gpu` has them: a part of a GPU is another GPU
    driver, commit    by which it was measured
    read_gb_s         measured bandwidth of streaming reads, GB/s; 0.0: not measured
    entries           by kind, then key
    """

    gpu: str
    capability: tuple[int, int]
    num_multiprocessors: int
    shared_bytes: int
    peak_gb_s: float = 0.0
    driver: str = ""
    commit: str = ""
    read_gb_s: float = 0.0
    entries: Mapping[str, Mapping[str, Entry]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.entries.values()))

    def is_of(self, gpu: GpuSizes) -> bool:
        """Whether it was measured on a GPU of these sizes."""
        sizes = (gpu.capability, gpu.num_multiprocessors, gpu.shared_bytes)
        return sizes == (self.capability, self.num_multiprocessors, self.shared_bytes)

    def find(self, kind: str, key: str) -> Knobs | None:
        """The knobs of a launch, or None where it has no entry."""
        entry = self.entries.get(kind, {}).get(key)
        return None if entry is None else entry.knobs

    def merged(self, other: "TuningTable") -> "TuningTable":
        """This table with another's entries of the same GPU put in, which take precedence, and its conditions."""
        kinds = dict.fromkeys([*self.entries, *other.entries])
        entries = {kind: {**self.entries.get(kind, {}), **other.entries.get(kind, {})} for kind in kinds}
        return replace(other, entries=entries, read_gb_s=other.read_gb_s or self.read_gb_s)

    def write(self, path: Path) -> None:
        """Write it as JSON, an entry a line, whole or not at all: what is there took a GPU long to find."""
        kinds = []
        for kind, entries in sorted(self.entries.items()):
            lines = [f"  {json.dumps(key)}: {json.dumps(asdict(entry))}" for key, entry in sorted(entries.items())]
            kinds.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n }")
        facts = {name: getattr(self, name) for name in _FACTS}
        head = json.dumps({"format": FORMAT, **facts})[:-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(path.suffix + ".part")
        part.write_text(f'{head}, "entries": {{\n' + ",\n".join(kinds) + "\n}}\n", encoding="utf-8")
        part.replace(path)


_FACTS = ("gpu", "capability", "num_multiprocessors", "shared_bytes", "peak_gb_s", "driver", "commit", "read_gb_s")


def read_table(path: Path) -> TuningTable:
    """The table in a file. Raises ConfigError for one that cannot be read or is of another format."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ConfigError(f"{path} is a tuning table of format {found['format']}, not {FORMAT}; run `lowlat tune`")
        facts = {name: found[name] for name in _FACTS}
        facts["capability"] = tuple(facts["capability"])
        entries = {
            str(kind): {str(key): _entry(entry) for key, entry in of_kind.items()}
            for kind, of_kind in found["entries"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: no tuning table: {type(error).__name__}: {error}; run `lowlat tune`") from error
    return TuningTable(**facts, entries=entries)


def _entry(found: Mapping[str, Any]) -> Entry:
    """An entry as it was written."""
    cases = {name: (times[0], times[1]) for name, times in found["cases"].items()}
    return Entry(**{**found, "stages": tuple(found["stages"]), "cases": cases})


@dataclass(frozen=True)
class Planned:
    """The place of a launch in tables of tuned plans.

    kind        of the launch, as `decode_gemm`
    key         of what its plan depends on
    candidates  all plans that it may have, the derived one first; all give the same bits
    is_tuned    its plan is an entry's of a table
    """

    kind: str
    key: str
    candidates: tuple[Plan, ...]
    is_tuned: bool


def key_of(facts: Mapping[str, Fact]) -> str:
    """The key of a launch: what its plan depends on, in the order given."""
    return " ".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in facts.items())


def choose_plan(
    table: TuningTable | None, kind: str, facts: Mapping[str, Fact], candidates: Sequence[P]
) -> tuple[P, Planned]:
    """The plan of a launch, and its place in tables: the candidate with an entry's knobs, else the first.

    An entry whose knobs match no candidate, as of an older version, is ignored.
    """
    key = key_of(facts)
    knobs = None if table is None else table.find(kind, key)
    found = None if knobs is None else next((plan for plan in candidates if dict(plan.knobs) == dict(knobs)), None)
    return found or candidates[0], Planned(kind, key, tuple(candidates), found is not None)
