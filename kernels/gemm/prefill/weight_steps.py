"""Steps of packed weights in registers: sixteen words of bf16 pairs a lane, whatever format holds them.

A lane's words are those that packed bf16 has: of row g the eight columns of either half, then of row g + 8, g a quarter
of the lane. Scales of groups of columns are applied and the product rounded once; scales of whole rows are not.
"""

from typing import Any

from lowlat.errors import ShapeError
from lowlat.kernels.formats import bf16_fragment, fp8_fragment, int4_fragment, nvfp4_fragment
from lowlat.kernels.gemm.tiles import TileFormat
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, int64, uint32

__all__ = ["make_load_halves", "make_load_step"]

PIECE_BYTES = 512  # a lane's 16 bytes, of all lanes
WORD_BYTES = 32  # a word after the codes, of the eight pairs of rows
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
        _check_is_shared(is_shared)
        return _make_bf16()
    hold, first, second = make_load_halves(tiles, is_shared=is_shared)

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
    if tiles.name == "bf16":
        _check_is_shared(is_shared)
        return bf16_fragment.hold_step, bf16_fragment.first_half, bf16_fragment.second_half
    if tiles.name == "nvfp4":
        return _make_nvfp4(tiles, is_shared)
    return _make_fp8(tiles, is_shared) if tiles.name == "fp8" else _make_int4(tiles, is_shared)


def _check_is_shared(is_shared: bool) -> None:
    if not is_shared:
        raise ShapeError("steps of bf16 are in registers what they are in memory: only those in shared memory load")


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


def _make_times(tiles: TileFormat) -> Any:
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


def _make_fp8(tiles: TileFormat, is_shared: bool) -> tuple[Any, Any, Any]:
    (four, one), grouped = _loads(is_shared), tiles.groups > 0
    times, scales = _make_times(tiles), _make_scales(tiles, one)

    @device_function
    def hold_fp8(step: Any, lane: Any) -> Any:
        at = uint32(lane * uint32(16))
        top, low = four(step, at), four(step, uint32(at + uint32(PIECE_BYTES)))
        if not grouped:
            return top, low
        return top, low, scales(step, uint32(uint32(lane >> uint32(2)) * uint32(4)), 0)

    @device_function
    def half(held: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        top, low = expand_fp8(a) + expand_fp8(b), expand_fp8(c) + expand_fp8(d)
        if not grouped:
            return top + low
        return times(top, held[2][0]) + times(low, held[2][1])

    @device_function
    def first_half(held: Any) -> Any:
        return half(held, held[0][0], held[0][1], held[1][0], held[1][1])

    @device_function
    def second_half(held: Any) -> Any:
        return half(held, held[0][2], held[0][3], held[1][2], held[1][3])

    return hold_fp8, first_half, second_half


def _make_int4(tiles: TileFormat, is_shared: bool) -> tuple[Any, Any, Any]:
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
    def hold_int4(step: Any, lane: Any) -> Any:
        codes = four(step, uint32(lane * uint32(16)))
        row = uint32(uint32(lane >> uint32(2)) * uint32(4))
        factors, minus = scales(step, row, 0), zeros(step, row, 0)
        if last == 1:
            return codes, factors, minus, scales(step, row, 1), zeros(step, row, 1)
        return codes, factors, minus, factors, minus

    @device_function
    def half(top: Any, low: Any, factors: Any, minus: Any) -> Any:
        return times(expand_int4(top, minus[0]), factors[0]) + times(expand_int4(low, minus[1]), factors[1])

    @device_function
    def first_half(held: Any) -> Any:
        return half(held[0][0], held[0][2], held[1], held[2])

    @device_function
    def second_half(held: Any) -> Any:
        return half(held[0][1], held[0][3], held[3], held[4])

    return hold_int4, first_half, second_half


def _make_nvfp4(tiles: TileFormat, is_shared: bool) -> tuple[Any, Any, Any]:
    (four, one), codes = _loads(is_shared), tiles.code_bytes

    @device_function
    def hold_nvfp4(step: Any, lane: Any) -> Any:
        """Of the two blocks of a half a lane's columns are in the first for the first two lanes of a row."""
        words = four(step, uint32(lane * uint32(16)))
        at = uint32(uint32(codes) + uint32(uint32(lane >> uint32(2)) * uint32(4)))
        top, low = one(step, at), one(step, uint32(at + uint32(WORD_BYTES)))
        return words, top, low, uint32((lane & uint32(2)) << uint32(2))

    @device_function
    def first_half(held: Any) -> Any:
        words, top, low, block = held
        return expand_nvfp4(words[0], scale_of(top, block)) + expand_nvfp4(words[2], scale_of(low, block))

    @device_function
    def second_half(held: Any) -> Any:
        words, top, low, block = held
        later = uint32(block + uint32(16))
        return expand_nvfp4(words[1], scale_of(top, later)) + expand_nvfp4(words[3], scale_of(low, later))

    return hold_nvfp4, first_half, second_half
