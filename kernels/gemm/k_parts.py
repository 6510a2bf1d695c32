"""Parts of K that are summed one by one and added as a tree, so that any number of cards has the same bits.

A part is whole steps of 64 columns, and its sum begins at zero: its bits depend on its columns alone, whoever sums it.
It knows no product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.packing import TILE_COLUMNS
from lowlat.kernels.reference.exchange.cuts import bounds
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["KParts", "make_span_of", "make_tree"]


@dataclass(frozen=True)
class KParts:
    """How K is cut into parts, as `exchange.cuts.bounds` cuts it.

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
    """A device function: the first step of a part, by its number, and the one behind its last."""
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


def make_tree(load: Any, first: int, last: int) -> Any:
    """A device function (place, given): the sum of parts `first` to `last` - 1 by neighbouring pairs.

    load  a device function (place, given, part): the value of a part
    """
    if last - first == 1:

        @device_function
        def one(place: Any, given: Any) -> Any:
            return load(place, given, first)

        return one
    half = (first + last) // 2
    low, high = make_tree(load, first, half), make_tree(load, half, last)

    @device_function
    def both(place: Any, given: Any) -> Any:
        return ptx.add_rn(low(place, given), high(place, given))

    return both
