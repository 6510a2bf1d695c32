"""Fragments of INT4 weights: from a word of eight codes to pairs of bf16 in registers, their zero point taken off.

A code in the lowest bits of bf16's 128 is 128 and the code; less 128 and the zero point it is the number, exactly. A
group's scale is applied to its sum.
"""

from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["MINUS_136", "expand", "load_half"]

CODES = 0x000F000F
HUNDRED_28 = 0x43004300  # twice, in bf16
ONES = 0x3F803F80
MINUS_136 = 0xC308C308  # less 128 and the zero point 8


@device_function
def expand(word: Any, minus: Any) -> Any:
    """The four pairs of bf16 of a word of eight codes; minus: twice 128 and the zero point, less than zero."""
    codes, bits = uint32(CODES), uint32(HUNDRED_28)
    a, b = ptx.and_or(word, codes, bits), ptx.and_or(uint32(word >> uint32(4)), codes, bits)
    c, d = ptx.and_or(uint32(word >> uint32(8)), codes, bits), ptx.and_or(uint32(word >> uint32(12)), codes, bits)
    one = uint32(ONES)
    return (
        ptx.fma_bf16_pair(a, one, minus),
        ptx.fma_bf16_pair(b, one, minus),
        ptx.fma_bf16_pair(c, one, minus),
        ptx.fma_bf16_pair(d, one, minus),
    )


@device_function
def load_half(weights: Any, half: Any, minus: Any, low_minus: Any) -> Any:
    """A lane's numbers of half a step: four words of a row, and four of the row 8 below."""
    w0, w1, v0, v1 = ptx.load_shared_128(weights)
    if half == 0:
        a0, a1, a2, a3 = expand(w0, minus)
        b0, b1, b2, b3 = expand(v0, low_minus)
    else:
        a0, a1, a2, a3 = expand(w1, minus)
        b0, b1, b2, b3 = expand(v1, low_minus)
    return a0, a1, a2, a3, b0, b1, b2, b3
