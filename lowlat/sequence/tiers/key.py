"""This module names chunks' contents in the tiers, their ways to the device and back, and who copies them."""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, NamedTuple, Protocol

import torch

__all__ = ["COMING", "ChunkKey", "Copier", "Load", "Mark", "Presence", "Save"]


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
    """A content, [n] uint8 in host memory, and the blocks or rows of a pool that it is written to, in order.

    holder  the chunk that is held until it has come, by a copy that steps do not wait for; None: it is written before
            anything else is launched
    """

    pool: str
    places: tuple[int, ...]
    content: torch.Tensor
    holder: object = None


class Save(NamedTuple):
    """A content that is worth a copy: its key, and the blocks or rows that hold it, in order.

    holder     the chunk that is held until it was copied, so that steps do not wait for that; None: it is read before
               anything else is launched
    spare      it is kept where memory is free, and goes before all others
    """

    key: ChunkKey
    places: tuple[int, ...]
    holder: object = None
    spare: bool = False


Mark = Callable[[], None]
"""A point in what the device was told: called on the thread of copies, it has later ones wait for it."""


class Copier(Protocol):
    """Copies between blocks of the device and host memory that steps do not wait for."""

    def allocate(self, size: int, knob: str) -> torch.Tensor:
        """Host memory of so many bytes, [n] uint8, from which the device copies; `knob` lowers what is asked for.

        Raises CapacityError where it is refused.
        """

    def mark(self) -> Mark:
        """All that was launched until now, for copies to come after it."""

    def content_bytes(self, pool: str, count: int) -> int:
        """The bytes of a content of so many blocks or rows of a pool."""

    def start_in(self, loads: Sequence[Load], mark: Mark) -> Callable[[], None]:
        """Start to copy contents to their blocks; returns a function that waits until they are there."""

    def start_out(self, saves: Sequence[Save], contents: Sequence[torch.Tensor], mark: Mark) -> Callable[[], None]:
        """Start to copy blocks to contents, [n] uint8; returns a function that waits until they are there."""
