"""The product of a step whose groups of columns have scales of their own: each group's sums are scaled, and added.

A group's sums begin at zero and are exact products in float32; one multiply-add brings them to their size and joins
them to the others. So the order of accumulation is the weight's alone.
"""

from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.formats.fragment import fragment_of
from lowlat.kernels.gemm.decode.plan import DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.gemm.tiles import WORD_BYTES
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["make_group_product"]

HIGH = 0xFFFF0000


def make_group_product(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Any:
    """A function: add one k step to the accumulators of all weight and row tiles.

    It takes the sums, the addresses of a lane's codes, rows and words after the codes, in shared memory.
    """
    weight_tiles, row_tiles, tile_bytes = plan.weight_tiles, plan.row_tiles, plan.tile_bytes
    if weight_tiles > 2:
        raise ShapeError(f"groups of columns are multiplied by one or two weight tiles at once, got {weight_tiles}")
    total = weight_tiles * row_tiles
    tile = _make_tile(shape, plan)
    places = (0, 2) if plan.columns == 1 else (0, 1, 2, 3)  # of one row the first column is all that is wanted
    add0, add1 = (ptx.fma_tiles(total, min(part, weight_tiles - 1) * row_tiles, row_tiles, places) for part in range(2))
    groups = shape.weights.groups

    def multiply(sums: Any, here: Any, rows: Any, words: Any) -> Any:
        for group in range(groups):
            partial, top, low = tile(here, rows, words, group)
            sums = add0(sums, partial, top, low)
            if weight_tiles > 1:
                partial, top, low = tile(
                    uint32(here + uint32(tile_bytes)), rows, uint32(words + uint32(tile_bytes)), group
                )
                sums = add1(sums, partial, top, low)
        return sums

    return device_function(multiply)


def _make_tile(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Any:
    """A function: a group's sums of one weight tile, and its scales of a lane's two rows."""
    row_tiles, weights, half_bytes = plan.row_tiles, shape.weights, plan.rows_bytes // 2
    fragment, load_rows = fragment_of(weights), ptx.load_shared_tiles(row_tiles, plan.rows_bytes)
    load_group, take_zeros = fragment.load_group, fragment.take_zeros
    zeros = ptx.zeros(4 * row_tiles)
    first, second = ptx.mma_bf16_tiles(row_tiles, 0, row_tiles, 0), ptx.mma_bf16_tiles(row_tiles, 0, row_tiles, 2)
    rows_at = 0 if plan.steps_held else plan.weight_tiles * plan.tile_bytes
    whole, wide, group_bytes = weights.groups == 1, weights.wide, (weights.scale_words + weights.zeros) * WORD_BYTES

    @device_function
    def add_half(sums: Any, here: Any, rows: Any, half: Any, minus: Any, low_minus: Any) -> Any:
        inputs = load_rows(uint32(rows + uint32(rows_at + half * half_bytes)))
        a0, a1, a2, a3, b0, b1, b2, b3 = load_group(here, half, minus, low_minus)
        sums = first(sums, a0, b0, a1, b1, inputs)
        return second(sums, a2, b2, a3, b3, inputs)

    @device_function
    def tile(here: Any, rows: Any, words: Any, group: Any) -> Any:
        place = uint32(words + uint32(group * group_bytes))
        word = ptx.load_shared_u32(place)
        if wide:
            top, low = (
                ptx.float_of_bits(word),
                ptx.float_of_bits(ptx.load_shared_u32(uint32(place + uint32(WORD_BYTES)))),
            )
        else:
            top, low = ptx.float_of_bits(word << uint32(16)), ptx.float_of_bits(word & uint32(HIGH))
        minus, low_minus = take_zeros(place)
        sums = zeros()
        if whole:
            sums = add_half(sums, here, rows, 0, minus, low_minus)
            sums = add_half(sums, here, rows, 1, minus, low_minus)
        else:
            sums = add_half(sums, here, rows, group, minus, low_minus)
        return sums, top, low

    return tile
