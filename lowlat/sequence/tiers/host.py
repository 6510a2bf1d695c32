"""The host tier keeps contents of chunks in the process's memory, and evicts the least recently used first.

A content that comes back takes only the place of contents that were not used since it was last asked for. So if too
many texts take turns, some of them stay; with plain LRU each would be evicted before its turn.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

import torch

from lowlat.sequence.tiers.arena import HostArena
from lowlat.sequence.tiers.key import ChunkKey

__all__ = ["HostTier"]

PINNED_SHARE = 0.75  # of the memory, at most, is kept for pinned contents: reads from files need the rest
NUM_OLDEST = 256  # contents whose slabs are searched if the oldest is too small,
NUM_SLABS = 16  # and slabs searched: requests that look up contents wait meanwhile


def _nothing(key: ChunkKey) -> bool:
    return False


class HostTier:
    """Contents of chunks by key, [n] uint8 each, in an arena's memory. Not safe for several threads.

    is_pinned  whether a content is evicted only after those without a pin
    """

    def __init__(self, arena: HostArena, is_pinned: Callable[[ChunkKey], bool] = _nothing) -> None:
        self.num_bytes = 0
        self.now = 0  # a clock that counts uses of contents
        self._num_spare = 0  # spare contents that were put so far
        self._arena, self._is_pinned = arena, is_pinned
        self._kept: OrderedDict[ChunkKey, torch.Tensor] = OrderedDict()  # in the order of eviction
        self._used: dict[ChunkKey, int] = {}  # when each was used last
        self._keys: dict[int, ChunkKey] = {}  # by address

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._kept

    @property
    def capacity(self) -> int:
        """Bytes of its memory."""
        return self._arena.num_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest content that it can hold."""
        return self._arena.slab_bytes

    def get(self, key: ChunkKey) -> torch.Tensor | None:
        """Return the content of a key, or None."""
        return self._kept.get(key)

    def touch(self, key: ChunkKey) -> None:
        """Make a content the most recently used, if it is there."""
        if key in self._kept:
            self._kept.move_to_end(key)
            self.now += 1
            self._used[key] = self.now

    def reserve(self, size: int, before: int | None = None) -> torch.Tensor | None:
        """Take memory for a content of `size` bytes, and evict the oldest contents if none is free.

        before  evict only contents whose last use was before this time of `now`
        Returns None if the size exceeds a slab, or if all contents that could go are on their way to the device or were
        used later.
        """
        while (memory := self._arena.take(size)) is None:
            if size > self._arena.slab_bytes or not self._evict(size, self.now + 1 if before is None else before):
                return None
        return memory

    def has_space(self, size: int) -> bool:
        """Whether memory for a content of `size` bytes is free."""
        return self._arena.largest >= size

    def put(self, key: ChunkKey, content: torch.Tensor, *, spare: bool = False) -> None:
        """Keep a content that lies in memory of `reserve`; spare: it is evicted first, unless it is used."""
        self.drop(key)
        self._kept[key] = content
        if spare:
            self._kept.move_to_end(key, last=False)
            self._num_spare += 1
            self._used[key] = -self._num_spare
        else:
            self.touch(key)
        self.num_bytes += content.numel()
        if content.numel():
            self._keys[content.data_ptr()] = key

    def drop(self, key: ChunkKey) -> None:
        """Forget a content, if it is there."""
        content = self._kept.pop(key, None)
        if content is not None:
            del self._used[key]
            self._keys.pop(content.data_ptr(), None)
            self.num_bytes -= content.numel()

    def _evict(self, size: int, before: int) -> bool:
        """Evict the oldest content if it is large enough, else a run of neighbours that is; returns whether it did.

        Runs are searched around the oldest contents. The one whose newest content was used longest ago goes. Pinned
        contents go after others.
        """
        passes: list[Callable[[ChunkKey], bool]] = [lambda key: not self._is_pinned(key)]
        if self.num_bytes > PINNED_SHARE * self._arena.num_bytes:
            passes.append(lambda key: True)
        for may_go in passes:
            oldest = list(islice(filter(may_go, self._kept), NUM_OLDEST))
            if oldest and self._used[oldest[0]] < before:
                gone = oldest[:1]
                if 0 < self._kept[oldest[0]].numel() < size:
                    run: tuple[int, list[ChunkKey]] = self.now + 1, []
                    for key in self._one_a_slab(oldest):
                        run = self._around(key, size, may_go, run[0]) or run
                    if run[1] and run[0] >= before:
                        return False
                    gone = run[1] or gone
                for key in gone:
                    self.drop(key)
                return True
        return False

    def _one_a_slab(self, oldest: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the oldest content of each slab, for the first NUM_SLABS slabs."""
        found: dict[int, ChunkKey] = {}
        for key in oldest:
            if (content := self._kept[key]).numel():
                found.setdefault(self._arena.slab_of(content.data_ptr()), key)
        return list(found.values())[:NUM_SLABS]

    def _around(
        self, key: ChunkKey, size: int, may_go: Callable[[ChunkKey], bool], before: int
    ) -> tuple[int, list[ChunkKey]] | None:
        """Find a run of contents around one, with the free pieces between them, that has `size` bytes.

        Returns the time of its newest content's last use, and its keys; None if too few of them may go, or if one was
        used at `before` or later.
        """
        content = self._kept[key]
        total, newest, found = content.numel(), self._used[key], [key]
        sides = [self._side(content.data_ptr(), step, may_go) for step in (-1, 1)]
        while newest < before:
            if total >= size:
                return newest, found
            left, right = sides
            if left is None and right is None:
                return None
            place = int(left is None or (right is not None and right[0] < left[0]))
            used, start, num_bytes, near = sides[place] or (0, 0, 0, None)
            total, newest = total + num_bytes, max(newest, used)
            if near is not None:
                found.append(near)
            sides[place] = self._side(start, (-1, 1)[place], may_go)
        return None

    def _side(
        self, start: int, step: int, may_go: Callable[[ChunkKey], bool]
    ) -> tuple[int, int, int, ChunkKey | None] | None:
        """Return the neighbouring piece: when it was used, its start and bytes, and its key, None if it is free.

        Returns None if there is none, or if it may not go.
        """
        piece = self._arena.beside(start, step)
        if piece is None:
            return None
        start, num_bytes, is_free = piece
        near = self._keys.get(start)
        if near is None:
            return (0, start, num_bytes, None) if is_free else None
        return (self._used[near], start, num_bytes, near) if may_go(near) else None
