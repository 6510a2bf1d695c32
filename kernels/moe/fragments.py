"""Fragments of experts' weights in the formats of dense layers: steps of a tile decoded in registers and multiplied.

Where groups of columns have scales, decode scales a group's sum in float32 and joins it to the others, as dense GEMMs
do; prefill multiplies the numbers by them, rounded to bf16, so that a pair's sums are those of plain weights. Scales of
rows are the epilogues'.
"""

from typing import Any

from lowlat.kernels.formats import fp8_fragment, int4_fragment, nvfp4_fragment
from lowlat.kernels.gemm.tiles import TileFormat
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, uint32

__all__ = ["make_multiply_step", "make_multiply_tiles"]

WORD_BYTES = 32  # of eight rows' words of scales
HIGH, LOW = 0xFFFF0000, 0x0000FFFF
TWICE = 0x00010001
MINUS_ZEROS = 0x80008000
MINUS_136 = int4_fragment.MINUS_136


def _make_load(tiles: TileFormat) -> Any:
    """A function: a lane's words of codes of a step; the last four are of the row 8 below, or there are but four."""
    is_long = tiles.name == "fp8"

    @device_function
    def load(words: Any) -> Any:
        a, b, c, d = ptx.load_shared_128(words)
        e, f, g, h = a, b, c, d
        if is_long:
            e, f, g, h = ptx.load_shared_128(uint32(words + uint32(512)))
        return a, b, c, d, e, f, g, h

    return load


def _make_expand(tiles: TileFormat, half: int) -> Any:
    """A function: of half a step four words of a row and four of the row 8 below, from what was loaded."""
    own, below, shift = half, 2 + half, 16 * half
    first, second, expand_fp8 = 2 * half, 2 * half + 1, fp8_fragment.expand
    expand_int4, expand_nvfp4, scale_of = int4_fragment.expand, nvfp4_fragment.expand, nvfp4_fragment.scale_of

    @device_function
    def expand_codes(raw: Any, _top: Any, _low: Any) -> Any:
        a0, a1 = expand_fp8(raw[first])
        a2, a3 = expand_fp8(raw[second])
        b0, b1 = expand_fp8(raw[first + 4])
        b2, b3 = expand_fp8(raw[second + 4])
        return (a0, a1, a2, a3), (b0, b1, b2, b3)

    @device_function
    def expand_nibbles(raw: Any, minus: Any, low_minus: Any) -> Any:
        return expand_int4(raw[own], minus), expand_int4(raw[below], low_minus)

    @device_function
    def expand_blocks(raw: Any, top: Any, low: Any) -> Any:
        place = uint32(uint32(shift) + ((uint32(cuda.threadIdx.x) & uint32(2)) << uint32(2)))
        return expand_nvfp4(raw[own], scale_of(top, place)), expand_nvfp4(raw[below], scale_of(low, place))

    return {"fp8": expand_codes, "int4": expand_nibbles, "nvfp4": expand_blocks}[tiles.name]


def _make_beside(tiles: TileFormat, group: int) -> Any:
    """A function: what numbers of a group are expanded with, of a row and of the row 8 below.

    Zero points, twice in a word, or all scales of the step.
    """
    has_zeros, has_blocks = tiles.zeros, tiles.block_words > 0
    zeros_at = (group * (tiles.scale_words + tiles.zeros) + tiles.scale_words) * WORD_BYTES

    @device_function
    def beside(scales: Any) -> Any:
        top, low = uint32(MINUS_136), uint32(MINUS_136)
        if has_zeros:
            both = ptx.load_shared_u32(uint32(scales + uint32(zeros_at)))
            top, low = uint32((both & uint32(LOW)) * uint32(TWICE)), uint32((both >> uint32(16)) * uint32(TWICE))
        if has_blocks:
            top, low = ptx.load_shared_u32(scales), ptx.load_shared_u32(uint32(scales + uint32(WORD_BYTES)))
        return top, low

    return beside


def _make_scales(tiles: TileFormat, group: int) -> Any:
    """A function: the float32 scales of a group, of a row and of the row 8 below."""
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
    """A function: a step of a tile, see `WeightFormat.decode_fragment`."""
    load, halves = _make_load(tiles), (_make_expand(tiles, 0), _make_expand(tiles, 1))
    expand_first, expand_second = halves
    last = max(tiles.groups, 1) - 1
    beside_first, beside_second = _make_beside(tiles, 0), _make_beside(tiles, last)
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
    """A function: numbers of half a step as expanded, times the scales of their groups where they have some."""
    group = half if tiles.groups > 1 else 0
    expand, beside, load_scales = _make_expand(tiles, half), _make_beside(tiles, group), _make_scales(tiles, group)
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
    """A function: see `WeightFormat.prefill_fragment`."""
    load, first_half, second_half = _make_load(tiles), _make_scaled(tiles, 0), _make_scaled(tiles, 1)
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
