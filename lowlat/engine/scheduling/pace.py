"""This module learns how many chunks of a prompt fit in the time for which decoding requests may be delayed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PrefillPace"]

CHUNKS_AT_FIRST = 4


class PrefillPace:
    """Learns how many chunks of prefill take at most `max_stall_ms`, from the last chunks that ran.

    A chunk takes longer if few run at once, and after a long text. So an estimate from few chunks is too low; the next
    chunks correct it.
    """

    def __init__(self, max_stall_ms: float) -> None:
        self._max_stall_ms = max_stall_ms
        self.num_chunks = CHUNKS_AT_FIRST

    @contextmanager
    def timed(self, num_chunks: float) -> Iterator[None]:
        """Time the run of several chunks."""
        begun = time.monotonic()
        yield
        self.saw(num_chunks, time.monotonic() - begun)

    def saw(self, num_chunks: float, seconds: float) -> None:
        """Learn from the time of chunks that ran at once; less than a whole chunk is ignored."""
        if num_chunks >= 1:
            self.num_chunks = max(1, int(self._max_stall_ms * num_chunks / max(1e3 * seconds, 1e-3)))
