"""This module describes parts of K that are summed by themselves and added as a tree, the same for any number of GPUs.

A part is whole steps of 64 columns, and its sum begins at zero. So its bits depend on its columns alone, whichever warp
or GPU sums it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.packing import TILE_COLUMNS
from lowlat.kernels.reference.collectives.cuts import bounds
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["KParts", "add_four", "load_four", "make_part_of_warp", "make_span_of", "make_tree"]


@dataclass(frozen=True)
class KParts:
    """The parts of K, with the bounds of `collectives.cuts.bounds`.

    count  number of parts: 1, 2, 4 or 8
    unit   a part has whole units of so many steps of 64 columns
    """

    count: int
    unit: int

    @classmethod
    def of(cls, count: int, columns: int, depth: int) -> "KParts":
        """Make parts of K from a count and a unit in columns. Raises ShapeError if a part does not have whole steps."""
        if columns % TILE_COLUMNS or depth % TILE_COLUMNS:
            raise ShapeError(f"parts of K are whole steps of {TILE_COLUMNS} columns, not units of {columns} of {depth}")
        return cls(count, columns // TILE_COLUMNS)

    @property
    def name(self) -> str:
        """The suffix for a kernel's name."""
        return f"parts{self.count}x{self.unit}"

    def ends(self, steps: int) -> Sequence[int]:
        """Return the first step of each part, and the end of the last."""
        return bounds(steps, self.count, self.unit)


def make_span_of(parts: KParts, steps: int) -> Any:
    """A device function that returns a part's first step, by its number, and the step after its last."""
    levels, unit, units = parts.count.bit_length() - 1, parts.unit, -(-steps // parts.unit)

    @device_function
    def span_of(part: Any) -> Any:
        first, size = uint32(0), uint32(units)
        for level in range(levels):  # halves of halves, the first of them the larger
            low = uint32(size - uint32(size >> uint32(1)))
            if uint32(part >> uint32(levels - 1 - level)) & uint32(1):
                first, size = uint32(first + low), uint32(size - low)
            else:
                size = low
        return uint32(first * uint32(unit)), min(uint32(uint32(first + size) * uint32(unit)), uint32(steps))

    return span_of


def make_part_of_warp(parts: KParts, steps: int) -> Any:
    """A device function that returns the first step of a warp's part, the step after its last, and its set of warps."""
    span_of, mask, shift = make_span_of(parts, steps), parts.count - 1, parts.count.bit_length() - 1

    @device_function
    def of_part(warp: Any) -> Any:
        first, end = span_of(uint32(warp & uint32(mask)))
        return first, end, uint32(warp >> uint32(shift))

    return of_part


def make_tree(make_part: Callable[[int], Any], first: int, last: int, add: Any = ptx.add_rn) -> Any:
    """A device function (place, given) that adds up parts `first` to `last` - 1 by neighbouring pairs.

    make_part  makes from a part's number a device function (place, given) that returns the part's value
    add        a device function that adds two values
    """
    if last - first == 1:
        return make_part(first)
    half = (first + last) // 2
    low, high = make_tree(make_part, first, half, add), make_tree(make_part, half, last, add)

    @device_function
    def both(place: Any, given: Any) -> Any:
        return add(low(place, given), high(place, given))

    return both


@device_function
def add_four(a: Any, b: Any) -> Any:
    """Add four float32 to four others."""
    return ptx.add_rn(a[0], b[0]), ptx.add_rn(a[1], b[1]), ptx.add_rn(a[2], b[2]), ptx.add_rn(a[3], b[3])


@device_function
def load_four(place: Any) -> Any:
    """Load four float32 at an address that is a multiple of 16."""
    a, b, c, d = ptx.load_global_128(place)
    return ptx.float_of_bits(a), ptx.float_of_bits(b), ptx.float_of_bits(c), ptx.float_of_bits(d)
