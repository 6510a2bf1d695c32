"""This module times all-reduces inside CUDA graphs, and the bandwidth between GPUs' memories.

Ranks may share a GPU; the times then show the cost of launches, not of transfers. `lowlat doctor` shows the result;
`python -m lowlat.tools.all_reduce_times [cuda:0 cuda:1]` prints it as JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lowlat.errors import DeviceError
from lowlat.executors.distributed.peers import PeerMemory, peer_problem
from lowlat.executors.launcher import Launcher
from lowlat.graphs.capture import capture
from lowlat.graphs.replay import CapturedGraph
from lowlat.kernels.collectives.all_reduce import Channel, all_reduce_add, all_reduce_add_norm
from lowlat.kernels.collectives.peers.words import MAX_RANKS
from lowlat.kernels.elementwise.norm import add_norm
from lowlat.kernels.toolchain.kernel import KernelCall

__all__ = ["AllReduceTime", "RankGraphs", "measure_all_reduce", "measure_writes", "topology"]

WIDTHS = (2880, 4096, 8192)
ROWS = (1, 4, 8)
LAUNCHES = 200  # in a graph
REPLAYS = 7
COPIED_BYTES = 1 << 28
EPS = 1e-5


@dataclass(frozen=True)
class AllReduceTime:
    """Median times of a launch in a graph of many such launches, in microseconds.

    add_us    an all-reduce of rows, with the residual stream added
    norm_us   the same, with a norm
    local_us  addition and norm of local rows, without an all-reduce
    """

    ranks: int
    rows: int
    width: int
    add_us: float
    norm_us: float
    local_us: float


class RankGraphs:
    """Each rank's launches as a graph on its own stream, started back to back by one thread.

    devices  the device of each rank
    rows     the most rows by width, see `PeerMemory`
    """

    def __init__(self, devices: Sequence[torch.device], rows: dict[int, int]) -> None:
        self.peers = PeerMemory(devices, rows)
        self._launchers = {device: Launcher(device) for device in devices}
        self._streams = [torch.cuda.Stream(device) for device in devices]

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[Any]:
        """Make a rank's device and stream torch's current ones; gives the stream as a cuda.core stream."""
        device = self.peers.devices[rank]
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(self._streams[rank]))
            yield self._launchers[device].stream()

    def capture(self, calls_of: Callable[[int], Sequence[KernelCall]]) -> list[CapturedGraph]:
        """Capture the calls of each rank in a graph."""
        graphs = []
        for rank, device in enumerate(self.peers.devices):
            calls = calls_of(rank)
            with self.on_rank(rank) as stream:
                graphs.append(capture(stream, self._launchers[device].load(calls)))
        return graphs

    def start(self, graphs: Sequence[CapturedGraph]) -> None:
        """Launch one graph of each of the first ranks."""
        for rank, graph in enumerate(graphs):
            with self.on_rank(rank) as stream:
                graph.launch(stream)

    def wait(self) -> None:
        """Wait until all graphs that were started have ended."""
        for stream in self._streams:
            stream.synchronize()

    def time_us(self, calls_of: Callable[[int], Sequence[KernelCall]]) -> float:
        """Return the median time of replaying all ranks' graphs at once."""
        graphs, times = self.capture(calls_of), []
        for _ in range(REPLAYS):
            self.wait()
            start = time.perf_counter()
            self.start(graphs)
            self.wait()
            times.append((time.perf_counter() - start) * 1e6)
        return sorted(times)[REPLAYS // 2]


def measure_all_reduce(
    devices: Sequence[torch.device], widths: Sequence[int] = WIDTHS, rows: Sequence[int] = ROWS
) -> list[AllReduceTime]:
    """Measure all-reduces among ranks on these GPUs.

    Raises ConfigError if they cannot access each other's memory, DeviceError if one waited for another in vain.
    """
    graphs, found = RankGraphs(devices, dict.fromkeys(widths, max(rows))), []
    for width in widths:
        for count in rows:
            found.append(_measure(graphs, count, width))
    if (problem := graphs.peers.problem()) is not None:
        raise DeviceError(problem)
    return found


def _measure(graphs: RankGraphs, rows: int, width: int) -> AllReduceTime:
    devices, peers = graphs.peers.devices, graphs.peers

    def tensors(rank: int) -> dict[str, torch.Tensor]:
        device = devices[rank]
        made = {"x": torch.randn(rows, width, device=device)}
        halves = ("a", "total", "out")
        return made | {name: torch.randn(rows, width, device=device).bfloat16() for name in halves}

    held = [tensors(rank) for rank in range(len(devices))]
    weights = [torch.ones(width, dtype=torch.bfloat16, device=device) for device in devices]
    torch.cuda.synchronize(devices[0])

    def adds(rank: int, channel: Channel) -> list[KernelCall]:
        x, a, total = (held[rank][name] for name in ("x", "a", "total"))
        return all_reduce_add(x, a, channel=channel, total=total)

    def norms(rank: int, channel: Channel | None) -> list[KernelCall]:
        x, a, total, out = (held[rank][name] for name in ("x", "a", "total", "out"))
        if channel is None:
            return add_norm(a, x, weights[rank], total=total, out=out, eps=EPS)
        return all_reduce_add_norm(x, a, weights[rank], channel=channel, total=total, out=out, eps=EPS)

    times = [
        graphs.time_us(lambda rank: adds(rank, peers.channel(rank, width)) * LAUNCHES),
        graphs.time_us(lambda rank: norms(rank, peers.channel(rank, width, whole=True)) * LAUNCHES),
        graphs.time_us(lambda rank: norms(rank, None) * LAUNCHES),
    ]
    each = [round(total / LAUNCHES, 3) for total in times]
    return AllReduceTime(len(devices), rows, width, *each)


def measure_writes(source: torch.device, target: torch.device) -> float:
    """Measure the GB/s of copies from one GPU's memory to another's."""
    here = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=source)
    there = torch.empty_like(here, device=target)
    with torch.cuda.device(source):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        there.copy_(here)
        start.record()
        for _ in range(REPLAYS):
            there.copy_(here)
        end.record()
        end.synchronize()
        return round(REPLAYS * COPIED_BYTES / float(start.elapsed_time(end)) / 1e6, 1)


def topology() -> dict[str, Any]:
    """Measure the links between this host's GPUs: times of all-reduces among all, GB/s by pairs; returns JSON values.

    problem  why they cannot access each other; None if they can, or if there is only one GPU and nothing to measure
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cuda", gpu) for gpu in range(count)][:MAX_RANKS]
    report: dict[str, Any] = {"cards": count, "problem": peer_problem(devices), "exchange": [], "write_gb_s": {}}
    if count > 1 and report["problem"] is None:
        report["exchange"] = [asdict(each) for each in measure_all_reduce(devices, WIDTHS[1:2], ROWS)]
        pairs = ((one, other) for one in devices for other in devices if one != other)
        report["write_gb_s"] = {f"{one} to {other}": measure_writes(one, other) for one, other in pairs}
    return report


if __name__ == "__main__":
    asked = [torch.device(name) for name in sys.argv[1:] or ["cuda:0", "cuda:0"]]
    report = {"devices": [str(device) for device in asked], "times": list(map(asdict, measure_all_reduce(asked)))}
    print(json.dumps(report, indent=1))
