"""Fragments of FP8 weights: from a word of four e4m3 codes to pairs of bf16 in registers.

A code's sign, four bits of exponent and three of mantissa, put at bits 15 and 10 to 4 of a bf16, are its value times
2**-120, subnormal numbers too; one product brings it to its size, exactly. Scales are the epilogue's.
"""

from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["expand", "load_half"]

FIRST = 0x87F087F0  # where a code's bits belong, in both halves
# The second pair has the other bits of a half-word: the sign and the lower four bits of a code come to their places by
# a shift to the left, the upper three by one to the right.
LEFT, RIGHT = 0x80F080F0, 0x07000700
TWO_TO_120 = 0x7B807B80  # twice, in bf16
MINUS_ZEROS = 0x80008000


@device_function
def expand(word: Any) -> Any:
    """The two pairs of bf16 of a word of four codes."""
    first = word & uint32(FIRST)
    second = ((word << uint32(4)) & uint32(LEFT)) | ((word >> uint32(4)) & uint32(RIGHT))
    none = uint32(MINUS_ZEROS)
    return ptx.fma_bf16_pair(first, uint32(TWO_TO_120), none), ptx.fma_bf16_pair(second, uint32(TWO_TO_120), none)


@device_function
def load_half(weights: Any, half: Any, _words: Any) -> Any:
    """A lane's numbers of half a step: four words of a row, and four of the row 8 below."""
    w0, w1, w2, w3 = ptx.load_shared_128(weights)
    v0, v1, v2, v3 = ptx.load_shared_128(uint32(weights + uint32(512)))
    if half == 0:
        a0, a1 = expand(w0)
        a2, a3 = expand(w1)
        b0, b1 = expand(v0)
        b2, b3 = expand(v1)
    else:
        a0, a1 = expand(w2)
        a2, a3 = expand(w3)
        b0, b1 = expand(v2)
        b2, b3 = expand(v3)
    return a0, a1, a2, a3, b0, b1, b2, b3
