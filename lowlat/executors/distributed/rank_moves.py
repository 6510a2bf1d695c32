"""This module copies blocks between the devices of several ranks and host memory, as if they were one device.

Each rank holds its part of the heads. So the content of some blocks is the ranks' contents, concatenated in order of
rank. The ranks' copies are started in turns, so that all buses work at once.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from lowlat.executors.block_moves import BlockMover
from lowlat.executors.bus_copies import start_together
from lowlat.graphs import BufferSet
from lowlat.sequence.tiers.key import Load, Mark, Save

__all__ = ["RankMover"]


class RankMover:
    """Runs the movers of all ranks, in order, as one; see `lowlat.executors.block_moves.ContentMover`."""

    def __init__(self, movers: Sequence[BlockMover]) -> None:
        self._movers = tuple(movers)

    @property
    def states(self) -> tuple[BufferSet, ...]:
        """Each rank's state."""
        return tuple(state for mover in self._movers for state in mover.states)

    def allocate(self, size: int, knob: str) -> torch.Tensor:
        """See `BlockMover.allocate`: all devices copy from pinned memory."""
        return self._movers[0].allocate(size, knob)

    def mark(self) -> Mark:
        """Mark the work launched so far on every rank."""
        return _Marks([mover.mark() for mover in self._movers])

    def content_bytes(self, pool: str, count: int) -> int:
        """The bytes of `count` blocks or rows of a pool, over all ranks."""
        return sum(mover.content_bytes(pool, count) for mover in self._movers)

    def start_in(self, loads: Sequence[Load], mark: Mark) -> Callable[[], None]:
        """See `BlockMover.start_in`; the returned function waits for all ranks."""
        contents = [self._parts(load.pool, len(load.places), load.content) for load in loads]
        ranks = [
            [load._replace(content=own[rank]) for load, own in zip(loads, contents, strict=True)]
            for rank in range(len(self._movers))
        ]
        return start_together(
            mover.starting_in(own, each) for mover, own, each in zip(self._movers, ranks, _marks_of(mark), strict=True)
        )

    def start_out(self, saves: Sequence[Save], contents: Sequence[torch.Tensor], mark: Mark) -> Callable[[], None]:
        """See `BlockMover.start_out`; the returned function waits for all ranks."""
        pairs = zip(saves, contents, strict=True)
        parts = [self._parts(save.key.pool, len(save.places), content) for save, content in pairs]
        return start_together(
            mover.starting_out(saves, [own[rank] for own in parts], each)
            for rank, (mover, each) in enumerate(zip(self._movers, _marks_of(mark), strict=True))
        )

    def read(self, pool: str, places: Sequence[int]) -> Callable[[], torch.Tensor]:
        """See `BlockMover.read`."""
        waits = [mover.read(pool, places) for mover in self._movers]
        return lambda: torch.cat([wait() for wait in waits])

    def write(self, pool: str, places: Sequence[int], content: torch.Tensor) -> None:
        """See `BlockMover.write`."""
        for mover, own in zip(self._movers, self._parts(pool, len(places), content), strict=True):
            mover.write(pool, places, own, content)

    def _parts(self, pool: str, count: int, content: torch.Tensor) -> list[torch.Tensor]:
        """Split a content by rank. Raises ValueError for a content of the wrong size."""
        sizes = [mover.content_bytes(pool, count) for mover in self._movers]
        if content.numel() != sum(sizes):
            raise ValueError(f"a content of {content.numel()} bytes for {count} places of {sum(sizes)}")
        ends = list(accumulate(sizes))
        return [content[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class _Marks:
    """A mark of each rank."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self.marks = marks

    def __call__(self) -> None:
        for mark in self.marks:
            mark()


def _marks_of(mark: Mark) -> Sequence[Mark]:
    """The mark of each rank. Raises ValueError for a mark that `RankMover.mark` has not made."""
    if not isinstance(mark, _Marks):
        raise ValueError(f"a mark of another mover: {mark!r:.100}")
    return mark.marks
