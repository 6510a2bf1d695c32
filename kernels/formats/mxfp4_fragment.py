"""Fragments of MXFP4 weights: from a word of eight codes to pairs of bf16 in registers.

A code's sign and its three bits of magnitude, put at bits 15 and 8 to 6 of a bf16, are its value times 2**-126; the
lowest magnitudes are subnormal there, and mma reads those exactly. In decode, inputs come times 2**63 (exact for
magnitudes below 2**64), so that products keep all bits for inputs from 2**-62 on. A block's sum of 32 is 2**-63 of what
it stands for: packed scales are 63 above their meaning, and one multiply-add brings it to its size and joins it to the
sums. In prefill, codes become exact bf16: so every pair's sums are those of plain weights.
"""

from typing import Any

from lowlat.kernels.formats.mxfp4 import MXFP4
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32

__all__ = [
    "as_multiplied",
    "decode",
    "first_half",
    "hold_step",
    "make_multiply_tiles",
    "multiply_step",
    "scaled",
    "second_half",
]

TILE_BYTES, SCALE_BYTES = MXFP4.tile_bytes, MXFP4.scale_bytes
TWO_TO_63 = 0x5F005F00  # twice, in bf16
MINUS_ZEROS = 0x80008000
CODE = 0x81C081C0  # where a code's bits belong, in both halves
LAST_PAIR = 0x6C006C00  # where the fourth code of a half-word lies: bits 13, 14, 10 and the sign in 11
# shifted down by 7 these are bits 6, 7, 3 and 4: they stay, and bits 3 and 4 come to 8 and 15 as well. No two of the
# product's terms meet, in neither half: nothing is carried.
SPREAD = 1 | 1 << 5 | 1 << 11
EXPONENT = 0x7F800000
TWICE = 0x00800080  # a byte to the exponents of both halves
# A code times 2**-126 wants 2 to the scale less 1, whose exponent is 63 above the stored one. Stored ones from 192 on
# leave bf16 that way: they are applied in two parts.
ABOVE = 0x1F801F80
TOP_BITS = 0x80808080


@device_function
def decode(word: Any) -> Any:
    """The four pairs of bf16, times 2**-126, of a word of eight codes."""
    first = word & uint32(CODE)
    second = (word << uint32(3)) & uint32(CODE)
    third = (word << uint32(6)) & uint32(CODE)
    last = (((word & uint32(LAST_PAIR)) >> uint32(7)) * uint32(SPREAD)) & uint32(CODE)
    return first, second, third, last


@device_function
def scaled(word: Any) -> Any:
    """A pair of bf16 times 2**63."""
    return ptx.fma_bf16_pair(word, uint32(TWO_TO_63), uint32(MINUS_ZEROS))


@device_function
def _block(w: Any, v: Any, x0: Any, x1: Any, x2: Any, x3: Any) -> Any:
    """The product of 32 columns: w the codes of a row, v of the row 8 below; times 2**-63."""
    zero = float32(0)
    a0, a1, a2, a3 = decode(w)
    b0, b1, b2, b3 = decode(v)
    d0, d1, d2, d3 = ptx.mma_bf16(zero, zero, zero, zero, a0, b0, a1, b1, x0, x1)
    return ptx.mma_bf16(d0, d1, d2, d3, a2, b2, a3, b3, x2, x3)


@device_function
def as_multiplied(words: Any) -> Any:
    """A lane's inputs of a step, times 2**63."""
    a, b, c, d, e, f, g, h = words
    return scaled(a), scaled(b), scaled(c), scaled(d), scaled(e), scaled(f), scaled(g), scaled(h)


@device_function
def multiply_step(sums: Any, words: Any, scales: Any, x: Any) -> Any:
    """A step of a tile: see `WeightFormat.decode_fragment`."""
    c0, c1, c2, c3 = sums
    # of a row the blocks 0 and 1, of the row 8 below the blocks 0 and 1
    w0, w1, w2, w3 = ptx.load_shared_128(words)
    powers = ptx.load_shared_u32(scales)
    d0, d1, d2, d3 = _block(w0, w2, x[0], x[1], x[2], x[3])
    e0, e1, e2, e3 = _block(w1, w3, x[4], x[5], x[6], x[7])
    top0 = ptx.float_of_bits((powers << uint32(23)) & uint32(EXPONENT))
    top1 = ptx.float_of_bits((powers << uint32(15)) & uint32(EXPONENT))
    low0 = ptx.float_of_bits((powers << uint32(7)) & uint32(EXPONENT))
    low1 = ptx.float_of_bits((powers >> uint32(1)) & uint32(EXPONENT))
    c0, c1 = ptx.fma_rn(d0, top0, c0), ptx.fma_rn(d1, top0, c1)
    c2, c3 = ptx.fma_rn(d2, low0, c2), ptx.fma_rn(d3, low0, c3)
    c0, c1 = ptx.fma_rn(e0, top1, c0), ptx.fma_rn(e1, top1, c1)
    return c0, c1, ptx.fma_rn(e2, low1, c2), ptx.fma_rn(e3, low1, c3)


