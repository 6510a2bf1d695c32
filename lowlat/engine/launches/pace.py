"""This module learns the pace of steps, so that the host sleeps through the first part of one rather than polls.

A thread that polls for whole steps has used up its share of a core where other programs want it, and then loses the
core for milliseconds at a time: among processes that spin on every core, the end of a step of 3.7 ms was seen 5.8 ms
late at p99 and 13.9 at p99.9 by a thread that polls, 3.8 and 4.0 by one that sleeps through half of it; at the
median neither was late by a microsecond (two cores of an AMD EPYC).
"""

import time
from collections import deque
from statistics import median

__all__ = ["Pace"]

MEMORY = 8  # intervals
MIN_STEP_S = 0.002  # steps of less are polled for: a sleep may end 0.1 ms late
PART = 0.5  # of a step
REGULAR = 1.1  # times the usual interval: after a longer one the step that runs began earlier than it was seen to


class Pace:
    """Learns the interval between the ends of steps of one kind, in seconds of the host's clock."""

    def __init__(self) -> None:
        self._intervals: deque[float] = deque(maxlen=MEMORY)
        self._kind: object = None
        self._seen = 0.0

    def saw(self, kind: object, now: float) -> None:
        """The end of a step was seen; kind tells steps that take equally long."""
        if kind != self._kind:
            self._kind = kind
            self._intervals.clear()
        else:
            self._intervals.append(now - self._seen)
        self._seen = now

    def nap_s(self, kind: object, now: float) -> float:
        """How long to sleep before polling for the end of the step that began with the last one's; 0.0: not at all."""
        if kind != self._kind or len(self._intervals) < MEMORY:
            return 0.0
        usual = median(self._intervals)
        if usual < MIN_STEP_S or self._intervals[-1] > REGULAR * usual:
            return 0.0
        return max(0.0, self._seen + PART * usual - now)

    def nap(self, kind: object) -> None:
        """Sleep as `nap_s` says."""
        seconds = self.nap_s(kind, time.monotonic())
        if seconds:
            time.sleep(seconds)
