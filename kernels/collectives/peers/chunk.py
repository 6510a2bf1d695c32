"""Eight float32 of a row in registers: their bits, their sums, and how they are stored."""

from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, int64

__all__ = ["added", "bits_of", "floats_of", "store_wide"]


@device_function
def floats_of(words: Any) -> Any:
    """8 float32 from their bits."""
    a, b, c, d, e, f, g, h = words
    return (
        ptx.float_of_bits(a),
        ptx.float_of_bits(b),
        ptx.float_of_bits(c),
        ptx.float_of_bits(d),
        ptx.float_of_bits(e),
        ptx.float_of_bits(f),
        ptx.float_of_bits(g),
        ptx.float_of_bits(h),
    )


@device_function
def bits_of(values: Any) -> Any:
    """The bits of 8 float32."""
    a, b, c, d, e, f, g, h = values
    return (
        ptx.bits_of_float(a),
        ptx.bits_of_float(b),
        ptx.bits_of_float(c),
        ptx.bits_of_float(d),
        ptx.bits_of_float(e),
        ptx.bits_of_float(f),
        ptx.bits_of_float(g),
        ptx.bits_of_float(h),
    )


@device_function
def added(one: Any, other: Any) -> Any:
    """The sum of two chunks."""
    a, b, c, d, e, f, g, h = one
    i, j, k, m, n, o, p, q = other
    return (
        ptx.add_rn(a, i),
        ptx.add_rn(b, j),
        ptx.add_rn(c, k),
        ptx.add_rn(d, m),
        ptx.add_rn(e, n),
        ptx.add_rn(f, o),
        ptx.add_rn(g, p),
        ptx.add_rn(h, q),
    )


@device_function
def store_wide(target: Any, values: Any) -> None:
    """Store 8 float32."""
    a, b, c, d, e, f, g, h = bits_of(values)
    ptx.store_global_128(target, a, b, c, d)
    ptx.store_global_128(target + int64(16), e, f, g, h)
