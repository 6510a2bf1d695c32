"""The names of chunks' contents in the tiers, and their ways to the device and back."""

from enum import Enum
from typing import Final, NamedTuple

import torch

__all__ = ["COMING", "ChunkKey", "Load", "Presence", "Save"]


class Presence(Enum):
    """The state of a content that is not in host memory."""

    COMING = "coming"  # it is being read from a file


COMING: Final = Presence.COMING


class ChunkKey(NamedTuple):
    """The chunk and the pool that a content belongs to.

    digest  the chained digest of the chunk's tokens, all before it and the salt, 32 bytes
    pool    the pool whose blocks, or rows, it is of: "" the first
    """

    digest: bytes
    pool: str


class Load(NamedTuple):
    """A content, [n] uint8 in host memory, and the blocks or rows of a pool that it is written to, in order."""

    pool: str
    places: tuple[int, ...]
    content: torch.Tensor


class Save(NamedTuple):
    """A content that is worth a copy: its key, and the blocks or rows that hold it, in order."""

    key: ChunkKey
    places: tuple[int, ...]