@device_function
def _expanded(word: Any, stored: Any) -> Any:
    """Eight numbers of a word of codes, exactly, as four words; stored: their block's scale, below 192."""
    power = uint32(uint32(uint32(stored & uint32(255)) * uint32(TWICE)) + uint32(ABOVE))
    a, b, c, d = decode(word)
    none = uint32(MINUS_ZEROS)
    return (
        ptx.fma_bf16_pair(a, power, none),
        ptx.fma_bf16_pair(b, power, none),
        ptx.fma_bf16_pair(c, power, none),
        ptx.fma_bf16_pair(d, power, none),
    )


@device_function
def _expanded_twice(word: Any, stored: Any) -> Any:
    """As `_expanded`, for every scale that packing takes."""
    power = uint32(uint32(stored & uint32(255)) * uint32(TWICE))
    a, b, c, d = decode(word)
    none = uint32(MINUS_ZEROS)
    return (
        ptx.fma_bf16_pair(scaled(a), power, none),
        ptx.fma_bf16_pair(scaled(b), power, none),
        ptx.fma_bf16_pair(scaled(c), power, none),
        ptx.fma_bf16_pair(scaled(d), power, none),
    )


@device_function
def hold_step(step: Any, lane: Any) -> Any:
    """A lane's four words of codes of a step, and their blocks' scales: see `WeightFormat.prefill_halves`."""
    w0, w1, w2, w3 = ptx.load_shared_128(uint32(step + uint32(lane * uint32(16))))
    row = uint32(uint32(lane >> uint32(2)) * uint32(4))
    return w0, w1, w2, w3, ptx.load_shared_u32(uint32(uint32(step + uint32(TILE_BYTES)) + row))


@device_function
def _half(top: Any, low: Any, powers: Any, later: Any) -> Any:
    """The words of half a step, of a row and of the row 8 below; later: bits to the scale of the half's first block."""
    if uint32(powers & (powers << uint32(1)) & uint32(TOP_BITS)) != uint32(0):
        a = _expanded_twice(top, uint32(powers >> uint32(later)))
        b = _expanded_twice(low, uint32(powers >> uint32(later + 16)))
    else:
        a, b = _expanded(top, uint32(powers >> uint32(later))), _expanded(low, uint32(powers >> uint32(later + 16)))
    return a + b


@device_function
def first_half(held: Any) -> Any:
    """A lane's words of the first half of a step."""
    return _half(held[0], held[2], held[4], 0)


@device_function
def second_half(held: Any) -> Any:
    """A lane's words of the second half of a step."""
    return _half(held[1], held[3], held[4], 8)


def make_multiply_tiles(multiply: Any) -> Any:
    """A function: see `WeightFormat.prefill_fragment`."""

    @device_function
    def multiply_codes_half(
        sums: Any, top: Any, low: Any, powers: Any, second_top: Any, second_low: Any, second_powers: Any, wide: Any,
        rows: Any, live: Any,
    ) -> Any:  # fmt: skip
        if wide:
            a, b = _expanded_twice(top, powers), _expanded_twice(low, uint32(powers >> uint32(16)))
            c = _expanded_twice(second_top, second_powers)
            d = _expanded_twice(second_low, uint32(second_powers >> uint32(16)))
        else:
            a, b = _expanded(top, powers), _expanded(low, uint32(powers >> uint32(16)))
            c = _expanded(second_top, second_powers)
            d = _expanded(second_low, uint32(second_powers >> uint32(16)))
        return multiply(sums, a, b, c, d, rows, live)

    @device_function
    def multiply_codes(sums: Any, words: Any, scales: Any, rows: Any, later_rows: Any, live: Any) -> Any:
        # of a row the blocks 0 and 1, of the row 8 below the blocks 0 and 1
        w0, w1, w2, w3 = ptx.load_shared_128(words)
        v0, v1, v2, v3 = ptx.load_shared_128(uint32(words + uint32(TILE_BYTES)))
        p, q = ptx.load_shared_u32(scales), ptx.load_shared_u32(uint32(scales + uint32(SCALE_BYTES)))
        large = uint32(uint32((p & (p << uint32(1))) | (q & (q << uint32(1)))) & uint32(TOP_BITS))
        wide = large != uint32(0)
        sums = multiply_codes_half(sums, w0, w2, p, v0, v2, q, wide, rows, live)
        p, q = uint32(p >> uint32(8)), uint32(q >> uint32(8))
        return multiply_codes_half(sums, w1, w3, p, v1, v3, q, wide, later_rows, live)

    return multiply_codes
