"""This module returns steps of packed weights in registers: sixteen words of bf16 pairs a lane, from any format.

A lane's words are those of packed bf16: the eight columns of either half for row g, then for row g + 8, where g is a
quarter of the lane. Scales of groups of columns are applied and the product rounded once; scales of whole rows are not.
"""

from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.formats.fragment import fragment_of, make_loads
from lowlat.kernels.gemm.tiles import BF16_TILES, TileFormat
from lowlat.kernels.toolchain.numba_cuda import device_function

__all__ = ["make_load_halves", "make_load_step"]


def make_load_step(tiles: TileFormat, *, is_shared: bool) -> Any:
    """A function: a lane's sixteen words of the step at an address, in shared memory or in global memory.

    Raises ShapeError for bf16 in global memory.
    """
    hold, first, second = make_load_halves(tiles, is_shared=is_shared)
    whole = fragment_of(tiles).load_step
    if whole is not None:
        return whole

    @device_function
    def load_step(step: Any, lane: Any) -> Any:
        held = hold(step, lane)
        a, b = first(held), second(held)
        return a[:4] + b[:4] + a[4:] + b[4:]

    return load_step


def make_load_halves(tiles: TileFormat, *, is_shared: bool) -> tuple[Any, Any, Any]:
    """Functions: what a lane holds of the step at an address; of that its eight words of either half.

    A half's words are of row g, then of row g + 8; of bf16 they are loaded when they are wanted. Raises ShapeError for
    bf16 in global memory.
    """
    if tiles == BF16_TILES and not is_shared:
        raise ShapeError("steps of bf16 are in registers what they are in memory: only those in shared memory load")
    return fragment_of(tiles).halves(*make_loads(is_shared))
