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
    """A plan of a launch."""

    @property
    def knobs(self) -> Knobs:
        """The numbers that a table may choose; none changes any bit of the result."""
        ...


P = TypeVar("P", bound=Plan)


@dataclass(frozen=True)
class Entry:
    """The fastest plan of a launch on a GPU.

    knobs       those of the fastest plan, or of the derived one if none was faster by more than noise
    default_us  time of the derived plan, which is used without a table; 0.0: not measured
    best_us     time of the plan with these knobs
    stages      the stages with this launch, such as `EAGLE3_FC`
    cases       both times by case, such as contexts of attention; the times above are their geometric means. None: one
                case
    """

    knobs: Knobs
    default_us: float = 0.0
    best_us: float = 0.0
    stages: tuple[str, ...] = ()
    cases: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TuningTable:
    """One GPU's tuned plans, by kind of launch and key.

    gpu               the GPU's name by its driver
    num_multiprocessors, shared_bytes, capability, peak_gb_s  as in `Gpu`: a part of a GPU counts as another GPU
    driver, commit    the driver and lowlat's commit of the measurements
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
        """Whether the table was measured on a GPU of these sizes."""
        sizes = (gpu.capability, gpu.num_multiprocessors, gpu.shared_bytes)
        return sizes == (self.capability, self.num_multiprocessors, self.shared_bytes)

    def find(self, kind: str, key: str) -> Knobs | None:
        """Return the knobs of a launch; None if it has no entry."""
        entry = self.entries.get(kind, {}).get(key)
        return None if entry is None else entry.knobs

    def merged(self, other: "TuningTable") -> "TuningTable":
        """Merge another table of the same GPU into this one; the other's entries and conditions take precedence."""
        kinds = dict.fromkeys([*self.entries, *other.entries])
        entries = {kind: {**self.entries.get(kind, {}), **other.entries.get(kind, {})} for kind in kinds}
        return replace(other, entries=entries, read_gb_s=other.read_gb_s or self.read_gb_s)

    def write(self, path: Path) -> None:
        """Write the table as JSON, an entry a line, atomically: the existing table took a GPU long to measure."""
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
    """Read the table in a file. Raises ConfigError for one that cannot be read or has another format."""
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

    kind        the launch's kind, such as `decode_gemm`
    key         the facts on which its plan depends
    candidates  all plans that it may have, the derived one first; all give the same bits
    is_tuned    its plan comes from an entry of a table
    """

    kind: str
    key: str
    candidates: tuple[Plan, ...]
    is_tuned: bool


def key_of(facts: Mapping[str, Fact]) -> str:
    """Return the key of a launch: the facts on which its plan depends, in the order given."""
    return " ".join(f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in facts.items())


def choose_plan(
    table: TuningTable | None, kind: str, facts: Mapping[str, Fact], candidates: Sequence[P]
) -> tuple[P, Planned]:
    """Choose the plan of a launch: the candidate with an entry's knobs, else the first. Returns its place, too.

    An entry whose knobs match no candidate, such as one of an older version, is ignored.
    """
    key = key_of(facts)
    knobs = None if table is None else table.find(kind, key)
    found = None if knobs is None else next((plan for plan in candidates if dict(plan.knobs) == dict(knobs)), None)
    return found or candidates[0], Planned(kind, key, tuple(candidates), found is not None)
