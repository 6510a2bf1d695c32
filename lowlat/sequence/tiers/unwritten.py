"""This module lists contents whose files could not be written, as on a full disk, and says when to try again."""

import time
from collections import OrderedDict
from collections.abc import Callable

import torch

from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["Unwritten"]

RETRY_S, MAX_RETRY_S = 10.0, 600.0  # after a failure, doubled by each that follows


class Unwritten:
    """Contents without their files, those first that have waited longest. Not safe for several threads.

    They are tried one by one: after one that failed the next is due later and later, after one that was written, at
    once.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()
        self._delay_s, self._due = RETRY_S, 0.0

    @property
    def wait_s(self) -> float | None:
        """Seconds until one is due; None: there is none."""
        return max(0.0, self._due - time.monotonic()) if self._keys else None

    def note(self, key: ChunkKey, *, written: bool) -> None:
        """A content was written, or could not be."""
        self._keys.pop(key, None)
        now = time.monotonic()
        if written:
            self._delay_s, self._due = RETRY_S, now
        else:
            self._keys[key] = None
            self._due = max(self._due, now + self._delay_s)

    def take(self, held: Callable[[ChunkKey], torch.Tensor | None]) -> tuple[ChunkKey, torch.Tensor] | None:
        """The content to try next, and its key: `note` is told of it; None: none is left.

        held  gives a content; one that nobody holds any more is forgotten
        """
        while self._keys:
            key = self._keys.popitem(last=False)[0]
            content = held(key)
            if content is not None:
                self._delay_s = min(2 * self._delay_s, MAX_RETRY_S)
                return key, content
        return None
