"""This module has the tiers' keys of contents, the records of copies to the device and back, and their interface."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol

import torch

__all__ = ["COMING", "ChunkKey", "Copier", "Load", "Mark", "Presence", "Save"]


class Presence(Enum):
    """The state of a content that is not in host memory yet."""

    COMING = "coming"  # it is being read from a file


COMING: Final = Presence.COMING


class ChunkKey(NamedTuple):
    """The key of a content: its chunk and its pool.

    digest  the chained digest of the chunk's tokens, all tokens before and the salt, 32 bytes
    pool    the name of the pool with its blocks or rows; "": the first pool
    """

    digest: bytes
    pool: str


class Load(NamedTuple):
    """A copy to the device: a content, [n] uint8 in host memory, and its blocks or rows of a pool, in order.

    holder  the chunk that is held until the copy, which steps do not wait for, has ended; None: the content is written
            before anything else is launched
    """

    pool: str
    places: tuple[int, ...]
    content: torch.Tensor
    holder: object = None


class Save(NamedTuple):
    """A copy from the device: the content's key, and the blocks or rows that hold it, in order.

    holder  the chunk that is held until the copy, which steps do not wait for, has ended; None: the content is read
            before anything else is launched
    spare   keep the content only while memory is free, and evict it before all others
    """

    key: ChunkKey
    places: tuple[int, ...]
    holder: object = None
    spare: bool = False


Mark = Callable[[], None]
"""A point in the device's work: when the copy thread calls it, later copies wait for that point."""


class Copier(Protocol):
    """The interface of copies between the device's blocks and host memory; steps do not wait for them."""

    def allocate(self, size: int, knob: str) -> torch.Tensor:
        """Allocate host memory, [size] uint8, from which the device can copy.

        knob  the option that lowers the size, for the error
        Raises CapacityError if the host refuses it.
        """

    def mark(self) -> Mark:
        """Return a mark of all work launched so far: copies that use it run after that work."""

    def content_bytes(self, pool: str, count: int) -> int:
        """Return the bytes of a content of `count` blocks or rows of a pool."""

    def start_in(self, loads: Sequence[Load], mark: Mark) -> Callable[[], None]:
        """Start to copy contents to their blocks; returns a function that waits until they have arrived."""

    def start_out(self, saves: Sequence[Save], contents: Sequence[torch.Tensor], mark: Mark) -> Callable[[], None]:
        """Start to copy blocks to contents, [n] uint8; returns a function that waits until they have arrived."""
