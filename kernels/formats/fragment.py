"""Functions by which mainloops decode packed weights in registers, whatever format holds them.

`fragment_of` gives a format's own; the others load codes, and scale decoded numbers by groups, as its layout says.
"""

from typing import Any

from lowlat.kernels.formats import CODED_FORMATS
from lowlat.kernels.formats.base import Fragment
from lowlat.kernels.gemm.tiles import WORD_BYTES, TileFormat
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, int64, uint32

__all__ = ["fragment_of", "make_group_scales", "make_loads", "make_times", "share_of"]

HIGH, LOW, TWICE = 0xFFFF0000, 0x0000FFFF, 0x00010001
MINUS_ZEROS = 0x80008000


def fragment_of(tiles: TileFormat) -> Fragment:
    """How kernels decode steps that are held so."""
    return CODED_FORMATS[tiles.name].fragment(tiles)


def share_of(tiles: TileFormat) -> float:
    """The part of a number that decode's GEMMs multiply."""
    return CODED_FORMATS[tiles.name].share


def make_loads(is_shared: bool) -> tuple[Any, Any]:
    """Functions of an address and an offset, in shared or in global memory: four words there, and one."""
    if is_shared:

        @device_function
        def near_four(step: Any, offset: Any) -> Any:
            return ptx.load_shared_128(uint32(step + uint32(offset)))

        @device_function
        def near_one(step: Any, offset: Any) -> Any:
            return ptx.load_shared_u32(uint32(step + uint32(offset)))

        return near_four, near_one

    @device_function
    def far_four(step: Any, offset: Any) -> Any:
        return ptx.load_global_nc_128(step + int64(offset))

    @device_function
    def far_one(step: Any, offset: Any) -> Any:
        return uint32(ptx.load_global_i32(step + int64(offset)))

    return far_four, far_one


def make_times(tiles: TileFormat) -> Any:
    """A function: four words of pairs times a scale: rounded once, after the float32 product where it is float32."""
    if tiles.wide:

        @device_function
        def times_one(pair: Any, scale: Any) -> Any:
            first, second = ptx.float_of_bits(uint32(pair << uint32(16))), ptx.float_of_bits(pair & uint32(HIGH))
            return ptx.bf16_pair(ptx.mul_rn(first, scale), ptx.mul_rn(second, scale))

    else:

        @device_function
        def times_one(pair: Any, scale: Any) -> Any:
            return ptx.fma_bf16_pair(pair, scale, uint32(MINUS_ZEROS))

    @device_function
    def times(words: Any, scale: Any) -> Any:
        a, b, c, d = words
        return times_one(a, scale), times_one(b, scale), times_one(c, scale), times_one(d, scale)

    return times


def make_group_scales(tiles: TileFormat, one: Any) -> Any:
    """A function: the scales of a group of columns, of row g and of row g + 8, as `make_times` takes them."""
    codes, words, wide = tiles.code_bytes, tiles.scale_words + tiles.zeros, tiles.wide

    @device_function
    def scales(step: Any, row: Any, group: Any) -> Any:
        at = uint32(uint32(codes + WORD_BYTES * words * group) + row)
        word = one(step, at)
        if wide:
            return ptx.float_of_bits(word), ptx.float_of_bits(one(step, uint32(at + uint32(WORD_BYTES))))
        return uint32((word & uint32(LOW)) * uint32(TWICE)), uint32(uint32(word >> uint32(16)) * uint32(TWICE))

    return scales
