"""This module decodes e4m3 codes of keys and values in registers, as in `kernels.reference.attention.kv_codes`.

A word has four codes. A code's sign is put at bit 15 of a bf16, and its seven other bits at bits 10 to 4. That is its
value times 2**-120, for subnormal numbers, too. One product with 2**120 times the scale gives the number, rounded once.
Pairs are of bytes 0 and 2, and of bytes 1 and 3, so that no byte has to move to the other half of the word.
"""

from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, int64, uint32

__all__ = ["decode", "decode_in_order", "encode", "four_codes", "load_multiplier", "load_scale", "nan_bits"]

SIGNS, MAGNITUDES = 0x80008000, 0x07F007F0
MINUS_ZEROS = 0x80008000
TWO_TO_120 = 2.0**120
INFINITE, LARGEST, NAN_CODE = 0x7F800000, 0x43E00000, 0x7F  # of float32: infinity, 448
LEAST_NORMAL, SUBNORMAL_UNIT = 0x3C800000, 0x46800000  # 2**-6; 2**14, whose last bit is worth 2**-9
REBIAS, SHIFT = 0xC4000000 + 0x7FFFF, 20  # the exponents' biases, 7 less 127, and what rounds down at half


@device_function
def load_scale(scales: Any, index: Any) -> Any:
    """Load the scale of a head's keys or values; all heads' keys come first, then all heads' values."""
    return ptx.load_global_f32(scales + int64(index) * 4)


@device_function
def load_multiplier(scales: Any, index: Any) -> Any:
    """Load a scale in the form of `decode`: 2**120 times the scale, in bf16, in both halves of a word."""
    bits = ptx.bits_of_float(ptx.mul_rn(load_scale(scales, index), float32(TWO_TO_120)))
    return uint32(bits | (bits >> uint32(16)))


@device_function
def decode(word: Any, multiplier: Any) -> Any:
    """Decode bytes 0 and 2, and bytes 1 and 3, to pairs of bf16; the code of NaN gives 480 times the scale."""
    signs = uint32(SIGNS)
    even = (uint32(word << uint32(8)) & signs) | (uint32(word << uint32(4)) & uint32(MAGNITUDES))
    odd = (word & signs) | ((word >> uint32(4)) & uint32(MAGNITUDES))
    none = uint32(MINUS_ZEROS)
    return ptx.fma_bf16_pair(even, multiplier, none), ptx.fma_bf16_pair(odd, multiplier, none)


@device_function
def nan_bits(word: Any) -> Any:
    """Return a word whose bits 7, 15, 23 and 31 say which of four codes are NaN; its other bits are undefined."""
    return uint32((word & uint32(0x7F7F7F7F)) + uint32(0x01010101))


@device_function
def decode_in_order(word: Any, multiplier: Any) -> Any:
    """Decode bytes 0 and 1, and bytes 2 and 3, to pairs of bf16; the code of NaN gives NaN."""
    even, odd = decode(word, multiplier)
    broken = nan_bits(word) & uint32(0x80808080)
    if broken:
        even = uint32(even | ((broken >> uint32(7)) & uint32(0x00010001)) * uint32(0x7FFF))
        odd = uint32(odd | ((broken >> uint32(15)) & uint32(0x00010001)) * uint32(0x7FFF))
    low = uint32((even & uint32(0xFFFF)) | uint32(odd << uint32(16)))
    return low, uint32((even >> uint32(16)) | (odd & uint32(0xFFFF0000)))


@device_function
def encode(value: Any, scale: Any) -> Any:
    """Encode a float32 number, which is first rounded to bf16, as keys and values of the compute dtype are."""
    rounded = ptx.float_of_bits(uint32(ptx.bf16_bits(value) << uint32(16)))
    bits = ptx.bits_of_float(ptx.div_rn(rounded, scale))
    sign, magnitude = (bits >> uint32(24)) & uint32(0x80), bits & uint32(0x7FFFFFFF)
    is_nan = magnitude > uint32(INFINITE)
    magnitude = min(magnitude, uint32(LARGEST))
    unit = uint32(SUBNORMAL_UNIT)
    small = ptx.bits_of_float(ptx.add_rn(ptx.float_of_bits(magnitude), ptx.float_of_bits(unit)))
    code = uint32(magnitude + uint32(REBIAS) + ((magnitude >> uint32(SHIFT)) & uint32(1))) >> uint32(SHIFT)
    if magnitude < uint32(LEAST_NORMAL):
        code = uint32(small - unit)
    return uint32(NAN_CODE) if is_nan else uint32(code | sign)


@device_function
def four_codes(a: Any, b: Any, c: Any, d: Any, scale: Any) -> Any:
    """Encode four numbers to a word, the first in byte 0."""
    low = encode(a, scale) | uint32(encode(b, scale) << uint32(8))
    return uint32(low | uint32(encode(c, scale) << uint32(16)) | uint32(encode(d, scale) << uint32(24)))
