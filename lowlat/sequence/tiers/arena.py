"""The arena is the host tier's memory: allocated once, and handed out in pieces of the sizes that contents have.

Memory from which a device copies is slow to allocate, and its driver takes a lock meanwhile that launches wait for: so
nothing is allocated while steps run, and the tier takes what it was given and no more.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable

import torch

__all__ = ["HostArena"]

SLAB_BYTES = 256 << 20
MIN_SLABS = 8  # contents of several sizes have slabs of their own
ALIGNMENT = 4096


class HostArena:
    """Host memory in slabs, each cut into pieces of one size. A piece is free again when nobody holds its tensor.

    max_bytes  of all slabs together
    allocate   makes [n] uint8 in host memory, from which the device copies
    Safe for several threads, as long as one at a time calls `take`.
    """

    def __init__(self, max_bytes: int, allocate: Callable[[int], torch.Tensor]) -> None:
        size = min(SLAB_BYTES, 1 << max(0, (max_bytes // MIN_SLABS).bit_length() - 1))  # torch rounds others up
        self._slabs = [allocate(size) for _ in range(max_bytes // size)]
        self.num_bytes = size * len(self._slabs)
        self._slab_bytes = size
        self._whole = list(range(len(self._slabs)))  # slabs of which no piece is out
        self._pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)  # free ones by size: slab and start
        self._returned: list[tuple[int, int, int]] = []  # appended to by whatever thread drops a tensor
        self._num_out = [0] * len(self._slabs)

    def take(self, size: int) -> torch.Tensor | None:
        """Memory of so many bytes, [n] uint8, as it was left; None where there is none."""
        if not size:  # of blocks of which no layer keeps anything
            return torch.empty(0, dtype=torch.uint8)
        piece = -(-size // ALIGNMENT) * ALIGNMENT
        self._take_back()
        if piece > self._slab_bytes:
            return None
        if not self._pieces[piece] and not self._cut(piece):
            return None
        slab, start = self._pieces[piece].pop()
        self._num_out[slab] += 1
        memory = self._slabs[slab][start : start + size]
        weakref.finalize(memory, self._returned.append, (piece, slab, start)).atexit = False
        return memory

    def _cut(self, piece: int) -> bool:
        """Cut a slab that is whole into pieces."""
        if not self._whole:
            return False
        slab = self._whole.pop()
        starts = range(0, self._slab_bytes - piece + 1, piece)
        self._pieces[piece] += [(slab, start) for start in reversed(starts)]
        return True

    def _take_back(self) -> None:
        while self._returned:
            piece, slab, start = self._returned.pop()
            self._pieces[piece].append((slab, start))
            self._num_out[slab] -= 1
            if not self._num_out[slab]:
                self._pieces[piece] = [each for each in self._pieces[piece] if each[0] != slab]
                self._whole.append(slab)
