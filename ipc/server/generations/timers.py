"""The I/O thread's timers make calls at a later time."""

import heapq
import math
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Timer", "Timers"]

MIN_CANCELLED = 64  # fewer cancelled timers are not removed


class Timer:
    """A call to make at a time (monotonic). A cancelled timer has released its arguments."""

    __slots__ = ("arguments", "at", "call")

    def __init__(self, at: float, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.at = at
        self.call: Callable[..., None] | None = call
        self.arguments = arguments

    def __lt__(self, other: "Timer") -> bool:
        return self.at < other.at


class Timers:
    """A heap of calls by time. Cancelled ones are removed when they are half of it: constant time each, amortised."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._num_cancelled = 0

    def __len__(self) -> int:
        return len(self._heap)

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> Timer:
        """Schedule a call in `seconds` from now."""
        timer = Timer(time.monotonic() + seconds, call, arguments)
        heapq.heappush(self._heap, timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        """Cancel a call and release its arguments; harmless after the call, and for None."""
        if timer is None or timer.call is None:
            return
        timer.call, timer.arguments = None, ()
        self._num_cancelled += 1
        if self._num_cancelled >= max(MIN_CANCELLED, len(self._heap) / 2):
            self._heap[:] = [one for one in self._heap if one.call is not None]
            heapq.heapify(self._heap)
            self._num_cancelled = 0

    @property
    def due(self) -> float:
        """The time of the next call (monotonic); infinity without one."""
        return self._heap[0].at if self._heap else math.inf

    def run(self) -> int:
        """Make the calls that are due; returns the time until the next one in ms, rounded up, or -1 without one."""
        heap = self._heap
        while heap:
            left = heap[0].at - time.monotonic()
            if left > 0.0:
                return int(left * 1000.0) + 1
            timer = heapq.heappop(heap)
            call, arguments = timer.call, timer.arguments
            if call is None:
                self._num_cancelled -= 1
                continue
            timer.call, timer.arguments = None, ()
            call(*arguments)
        return -1
