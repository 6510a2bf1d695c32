"""Steps of an expert's GEMM for one warp: each 16 weight rows by 64 columns times up to eight inputs.

MXFP4: a code's sign and its three bits of magnitude, put at bits 15 and 8 to 6 of a bf16, are its value times 2**-126;
the lowest magnitudes are subnormal there, and mma reads those exactly. Inputs come times 2**63 (exact for magnitudes
below 2**64), so that products keep all bits for inputs from 2**-62 on. A block's sum of 32 is 2**-63 of what it stands
for: packed scales are 63 above their meaning, and one multiply-add brings it to its size and joins it to the sums.
"""

from typing import Any

from lowlat.kernels.moe.plan import SCALE_BYTES, ExpertPlan, ExpertShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32

__all__ = ["MINUS_ZEROS", "TWO_TO_63", "decode", "make_multiply", "scaled"]

TWO_TO_63 = 0x5F005F00  # twice, in bf16
MINUS_ZEROS = 0x80008000
CODE = 0x81C081C0  # where a code's bits belong, in both halves
LAST_PAIR = 0x6C006C00  # where the fourth code of a half-word lies: bits 13, 14, 10 and the sign in 11
# shifted down by 7 these are bits 6, 7, 3 and 4: they stay, and bits 3 and 4 come to 8 and 15 as well. No two of the
# product's terms meet, in neither half: nothing is carried.
SPREAD = 1 | 1 << 5 | 1 << 11
EXPONENT = 0x7F800000


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


def make_multiply(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function: add a part of a tile to a warp's four sums.

    It takes the sums, the addresses of the lane's words and scales, its inputs, and how many steps the part has.
    """
    part, step_bytes = plan.part, shape.step_bytes
    even, multiply = plan.is_even(shape), _make_multiply_step(shape)

    @device_function
    def multiply_part(sums: Any, words: Any, scales: Any, x: Any, count: Any) -> Any:
        if even or count > uint32(0):
            sums = multiply(sums, words, scales, x[0])
        if part > 1 and (even or count > uint32(1)):
            sums = multiply(sums, uint32(words + uint32(step_bytes)), uint32(scales + uint32(SCALE_BYTES)), x[1])
        if part > 2 and (even or count > uint32(2)):
            sums = multiply(
                sums, uint32(words + uint32(2 * step_bytes)), uint32(scales + uint32(2 * SCALE_BYTES)), x[2]
            )
        return sums

    return multiply_part


def _make_multiply_step(shape: ExpertShape) -> Any:
    """A function of the sums, the addresses of the lane's words and of its scales, and its inputs of a step."""

    @device_function
    def multiply_codes(sums: Any, words: Any, scales: Any, x: Any) -> Any:
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
    def multiply_numbers(sums: Any, words: Any, _scales: Any, x: Any) -> Any:
        c0, c1, c2, c3 = sums
        for part in range(2):
            a0, a1, a2, a3 = ptx.load_shared_128(words + uint32(part * 512))
            b0, b1, b2, b3 = ptx.load_shared_128(words + uint32(part * 512 + 1024))
            if part == 0:
                c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a0, b0, a1, b1, x[0], x[1])
                c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a2, b2, a3, b3, x[2], x[3])
            else:
                c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a0, b0, a1, b1, x[4], x[5])
                c0, c1, c2, c3 = ptx.mma_bf16(c0, c1, c2, c3, a2, b2, a3, b3, x[6], x[7])
        return c0, c1, c2, c3

    return multiply_codes if shape.quantised else multiply_numbers
