"""Fragments of INT4 weights: from a word of eight codes to pairs of bf16 in registers, their zero point taken off.

A code in the lowest bits of bf16's 128 is 128 and the code; less 128 and the zero point it is the number, exactly. A
group's scale is applied to its sum. Decode's GEMMs multiply a quarter of each number, exactly as well, and their sums
by four at the end: powers of two change no rounding.
"""

from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["MINUS_2", "MINUS_34", "MINUS_136", "SHARE", "expand", "expand_quarters", "load_half", "quarters_of"]

CODES = 0x000F000F
HIGH_CODES = 0x00F000F0
HUNDRED_28 = 0x43004300  # twice, in bf16
ONES = 0x3F803F80
MINUS_136 = 0xC308C308  # less 128 and the zero point 8
SHARE = 0.25  # of a number, that `load_half` gives
QUARTERS, THIRTY_2, TWO_TO_127 = 0x3E803E80, 0x42004200, 0x7F007F00  # twice, in bf16
MINUS_34, MINUS_2 = 0xC208C208, 0xC000C000  # a quarter of 136 and of 8, less than zero
MINUS_ZEROS = 0x80008000


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
def expand_quarters(word: Any, minus: Any, minus_high: Any) -> Any:
    """The numbers of `expand` divided by four, with one shift in place of three.

    minus       twice a quarter of 128 and the zero point, less than zero
    minus_high  twice a quarter of the zero point, less than zero

    A code in bits 4 to 7 of a bf16 is its value times 2**-129, since numbers of the lowest exponent go on where
    subnormal ones end; 2**127, the largest power, brings it to a quarter of its size.
    """
    codes, high, bits = uint32(CODES), uint32(HIGH_CODES), uint32(HUNDRED_28)
    quarter, power = uint32(QUARTERS), uint32(TWO_TO_127)
    later = uint32(word >> uint32(8))
    return (
        ptx.fma_bf16_pair(ptx.and_or(word, codes, bits), quarter, minus),
        ptx.fma_bf16_pair(word & high, power, minus_high),
        ptx.fma_bf16_pair(ptx.and_or(later, codes, bits), quarter, minus),
        ptx.fma_bf16_pair(later & high, power, minus_high),
    )


@device_function
def quarters_of(minus: Any) -> Any:
    """The pair of numbers that `expand_quarters` takes off, of the one that `expand` does."""
    quarter = uint32(QUARTERS)
    return ptx.fma_bf16_pair(minus, quarter, uint32(MINUS_ZEROS)), ptx.fma_bf16_pair(minus, quarter, uint32(THIRTY_2))


@device_function
def load_half(weights: Any, half: Any, minus: Any, low_minus: Any) -> Any:
    """A quarter of a lane's numbers of half a step: four words of a row, and four of the row 8 below.

    minus, low_minus  of either row, as `quarters_of` gives them
    """
    w0, w1, v0, v1 = ptx.load_shared_128(weights)
    if half == 0:
        a0, a1, a2, a3 = expand_quarters(w0, minus[0], minus[1])
        b0, b1, b2, b3 = expand_quarters(v0, low_minus[0], low_minus[1])
    else:
        a0, a1, a2, a3 = expand_quarters(w1, minus[0], minus[1])
        b0, b1, b2, b3 = expand_quarters(v1, low_minus[0], low_minus[1])
    return a0, a1, a2, a3, b0, b1, b2, b3
