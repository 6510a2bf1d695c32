"""Fragments of NVFP4 weights: from a word of eight codes to pairs of bf16, times the scale of their block of 16.

A code has two significant bits and a scale four, so their product is a bf16 number, exactly. Codes come out of their
words times 2**-126 and scales times 2**118: a number is 2**-8 of its meaning, and the tensor's factor, which is the
epilogue's, 2**8 of its own. A packed scale has five bits of exponent and three of mantissa: it is brought to its place
in a bf16 by one multiply-add of integers, the least exponent's number too; blocks of zeros have codes of zeros.
"""

from typing import Any

from lowlat.kernels.formats import mxfp4_fragment
from lowlat.kernels.formats.nvfp4 import SCALE_BITS, SCALE_STEP
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, uint32

__all__ = ["load_half"]

MINUS_ZEROS = 0x80008000
TWICE = 0x00010001
decode = mxfp4_fragment.decode


@device_function
def scale_of(word: Any, shift: Any) -> Any:
    """A pair of bf16 of the packed scale in one byte of a word, times 2**118."""
    byte = (word >> shift) & uint32(0xFF)
    return uint32(byte * uint32(SCALE_STEP * TWICE) + uint32(SCALE_BITS * TWICE))


@device_function
def expand(word: Any, scale: Any) -> Any:
    """The four pairs of bf16 of a word of eight codes, times a scale."""
    a, b, c, d = decode(word)
    none = uint32(MINUS_ZEROS)
    return (
        ptx.fma_bf16_pair(a, scale, none),
        ptx.fma_bf16_pair(b, scale, none),
        ptx.fma_bf16_pair(c, scale, none),
        ptx.fma_bf16_pair(d, scale, none),
    )


@device_function
def load_half(weights: Any, half: Any, words: Any) -> Any:
    """A lane's numbers of half a step: four words of a row, and four of the row 8 below.

    words  address of a word of four scales of the row; that of the row below is 128 bytes after
    Of the two blocks of a half a lane's columns are in the first for the first two lanes of a row.
    """
    w0, w1, v0, v1 = ptx.load_shared_128(weights)
    shift = uint32(uint32(half * 16) + ((uint32(cuda.threadIdx.x) & uint32(2)) << uint32(2)))
    top = scale_of(ptx.load_shared_u32(words), shift)
    low = scale_of(ptx.load_shared_u32(uint32(words + uint32(128))), shift)
    if half == 0:
        a0, a1, a2, a3 = expand(w0, top)
        b0, b1, b2, b3 = expand(v0, low)
    else:
        a0, a1, a2, a3 = expand(w1, top)
        b0, b1, b2, b3 = expand(v1, low)
    return a0, a1, a2, a3, b0, b1, b2, b3
