"""Times of single kernels inside a graph: N copies of a call over rotating buffers, the graph's time over N.

It knows no kernel. `bench/test_kernels.py` times those of a step, `bench.experts` and others sweep their own.

Copies work on buffers of their own, so that what they read has left the L2 by the time it is read again, as it has in
a step; an entry whose buffers are small in the step, too, makes the same calls for every copy.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.clock import Timed, percentile, round_robin
from bench.conditions import write_json

if TYPE_CHECKING:
    from lowlat.executors.launcher import Launcher
    from lowlat.kernels.toolchain.kernel import KernelCall

__all__ = ["Entry", "capture", "capture_torch", "describe", "time_entries", "write_rows"]

TURN = 10


@dataclass(frozen=True)
class Entry:
    """One kernel, or a run of kernels, to be timed.

    name         of its row
    calls        the calls of copy i, i from 0; a copy has its own buffers where they outlive the L2 in a step
    copies       in one graph
    moved_bytes  that the calls of one copy must read and write; 0 where that is not what bounds them
    """

    name: str
    calls: "Callable[[int], Sequence[KernelCall]]"
    copies: int = 32
    moved_bytes: int = 0


def time_entries(
    launcher: "Launcher", entries: Sequence[Entry], replays: int = 50, wall_gb_per_s: float | None = None
) -> list[dict[str, Any]]:
    """One row an entry, in turns with each other: us a copy, median and p99; with the wall, its share of it.

    Entries of which a call does not compile or launch give a row with `error`. Runs on torch's current stream.
    """
    timed: list[tuple[Entry, Timed]] = []
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries:
        try:
            timed.append((entry, Timed(entry.name, capture(launcher, entry))))
        except Exception as error:  # the other kernels are still worth measuring
            rows[entry.name] = {"name": entry.name, "error": f"{type(error).__name__}: {error}"}
    round_robin([each for _, each in timed], replays, TURN, launcher.device)
    for entry, each in timed:
        rows[entry.name] = describe(entry, each.ms, wall_gb_per_s)
    return [rows[entry.name] for entry in entries]


def describe(entry: Entry, ms: Sequence[float], wall_gb_per_s: float | None) -> dict[str, Any]:
    """A row from the times of the entry's graph."""
    microseconds = [1e3 * value / entry.copies for value in ms]
    median = percentile(microseconds, 50)
    row: dict[str, Any] = {
        "name": entry.name,
        "us_p50": round(median, 3),
        "us_p99": round(percentile(microseconds, 99), 3),
        "copies": entry.copies,
        "moved_bytes": entry.moved_bytes,
    }
    if entry.moved_bytes:
        row["gb_per_s"] = round(entry.moved_bytes / median / 1e3, 1)
        if wall_gb_per_s:
            row["share_of_wall"] = round(row["gb_per_s"] / wall_gb_per_s, 4)
    return row


def capture(launcher: "Launcher", entry: Entry) -> Callable[[], None]:
    """Capture the entry's copies as one graph; they run once before, so that nothing is loaded while capturing."""
    calls = [call for copy in range(entry.copies) for call in entry.calls(copy)]
    launches = [launcher.prepare(call) for call in calls]
    stream = launcher.stream()
    for launch in launches:
        launch.issue(stream)
    torch.cuda.synchronize(launcher.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = launcher.stream()
        for launch in launches:
            launch.issue(stream)
    kept = (graph, calls)  # launches know addresses alone; the calls own the buffers

    def replay() -> None:
        kept[0].replay()

    return replay


def capture_torch(run: Callable[[], Any], device: torch.device) -> Callable[[], None]:
    """Capture what torch's operations launch as one graph, which keeps what they use; they run once before."""
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    kept = (graph, run)

    def replay() -> None:
        kept[0].replay()

    return replay


def write_rows(rows: Sequence[dict[str, Any]], out: Path | None, device: torch.device, wall_gb_per_s: float) -> None:
    """Print the rows, and write them with the card and its wall where that is asked for."""
    for row in rows:
        print(json.dumps(row))
    if out is not None:
        result = {"card": torch.cuda.get_device_name(device), "wall_gb_per_s": wall_gb_per_s, "rows": rows}
        write_json(out, result)
