"""This module says how many chunks of a prompt fit in the time that decoding requests may be held up."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["PrefillPace"]

CHUNKS_AT_FIRST = 4


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
