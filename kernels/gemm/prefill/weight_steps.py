"""Steps of packed weights in registers: sixteen words of bf16 pairs a lane, whatever format holds them.

A lane's words are those that packed bf16 has: of row g the eight columns of either half, then of row g + 8, g a quarter
of the lane. Scales of groups of columns are applied and the product rounded once; scales of whole rows are not. It
knows neither copies nor products.
"""

from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.formats import fp8_fragment, int4_fragment, nvfp4_fragment
from lowlat.kernels.gemm.tiles import TileFormat
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, int64, uint32

__all__ = ["make_halves", "make_load_step"]

PIECE_BYTES = 512  # a lane's 16 bytes, of all lanes
WORD_BYTES = 32  # a word behind the codes, of the eight pairs of rows
HIGH, LOW, TWICE = 0xFFFF0000, 0x0000FFFF, 0x00010001
MINUS_ZEROS = 0x80008000
MINUS_136 = int4_fragment.MINUS_136
expand_fp8, expand_int4, expand_nvfp4 = fp8_fragment.expand, int4_fragment.expand, nvfp4_fragment.expand
scale_of = nvfp4_fragment.scale_of


def make_load_step(tiles: TileFormat, *, is_shared: bool) -> Any:
    """A function: a lane's sixteen words of the step at an address, in shared memory or in global memory.

    Raises ShapeError for bf16 in global memory.
    """
    if tiles.name == "bf16":
        if not is_shared:
            raise ShapeError("steps of bf16 are in registers what they are in memory: only those in shared memory load")
        return _make_bf16()
    load, half_of = _HALVES[tiles.name](tiles, is_shared)

    @device_function
    def load_step(step: Any, lane: Any) -> Any:
        kept = load(step, lane)
        first, second = half_of(kept, 0), half_of(kept, 1)
        return first[:4] + second[:4] + first[4:] + second[4:]

    return load_step


def _loads(is_shared: bool) -> tuple[Any, Any]:
    """Functions of an address and an offset: four words there, and one."""
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


def _make_bf16() -> Any:
    load = ptx.load_shared_tiles(4, PIECE_BYTES)

    @device_function
    def load_bf16(step: Any, lane: Any) -> Any:
        return load(uint32(step + uint32(lane * uint32(16))))

    return load_bf16


def make_halves(tiles: TileFormat) -> tuple[Any, Any]:
    """Two functions for a step in shared memory, of which a lane wants the halves one after the other.

    load  (address, lane): what is kept of the step; of bf16 its address alone
    half  (kept, 0 or 1): the lane's eight words of a half, of row g, then of row g + 8
    """
    if tiles.name == "bf16":
        return _keep_address, _load_half
    return _HALVES[tiles.name](tiles, True)


@device_function
def _keep_address(step: Any, lane: Any) -> Any:
    return uint32(step + uint32(lane * uint32(16)))


@device_function
def _load_half(kept: Any, half: Any) -> Any:
    at = uint32(kept + uint32(half * PIECE_BYTES))
    return ptx.load_shared_128(at) + ptx.load_shared_128(uint32(at + uint32(2 * PIECE_BYTES)))


def _make_times(tiles: TileFormat) -> Any:
    """A function: four words of pairs times a scale: rounded once, behind the float32 product where it is float32."""
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


def _make_scales(tiles: TileFormat, one: Any) -> Any:
    """A function: the scales of a group of columns, of row g and of row g + 8, as `_make_times` takes them."""
    codes, words, wide = tiles.code_bytes, tiles.scale_words + tiles.zeros, tiles.wide

    @device_function
    def scales(step: Any, row: Any, group: Any) -> Any:
        at = uint32(uint32(codes + WORD_BYTES * words * group) + row)
        word = one(step, at)
        if wide:
            return ptx.float_of_bits(word), ptx.float_of_bits(one(step, uint32(at + uint32(WORD_BYTES))))
        return uint32((word & uint32(LOW)) * uint32(TWICE)), uint32(uint32(word >> uint32(16)) * uint32(TWICE))

    return scales


