"""This module decodes and multiplies experts' weights in the formats of dense layers: steps of a tile, in registers.

If groups of columns have scales, decode scales a group's sum in float32 and adds it to the others, as dense GEMMs do.
Prefill multiplies the numbers by them, rounded to bf16, so that a pair's sums are those of plain weights. The epilogues
apply scales of rows.
"""

from collections.abc import Callable
from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.formats.fragment import fragment_of
from lowlat.kernels.gemm.tiles import WORD_BYTES, TileFormat
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32

__all__ = ["make_multiply_step", "make_multiply_tiles"]

HIGH = 0xFFFF0000
TWICE = 0x00010001
MINUS_ZEROS = 0x80008000


def _own(tiles: TileFormat) -> tuple[Any, Callable[[int], Any], Callable[[int], Any]]:
    """The functions that the tiles' format has for experts: loads, how a half expands, and what groups expand with."""
    own = fragment_of(tiles)
    if own.expand is None or own.beside is None:
        raise ShapeError(f"experts' kernels do not decode {tiles.label}")
    return own.load_codes, own.expand, own.beside


def _make_scales(tiles: TileFormat, group: int) -> Any:
    """A device function that loads a group's float32 scales, of a row and of the row 8 below."""
    wide, at = tiles.wide, group * (tiles.scale_words + tiles.zeros) * WORD_BYTES

    @device_function
    def load_scales(scales: Any) -> Any:
        word = ptx.load_shared_u32(uint32(scales + uint32(at)))
        if wide:
            below = ptx.load_shared_u32(uint32(scales + uint32(at + WORD_BYTES)))
        else:
            word, below = uint32(word << uint32(16)), uint32(word & uint32(HIGH))
        return ptx.float_of_bits(word), ptx.float_of_bits(below)

    return load_scales


def make_multiply_step(tiles: TileFormat) -> Any:
    """A device function that multiplies a step of a tile, see `WeightFormat.decode_fragment`."""
    load, expand, beside = _own(tiles)
    expand_first, expand_second, last = expand(0), expand(1), max(tiles.groups, 1) - 1
    beside_first, beside_second = beside(0), beside(last)
    scales_first, scales_second = _make_scales(tiles, 0), _make_scales(tiles, last)
    grouped, whole = tiles.groups > 0, tiles.groups < 2

    @device_function
    def add(sums: Any, numbers: Any, x0: Any, x1: Any, x2: Any, x3: Any) -> Any:
        c0, c1, c2, c3 = sums
        a, b = numbers
        c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a[0], b[0], a[1], b[1], x0, x1)
        return ptx.mma_bf16(c0, c1, c2, c3, a[2], b[2], a[3], b[3], x2, x3)

    @device_function
    def join(sums: Any, group: Any, scales: Any) -> Any:
        c0, c1, c2, c3 = sums
        d0, d1, d2, d3 = group
        top, low = scales
        return ptx.fma_rn(d0, top, c0), ptx.fma_rn(d1, top, c1), ptx.fma_rn(d2, low, c2), ptx.fma_rn(d3, low, c3)

    @device_function
    def multiply_step(sums: Any, words: Any, scales: Any, x: Any) -> Any:
        raw, zero = load(words), float32(0)
        top, low = beside_first(scales)
        own = (zero, zero, zero, zero) if grouped else sums
        own = add(own, expand_first(raw, top, low), x[0], x[1], x[2], x[3])
        if not whole:
            sums, own = join(sums, own, scales_first(scales)), (zero, zero, zero, zero)
            top, low = beside_second(scales)
        own = add(own, expand_second(raw, top, low), x[4], x[5], x[6], x[7])
        if grouped:
            own = join(sums, own, scales_second(scales))
        return own

    return multiply_step


def _make_scaled(tiles: TileFormat, half: int) -> Any:
    """A device function that multiplies half a step's expanded numbers by the scales of their groups, if any."""
    group = half if tiles.groups > 1 else 0
    _, make_expand, make_beside = _own(tiles)
    expand, beside, load_scales = make_expand(half), make_beside(group), _make_scales(tiles, group)
    grouped, wide = tiles.groups > 0, tiles.wide

    @device_function
    def times(pair: Any, scale: Any) -> Any:
        if wide:
            low, high = ptx.float_of_bits(uint32(pair << uint32(16))), ptx.float_of_bits(uint32(pair & uint32(HIGH)))
            return ptx.bf16_pair(ptx.mul_rn(low, scale), ptx.mul_rn(high, scale))
        both = uint32((ptx.bits_of_float(scale) >> uint32(16)) * uint32(TWICE))
        return ptx.fma_bf16_pair(pair, both, uint32(MINUS_ZEROS))

    @device_function
    def scaled(raw: Any, scales: Any) -> Any:
        top, low = beside(scales)
        a, b = expand(raw, top, low)
        if grouped:
            s, t = load_scales(scales)
            a = times(a[0], s), times(a[1], s), times(a[2], s), times(a[3], s)
            b = times(b[0], t), times(b[1], t), times(b[2], t), times(b[3], t)
        return a, b

    return scaled


def make_multiply_tiles(tiles: TileFormat, multiply: Any) -> Any:
    """A device function that multiplies tiles, see `WeightFormat.prefill_fragment`."""
    load, first_half, second_half = _own(tiles)[0], _make_scaled(tiles, 0), _make_scaled(tiles, 1)
    tile_bytes, scale_bytes = tiles.code_bytes, tiles.words * WORD_BYTES

    @device_function
    def multiply_tiles(sums: Any, words: Any, scales: Any, rows: Any, later_rows: Any, live: Any) -> Any:
        raw, second = load(words), load(uint32(words + uint32(tile_bytes)))
        second_scales = uint32(scales + uint32(scale_bytes))
        a, b = first_half(raw, scales)
        c, d = first_half(second, second_scales)
        sums = multiply(sums, a, b, c, d, rows, live)
        a, b = second_half(raw, scales)
        c, d = second_half(second, second_scales)
        return multiply(sums, a, b, c, d, later_rows, live)

    return multiply_tiles
