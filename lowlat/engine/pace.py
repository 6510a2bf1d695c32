"""The pace of steps, by which a host sleeps through the first part of a step rather than poll for its end.

A thread that polls for whole steps has used up its share of a core where other programs want it, and then loses the
core for milliseconds at a time: among processes that spin on every core, the end of a step of 3.7 ms was seen 5.8 ms
late at p99 and 13.9 at p99.9 by a thread that polls, 3.8 and 4.0 by one that sleeps through half of it; at the
median neither was late by a microsecond (two cores of an AMD EPYC).

The pace of prefill likewise: how many chunks of a prompt fit in the time that decoding requests may be held up.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

__all__ = ["Pace", "PrefillPace"]

MEMORY = 8  # intervals
MIN_STEP_S = 0.002  # steps of less are polled for: a sleep may end 0.1 ms late
PART = 0.5  # of a step
CHUNKS_AT_FIRST = 4
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


class PrefillPace:
    """Learns how many chunks of prefill take no longer than `max_stall_ms`, from the last that ran.

    A chunk takes longer when few run at once, and after a long text. An estimate from few chunks is therefore too low,
    and is corrected by the next that run.
    """

    def __init__(self, max_stall_ms: float) -> None:
        self._max_stall_ms = max_stall_ms
        self.num_chunks = CHUNKS_AT_FIRST

    @contextmanager
    def timed(self, num_chunks: float) -> Iterator[None]:
        """Time so many chunks at once."""
        begun = time.monotonic()
        yield
        self.saw(num_chunks, time.monotonic() - begun)

    def saw(self, num_chunks: float, seconds: float) -> None:
        """Learn from so many chunks that ran at once; less than a whole one is ignored."""
        if num_chunks >= 1:
            self.num_chunks = max(1, int(self._max_stall_ms * num_chunks / max(1e3 * seconds, 1e-3)))