def _make_fp8_halves(tiles: TileFormat, is_shared: bool) -> tuple[Any, Any]:
    (four, one), grouped = _loads(is_shared), tiles.groups > 0
    times, scales = _make_times(tiles), _make_scales(tiles, one)

    @device_function
    def load(step: Any, lane: Any) -> Any:
        """Codes of row g and of row g + 8, and the scales of both."""
        at, scale = uint32(lane * uint32(16)), (uint32(0), uint32(0))
        if grouped:
            scale = scales(step, uint32(uint32(lane >> uint32(2)) * uint32(4)), 0)
        return four(step, at), four(step, uint32(at + uint32(PIECE_BYTES))), scale

    @device_function
    def half_of(kept: Any, half: Any) -> Any:
        top, low, scale = kept
        a, b, c, d = top[0], top[1], low[0], low[1]
        if half == 1:
            a, b, c, d = top[2], top[3], low[2], low[3]
        above, below = expand_fp8(a) + expand_fp8(b), expand_fp8(c) + expand_fp8(d)
        if grouped:
            return times(above, scale[0]) + times(below, scale[1])
        return above + below

    return load, half_of


def _make_int4_halves(tiles: TileFormat, is_shared: bool) -> tuple[Any, Any]:
    (four, one), last, has_zeros = _loads(is_shared), tiles.groups - 1, tiles.zeros
    times, scales = _make_times(tiles), _make_scales(tiles, one)
    zeros_at, group_bytes = tiles.code_bytes + WORD_BYTES * tiles.scale_words, WORD_BYTES * (1 + tiles.scale_words)

    @device_function
    def zeros(step: Any, row: Any, group: Any) -> Any:
        """Twice 128 and the zero point, less than zero, of both rows."""
        if not has_zeros:
            return uint32(MINUS_136), uint32(MINUS_136)
        both = one(step, uint32(uint32(zeros_at + group_bytes * group) + row))
        return uint32((both & uint32(LOW)) * uint32(TWICE)), uint32(uint32(both >> uint32(16)) * uint32(TWICE))

    @device_function
    def load(step: Any, lane: Any) -> Any:
        """Codes, and for either half the scales and zeros of row g and of row g + 8."""
        row = uint32(uint32(lane >> uint32(2)) * uint32(4))
        first = scales(step, row, 0), zeros(step, row, 0)
        second = first
        if last == 1:
            second = scales(step, row, 1), zeros(step, row, 1)
        return four(step, uint32(lane * uint32(16))), first, second

    @device_function
    def half_of(kept: Any, half: Any) -> Any:
        codes, (scale, minus), _ = kept
        above, below = codes[0], codes[2]
        if half == 1:
            above, below = codes[1], codes[3]
            scale, minus = kept[2]
        return times(expand_int4(above, minus[0]), scale[0]) + times(expand_int4(below, minus[1]), scale[1])

    return load, half_of


def _make_nvfp4_halves(tiles: TileFormat, is_shared: bool) -> tuple[Any, Any]:
    (four, one), codes_end = _loads(is_shared), tiles.code_bytes

    @device_function
    def load(step: Any, lane: Any) -> Any:
        """Codes, the scales of row g and of row g + 8, and the place of the lane's block among those of a half.

        Of the two blocks of a half a lane's columns are in the first for the first two lanes of a row.
        """
        at = uint32(uint32(codes_end) + uint32(uint32(lane >> uint32(2)) * uint32(4)))
        scale = one(step, at), one(step, uint32(at + uint32(WORD_BYTES)))
        return four(step, uint32(lane * uint32(16))), scale, uint32((lane & uint32(2)) << uint32(2))

    @device_function
    def half_of(kept: Any, half: Any) -> Any:
        codes, scale, block = kept
        above, below = codes[0], codes[2]
        if half == 1:
            above, below, block = codes[1], codes[3], uint32(block + uint32(16))
        return expand_nvfp4(above, scale_of(scale[0], block)) + expand_nvfp4(below, scale_of(scale[1], block))

    return load, half_of


_HALVES = {"fp8": _make_fp8_halves, "int4": _make_int4_halves, "nvfp4": _make_nvfp4_halves}
