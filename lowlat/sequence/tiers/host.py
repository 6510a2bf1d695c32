"""The host tier keeps contents of chunks in the process's memory; those used longest ago go first."""

from collections import OrderedDict
from collections.abc import Callable

import torch

from lowlat.sequence.tiers.arena import HostArena
from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["HostTier"]

PINNED_SHARE = 0.75  # of the memory, that pinned contents hold at most: what is read from files needs some


def _nothing(key: ChunkKey) -> bool:
    return False


class HostTier:
    """Contents of chunks by key, [n] uint8 each, in the memory of an arena. Not safe for several threads.

    is_pinned  whether a content is to stay while others can go
    """

    def __init__(self, arena: HostArena, is_pinned: Callable[[ChunkKey], bool] = _nothing) -> None:
        self.num_bytes = 0
        self._arena, self._is_pinned = arena, is_pinned
        self._kept: OrderedDict[ChunkKey, torch.Tensor] = OrderedDict()  # the first to go first

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._kept

    def get(self, key: ChunkKey) -> torch.Tensor | None:
        """The content of a key, which is then the newest; None where it is not there."""
        content = self._kept.get(key)
        if content is not None:
            self._kept.move_to_end(key)
        return content

    def touch(self, key: ChunkKey) -> None:
        """Make a content the newest, if it is there."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def reserve(self, size: int) -> torch.Tensor | None:
        """Memory for a content of so many bytes; the oldest ones go where there is none left.

        None: it is larger than the tier, or all that could go is under way to the device.
        """
        while (memory := self._arena.take(size)) is None:
            if not self._evict(size):
                return None
        return memory

    def put(self, key: ChunkKey, content: torch.Tensor) -> None:
        """Keep a content that lies in memory of `reserve`."""
        self.drop(key)
        self._kept[key] = content
        self.num_bytes += content.numel()

    def drop(self, key: ChunkKey) -> None:
        """Let go of a content, if it is there."""
        if key in self._kept:
            self.num_bytes -= self._kept.pop(key).numel()

    def _evict(self, size: int) -> bool:
        """Let the oldest content go, of this size before others, and without a pin before those with one."""
        oldest = None
        for key, content in self._kept.items():
            if not self._is_pinned(key):
                oldest = oldest or key
                if content.numel() == size:
                    oldest = key
                    break
        if oldest is None and self.num_bytes > PINNED_SHARE * self._arena.num_bytes:
            oldest = next(iter(self._kept), None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True
