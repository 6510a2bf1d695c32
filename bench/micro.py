"""This program times single kernels in a graph: N copies of a call over rotating buffers, the graph's time over N.

    python -m bench.micro --out bench/results/h200/micro.json

times the kernels of a step (`bench.micro_entries`): acceptance, the rewind of lengths, keys and values moved into
place, masks and active slots packed, and all others; with `--moe` the layers of `bench.micro_moe` instead. It fails
where one of those is missing or cannot be timed, or where acceptance takes other drafts than those that the target
agrees with.

Copies work on buffers of their own, so that what they read has left the L2 by the time it is read again, as it has in
a step; an entry whose buffers are small in the step, too, makes the same calls for every copy.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bench.lib.clock import Timed, own_stream, percentile, round_robin
from bench.lib.conditions import bench_parser, stamps_of, write_json
from lowlat.errors import ConfigError

if TYPE_CHECKING:
    from lowlat.executors.launcher import Launcher
    from lowlat.kernels.toolchain.kernel import Gpu
    from lowlat.lowering.binding import Call

__all__ = ["Entry", "capture", "describe", "time_entries", "time_launches"]

TURN = 10


@dataclass(frozen=True)
class Entry:
    """One kernel, or a run of kernels, to be timed.

    name         of its row
    calls        the calls of copy i, i from 0; a copy has its own buffers where they outlive the L2 in a step
    copies       in one graph
    moved_bytes  that the calls of one copy must read and write; 0 where that is not what bounds them
    reset        called before each turn, after which the calls find what they read
    check        called after the times: raises where the calls have not done what they are timed for
    conditions   of the row
    """

    name: str
    calls: "Callable[[int], Sequence[Call]]"
    copies: int = 32
    moved_bytes: int = 0
    reset: Callable[[], None] = lambda: None
    check: Callable[[], None] | None = None
    conditions: Mapping[str, Any] = field(default_factory=dict)


def time_entries(
    launcher: "Launcher", entries: Sequence[Entry], replays: int = 50, wall_gb_per_s: float | None = None
) -> list[dict[str, Any]]:
    """One row an entry, in turns with each other: us a copy, median and p99; with the wall, its share of it.

    Entries of which a call does not compile or launch give a row with `error`; what a check raises is raised. Runs on
    torch's current stream.
    """
    timed: list[tuple[Entry, Timed]] = []
    rows: dict[str, dict[str, Any]] = {}
    for entry in entries:
        try:
            entry.reset()
            timed.append((entry, Timed(entry.name, capture(launcher, entry), entry.reset)))
        except Exception as error:  # the other kernels are still worth measuring
            rows[entry.name] = {"name": entry.name, "error": f"{type(error).__name__}: {error}"}
    round_robin([each for _, each in timed], replays, TURN, launcher.device)
    for entry, each in timed:
        rows[entry.name] = describe(entry, each.ms, wall_gb_per_s)
        if entry.check is not None:
            entry.reset()
            each.replay()
            entry.check()
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
        **entry.conditions,
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


def time_launches(
    command: str,
    description: str | None,
    entries: Callable[[torch.device, "Gpu"], list[Entry]],
    replays: int,
    arguments: Sequence[str] | None,
) -> int:
    """The `main` of a suite of launches: time its entries and write the file; 1 where one could not be timed.

    Raises ConfigError without a GPU.
    """
    options = bench_parser(description).parse_args(arguments)
    with _launching(command, options.device) as (device, launcher, wall):
        rows = time_entries(launcher, entries(device, launcher.gpu), replays, wall)
    complete = not any("error" in row for row in rows)
    stamps = stamps_of(device, options.commit)
    write_json(options.out, {**stamps, "wall_gb_per_s": wall, "replays": replays, "complete": complete, "rows": rows})
    for row in rows:
        print(row)
    return int(not complete)


@contextmanager
def _launching(command: str, name: str) -> Iterator[tuple[torch.device, "Launcher", float]]:
    """The device, its launcher, and the bandwidth of its memory, on a stream. Raises ConfigError without a GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{command} times kernels of an NVIDIA GPU, and there is none")
    from bench.lib.wall import measure_wall
    from lowlat.executors.launcher import Launcher

    device = torch.device(name)
    with own_stream(device):
        wall = measure_wall(device).gb_per_s
        yield device, Launcher(device), wall


REPLAYS = 20  # of a turn and in all: with more, some slot would reach its limit


def main(arguments: Sequence[str] | None = None) -> int:
    """Time a step's kernels and write the file. Returns 1 where one could not be timed.

    Raises ConfigError without a GPU, LowlatError where an entry is missing or acceptance is wrong.
    """
    parser = bench_parser(__doc__)
    parser.add_argument("--moe", action="store_true", help="MoE layers with a shared expert, and no step")
    options = parser.parse_args(arguments)
    with _launching("bench.micro", options.device) as (device, launcher, wall):
        from bench.micro_entries import CASE, chain, check_needed, tree
        from bench.micro_moe import SIZES, moe_layers

        if options.moe:
            rows = []
            for size in SIZES:  # weights of one at a time
                rows += time_entries(launcher, moe_layers(size, device, launcher.gpu), REPLAYS, wall)
        else:
            entries = [*chain(launcher), *tree(launcher)]
            check_needed(entry.name for entry in entries)
            rows = time_entries(launcher, entries, REPLAYS, wall)
    failed = [row["name"] for row in rows if "error" in row]
    write_json(
        options.out,
        {
            **stamps_of(device, options.commit), "wall_gb_per_s": wall, "replays": REPLAYS,
            "shapes": "MoE layers, the router with its norm and the experts; a row has its rows" if options.moe else
            f"Llama-3.1-8B's width, 4 layers, {CASE.name}; a row has its slots, context and rows",
            "simulated": "random weights and rows" if options.moe else
            "random weights; the target's tokens are written so that slots accept 0 to 3 drafts",
            "complete": not failed, "rows": rows,
        },
    )  # fmt: skip
    for row in rows:
        print(json.dumps(row))
    if failed:
        print(f"{len(failed)} of {len(rows)} kernels could not be timed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    from bench import micro  # so that entries are of one class, whoever made them

    sys.exit(micro.main())
