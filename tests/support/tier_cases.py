"""Keys, memory and files of the prefix cache's tiers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lowlat.sequence.tiers.arena import HostArena
from lowlat.sequence.tiers.host import HostTier
from lowlat.sequence.tiers.key import ChunkKey, Load, Mark, Save

__all__ = ["Pages", "files_of", "host_tier", "key", "memory"]


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.chunk"))


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32, "")


def memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def host_tier(num_bytes: int, *pinned: ChunkKey) -> HostTier:
    return HostTier(HostArena(num_bytes, memory), lambda key: key in pinned)


class Pages:
    """A device whose blocks are bytes of a list."""

    def __init__(self, num_blocks: int = 100) -> None:
        self.blocks = torch.zeros(num_blocks, dtype=torch.uint8)

    def allocate(self, size: int, knob: str) -> torch.Tensor:
        return memory(size)

    def mark(self) -> Mark:
        return lambda: None

    def content_bytes(self, pool: str, count: int) -> int:
        return count

    def start_in(self, loads: Sequence[Load], mark: Mark) -> Callable[[], None]:
        for load in loads:
            self.blocks[list(load.places)] = load.content
        return lambda: None

    def start_out(self, saves: Sequence[Save], contents: Sequence[torch.Tensor], mark: Mark) -> Callable[[], None]:
        for save, content in zip(saves, contents, strict=True):
            content.copy_(self.blocks[list(save.places)])
        return lambda: None
