"""The host tier: contents of chunks in the process's memory, those used longest ago gone first."""

from collections import OrderedDict

import torch

from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["HostTier"]


class HostTier:
    """Contents of chunks by key, [n] uint8 each, of at most so many bytes together. Not safe for several threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
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

    def put(self, key: ChunkKey, content: torch.Tensor) -> None:
        """Keep a content; the oldest ones go where it leaves no space for them. One above the budget is not kept."""
        self.drop(key)
        if content.numel() > self.max_bytes:
            return
        while self.num_bytes + content.numel() > self.max_bytes:
            self._forget(next(iter(self._kept)))
        self._kept[key] = content
        self.num_bytes += content.numel()

    def drop(self, key: ChunkKey) -> None:
        """Let go of a content, if it is there."""
        if key in self._kept:
            self._forget(key)

    def _forget(self, key: ChunkKey) -> None:
        self.num_bytes -= self._kept.pop(key).numel()
