"""Things to do at a later time, for the I/O thread."""

import heapq
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Timers"]


class Timers:
    """Calls by time. What became pointless until then is the callee's to see: nothing is taken back."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._ties = itertools.count()

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call so many seconds from now."""
        heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._ties), call, arguments))

    @property
    def due(self) -> float:
        """When the next call is due (monotonic), infinity without one."""
        return self._heap[0][0] if self._heap else math.inf

    def run(self) -> int:
        """Call what is due; returns how long a poll may wait for the next, in ms, rounded up, -1 without one."""
        heap = self._heap
        while heap:
            left = heap[0][0] - time.monotonic()
            if left > 0.0:
                return int(left * 1000.0) + 1
            _, _, call, arguments = heapq.heappop(heap)
            call(*arguments)
        return -1
