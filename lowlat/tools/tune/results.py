"""This module reads and writes tables of a sweep's results, and has the schema that every table keeps to."""

import math
from collections.abc import Iterable
from pathlib import Path

import msgspec

from lowlat.errors import ConfigError
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.kernels.tuning.table import Entry, TuningTable, read_table
from lowlat.tools.tune.sweep import Swept

__all__ = ["TableFile", "check_table", "table_of", "write_table"]


class EntryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry as it is written."""

    knobs: dict[str, bool | int]
    default_us: float
    best_us: float
    stages: tuple[str, ...]
    cases: dict[str, tuple[float, float]]


class TableFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table as it is written."""

    format: int
    gpu: str
    capability: tuple[int, int]
    num_multiprocessors: int
    shared_bytes: int
    peak_gb_s: float
    driver: str
    commit: str
    read_gb_s: float
    entries: dict[str, dict[str, EntryFile]]


def check_table(path: Path) -> TableFile:
    """The file by its schema. Raises ConfigError for one that does not keep to it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=TableFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no tuning table: {error}") from error


def table_of(
    swept: Iterable[Swept], gpu_name: str, gpu: Gpu, *, driver: str = "", commit: str = "", read_gb_s: float = 0.0
) -> TuningTable:
    """The table of a GPU with an entry for each launch that was swept."""
    entries: dict[str, dict[str, Entry]] = {}
    for each in swept:
        times = _us(each.default_us), _us(each.best_us)
        cases = {name: (_us(found[0]), _us(found[each.best])) for name, found in each.by_case.items()}
        entry = Entry(dict(each.plan.knobs), *times, tuple(each.shape.stages), cases)
        entries.setdefault(each.shape.kind, {})[each.shape.key] = entry
    sizes = gpu.capability, gpu.num_multiprocessors, gpu.shared_bytes, gpu.peak_gb_s
    return TuningTable(gpu_name, *sizes, driver, commit, round(read_gb_s, 1), entries)


def _us(time: float) -> float:
    """A time as tables have it, 0.0 where a plan failed."""
    return round(time, 3) if math.isfinite(time) else 0.0


def write_table(table: TuningTable, path: Path) -> TuningTable:
    """Write a table, merged into the one that is there; return what was written.

    Raises ConfigError where that is another GPU's.
    """
    if path.exists():
        known = read_table(path)
        sizes = known.capability, known.num_multiprocessors, known.shared_bytes
        if known.gpu != table.gpu or sizes != (table.capability, table.num_multiprocessors, table.shared_bytes):
            raise ConfigError(f"{path} is of {known.gpu}, not of {table.gpu}; name another file with --out")
        table = known.merged(table)
    table.write(path)
    return table
