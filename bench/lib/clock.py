"""This module times asynchronous work, one figure a replay: by device events on a GPU, by the host's clock elsewhere.

Variants that are compared run in turns of a few replays, so that they see the same clocks and temperatures.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from lowlat.tools.profile.wall import event_times

__all__ = ["LEAD", "Timed", "own_stream", "percentile", "round_robin", "time_replays"]

LEAD = 2  # replays before the timed ones of a turn, so that the device is never waiting for the host


@dataclass
class Timed:
    """Something that can be replayed, and the ms that its replays took.

    reset  called before each turn
    """

    name: str
    replay: Callable[[], None]
    reset: Callable[[], None] = lambda: None
    ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Return the median of all replays, ms."""
        return percentile(self.ms, 50)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that `percent` of the values do not exceed. Raises ValueError without values."""
    if not values:
        raise ValueError("no percentile of no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def time_replays(replay: Callable[[], None], count: int, device: torch.device, lead: int = LEAD) -> list[float]:
    """Milliseconds of each of `count` replays, queued one after the other after `lead` untimed ones."""
    for _ in range(lead):
        replay()
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            replay()
            marks.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(marks)]
    return event_times(replay, count)


def own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Measure on a new stream, where there is a GPU: the default stream waits for others."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def round_robin(entries: Sequence[Timed], replays: int, turn: int, device: torch.device) -> None:
    """Give each entry `replays` timed replays, in turns of at most `turn`, and keep the times in the entries."""
    done = 0
    while done < replays:
        count = min(turn, replays - done)
        for entry in entries:
            entry.reset()
            entry.ms += time_replays(entry.replay, count, device)
        done += count
