"""This module lists contents whose files could not be written, as on a full disk, and times the retries."""

import time
from collections import OrderedDict
from collections.abc import Callable

import torch

from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["Unwritten"]

RETRY_S, MAX_RETRY_S = 10.0, 600.0  # the first delay after a failure, doubled by each further one, and the largest


class Unwritten:
    """Keys of contents without files, those that have waited longest first. Not safe for several threads.

    They are tried one by one. After a failure the next try is due after a delay, which doubles each time; after a
    success it is due at once.
    """

    def __init__(self) -> None:
        self._keys: OrderedDict[ChunkKey, None] = OrderedDict()
        self._delay_s, self._due = RETRY_S, 0.0

    @property
    def wait_s(self) -> float | None:
        """Seconds until the next try; None: nothing is to be tried."""
        return max(0.0, self._due - time.monotonic()) if self._keys else None

    def note(self, key: ChunkKey, *, written: bool) -> None:
        """Record that a content was written, or could not be."""
        self._keys.pop(key, None)
        now = time.monotonic()
        if written:
            self._delay_s, self._due = RETRY_S, now
        else:
            self._keys[key] = None
            self._due = max(self._due, now + self._delay_s)

    def take(self, held: Callable[[ChunkKey], torch.Tensor | None]) -> tuple[ChunkKey, torch.Tensor] | None:
        """Take the key and the content to try next; the caller calls `note` afterwards. None: none is left.

        held  returns the content of a key; keys whose content is gone are forgotten
        """
        while self._keys:
            key = self._keys.popitem(last=False)[0]
            content = held(key)
            if content is not None:
                self._delay_s = min(2 * self._delay_s, MAX_RETRY_S)
                return key, content
        return None
