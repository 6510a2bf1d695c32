"""The arena is the host tier's memory: it is allocated once, and handed out in pieces of the contents' sizes.

Memory from which a device copies is slow to allocate, and meanwhile the driver holds a lock that launches wait for. So
the arena allocates nothing while steps run.
"""

import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable

import torch

__all__ = ["HostArena"]

SLAB_BYTES = 512 << 20  # at most; snapshots of large hybrids are 150 MB, and the end of a slab may be too small for one
MIN_SLABS = 8
ALIGNMENT = 4096


class HostArena:
    """Host memory in slabs, from which pieces are taken. A piece is identified by its address.

    A piece is free again when nobody holds its tensor any more; it is then merged with free neighbours.

    max_bytes   the most bytes of all slabs together
    allocate    allocates [n] uint8 in host memory from which the device can copy
    slab_bytes  bytes of a slab, the limit of a piece
    Several threads may call it, one at a time. Others may drop tensors meanwhile: `take` then frees their pieces.
    """

    def __init__(self, max_bytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        size = min(SLAB_BYTES, 1 << max(0, (max_bytes // MIN_SLABS).bit_length() - 1))  # torch rounds others up
        slabs = [allocate(size) for _ in range(max_bytes // size)]
        self.num_bytes = size * len(slabs)
        self.slab_bytes = size
        self._slabs = {slab.data_ptr(): slab for slab in slabs}
        self._bases = sorted(self._slabs)
        self._starts = {base: [base] for base in self._bases}  # starts of a slab's pieces, taken and free, ascending
        self._sizes = dict.fromkeys(self._bases, size)
        self._free = [(size, base) for base in self._bases]  # sizes and starts, ascending
        self._returned: list[int] = []  # the thread that drops a tensor appends its start

    @property
    def largest(self) -> int:
        """Bytes of the largest free piece."""
        self._take_back()
        return self._free[-1][0] if self._free else 0

    def take(self, size: int) -> torch.Tensor | None:
        """Take memory, [size] uint8, not cleared, from the smallest free piece that is large enough.

        Returns None if there is none.
        """
        if not size:  # a content of blocks in which no layer keeps anything
            return torch.empty(0, dtype=torch.uint8)
        piece = -(-size // ALIGNMENT) * ALIGNMENT
        self._take_back()
        place = bisect_left(self._free, (piece, 0))
        if place == len(self._free):
            return None
        whole, start = self._free.pop(place)
        base = self.slab_of(start)
        self._sizes[start] = piece
        if whole > piece:
            insort(self._starts[base], start + piece)
            self._add(start + piece, whole - piece)
        memory = self._slabs[base][start - base : start - base + size]
        weakref.finalize(memory, self._returned.append, start).atexit = False
        return memory

    def slab_of(self, address: int) -> int:
        """Return the address at which the slab of an address begins."""
        return self._bases[bisect_right(self._bases, address) - 1]

    def beside(self, start: int, step: int) -> tuple[int, int, bool] | None:
        """Return the piece before another of its slab (`step` -1) or after it (1): start, bytes, whether it is free."""
        starts = self._starts[self.slab_of(start)]
        place = bisect_left(starts, start) + step
        if not 0 <= place < len(starts):
            return None
        return starts[place], self._sizes[starts[place]], self._is_free(starts[place])

    def _is_free(self, start: int) -> bool:
        piece = self._sizes[start], start
        place = bisect_left(self._free, piece)
        return place < len(self._free) and self._free[place] == piece

    def _add(self, start: int, size: int) -> None:
        """Record a free piece."""
        self._sizes[start] = size
        insort(self._free, (size, start))

    def _join(self, start: int) -> int:
        """Remove a free piece that is merged into a neighbour; returns its bytes."""
        size = self._sizes.pop(start)
        del self._free[bisect_left(self._free, (size, start))]
        return size

    def _take_back(self) -> None:
        while self._returned:
            start = self._returned.pop()
            starts, size = self._starts[self.slab_of(start)], self._sizes.pop(start)
            place = bisect_left(starts, start)
            if place + 1 < len(starts) and self._is_free(starts[place + 1]):
                size += self._join(starts.pop(place + 1))
            if place and self._is_free(starts[place - 1]):
                starts.pop(place)
                start = starts[place - 1]
                size += self._join(start)
            self._add(start, size)
