"""Keys, memory and files of the prefix cache's tiers."""

from pathlib import Path

import torch

from lowlat.sequence.tiers.arena import HostArena
from lowlat.sequence.tiers.host import HostTier
from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["files_of", "host_tier", "key", "memory"]


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.chunk"))


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32, "")


def memory(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def host_tier(num_bytes: int, *pinned: ChunkKey) -> HostTier:
    return HostTier(HostArena(num_bytes, memory), lambda key: key in pinned)
