"""This module runs a benchmark's cases: it writes each row at once, also of cases that failed or had no time left."""

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.lib.conditions import release
from bench.lib.wall import Wall, measure_wall

__all__ = ["Work", "run_all", "wall_of"]

Row = dict[str, Any]
NO_WALL = Wall(100.0, 0, 0, {})  # where there is no GPU: figures mean nothing


@dataclass(frozen=True)
class Work:
    """One case: its name, the part of its row that describes it, and what completes the row."""

    name: str
    described: Row
    measure: Callable[[], Row]


def run_all(
    works: Iterable[Work],
    stamps: Mapping[str, Any],
    write: Callable[[list[Row]], None],
    devices: Sequence[torch.device],
    *,
    limit_s: float = math.inf,
) -> list[Row]:
    """Measure every case; a failed one has `error` in its row, one that the time is over for `skipped`.

    write  called with all rows after each case
    """
    begin, rows = time.perf_counter(), list[Row]()
    for work in works:
        start, row = time.perf_counter(), dict(work.described)
        if start - begin > limit_s:
            row["skipped"] = f"{limit_s:g} s were over"
        else:
            try:
                row |= work.measure()
            except Exception as error:  # the other cases are still worth measuring
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"
        rows.append({**row, **stamps, "measured_in_s": round(time.perf_counter() - start, 1)})
        write(rows)
        print(json.dumps(rows[-1]), flush=True)
        for device in devices:
            release(device)
    return rows


def wall_of(device: torch.device) -> Wall:
    """The memory wall of a GPU; of another device one that means nothing."""
    return measure_wall(device) if device.type == "cuda" else NO_WALL
