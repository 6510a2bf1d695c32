"""This module measures the memory wall: the bandwidth at which a kernel can read this GPU's memory, GB/s.

It reads random data in several ways, of which the fastest counts, and checks the data by its exclusive or. The figure
is the denominator of every share of the wall, and is measured in the run that uses it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median_low

import torch

__all__ = ["Wall", "event_times", "exclusive_or", "measure_wall"]

GIBIBYTE = 1 << 30
MEBIBYTE = 1 << 20
FREE_SHARE = 4  # one in so many bytes of the free memory is read, at most; the check takes half as much again
WAYS = ((512, 4, False), (512, 4, True), (1024, 2, False), (256, 8, False), (512, 8, False), (512, 16, False))
REPLAYS = 40
TURN = 10
LEAD = 2


@dataclass(frozen=True)
class Wall:
    """Median bandwidth of the fastest way to read, and of each way."""

    gb_per_s: float
    read_bytes: int
    replays: int
    ways: dict[str, float]


def exclusive_or(words: torch.Tensor) -> int:
    """Compute the exclusive or of all words [n] of an integer dtype; takes half of their memory more."""
    while words.numel() > 1:
        half = words.numel() // 2
        folded = words[:half] ^ words[half : 2 * half]
        if words.numel() % 2:
            folded[0] ^= words[-1]
        words = folded
    return int(words.item())


def event_times(replay: Callable[[], object], count: int) -> list[float]:
    """Measure the milliseconds of `count` replays on torch's current stream, queued one after the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def measure_wall(device: torch.device, read_bytes: int | None = None, replays: int = REPLAYS) -> Wall:
    """Measure on a CUDA device, on torch's current stream.

    read_bytes  None: 4 GiB, or a quarter of the free memory if that is less
    Ways take turns, so that all see the same clocks. Raises ArithmeticError if a way did not read all of the data.
    """
    from lowlat.executors.launcher import Launcher
    from lowlat.kernels.common.stream_read import stream_read

    launcher = Launcher(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    size = _affordable(device) if read_bytes is None else read_bytes
    source = torch.empty(size // 8, dtype=torch.int64, device=device).random_()
    expected = exclusive_or(source.view(torch.int32))
    stream = launcher.stream()
    issues: dict[str, Callable[[], None]] = {}
    written = []  # launches hold only addresses: the tensors that they write must outlive them
    for threads, blocks_each, spread in WAYS:
        blocks = processors * blocks_each
        out = torch.zeros(blocks * threads, dtype=torch.int32, device=device)
        (call,) = stream_read(source, out=out, blocks=blocks, threads=threads, spread=spread)
        launcher.run(call)
        if exclusive_or(out) != expected:
            raise ArithmeticError(f"{call.kernel.name} did not read every word once")
        issues[call.kernel.name] = partial(launcher.prepare(call).issue, stream)
        written.append(out)
    times = _turns(issues, replays)
    ways = {name: size / median_low(ms) / 1e6 for name, ms in times.items()}
    return Wall(max(ways.values()), size, replays, ways)


def _turns(issues: dict[str, Callable[[], None]], replays: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in issues}
    done = 0
    while done < replays:
        count = min(TURN, replays - done)
        for name, issue in issues.items():
            for _ in range(LEAD):  # so that the device never waits for the host in a timed one
                issue()
            times[name] += event_times(issue, count)
        done += count
    return times


def _affordable(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return max(MEBIBYTE, min(4 * GIBIBYTE, free // FREE_SHARE // MEBIBYTE * MEBIBYTE))
