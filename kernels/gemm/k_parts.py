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
    """How K is cut into parts, as `all_reduce.cuts.bounds` cuts it.

    count  of parts: 1, 2, 4 or 8
    unit   steps of 64 columns that stay together
    """

    count: int
    unit: int

    @classmethod
    def of(cls, count: int, columns: int, depth: int) -> "KParts":
        """So many parts of K in units of so many columns. Raises ShapeError where a part is not made of whole steps."""
        if columns % TILE_COLUMNS or depth % TILE_COLUMNS:
            raise ShapeError(f"parts of K are whole steps of {TILE_COLUMNS} columns, not units of {columns} of {depth}")
        return cls(count, columns // TILE_COLUMNS)

    @property
    def name(self) -> str:
        """Its part of a kernel's name."""
        return f"parts{self.count}x{self.unit}"

    def ends(self, steps: int) -> Sequence[int]:
        """The steps at which parts begin, and the end of the last one."""
        return bounds(steps, self.count, self.unit)


def make_span_of(parts: KParts, steps: int) -> Any:
    """A device function: the first step of a part, by its number, and the one after its last."""
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
    """A device function of a warp: the first step of its part, the one after its last, and its set of warps."""
    span_of, mask, shift = make_span_of(parts, steps), parts.count - 1, parts.count.bit_length() - 1

    @device_function
    def of_part(warp: Any) -> Any:
        first, end = span_of(uint32(warp & uint32(mask)))
        return first, end, uint32(warp >> uint32(shift))

    return of_part


def make_tree(make_part: Callable[[int], Any], first: int, last: int, add: Any = ptx.add_rn) -> Any:
    """A device function (place, given): the sum of parts `first` to `last` - 1 by neighbouring pairs.

    make_part  from a part's number, a device function (place, given): its value
    add        a device function: the sum of two values
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
    """The sums of two times four float32."""
    return ptx.add_rn(a[0], b[0]), ptx.add_rn(a[1], b[1]), ptx.add_rn(a[2], b[2]), ptx.add_rn(a[3], b[3])


@device_function
def load_four(place: Any) -> Any:
    """Four float32 at an address of a multiple of 16."""
    a, b, c, d = ptx.load_global_128(place)
    return ptx.float_of_bits(a), ptx.float_of_bits(b), ptx.float_of_bits(c), ptx.float_of_bits(d)
