"""This module loads and stores by address, for small kernels: an element in two instructions, or rows by 16 bytes.

Indices are int64 and count elements. Indexing an array would add a sign check and a product by every extent.
"""

from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, int32, int64, uint32

__all__ = [
    "WIDE",
    "byte_at",
    "copy_row",
    "divide",
    "int_at",
    "long_at",
    "set_byte",
    "set_int",
    "set_long",
    "threads_for",
    "turns",
    "wide_count",
    "zero_row",
]

WIDE = 16  # bytes of the widest load
MAX_THREADS = 512


@device_function
def int_at(base: Any, index: Any) -> Any:
    """Load an int32, as int64."""
    return int64(ptx.load_global_i32(base + int64(index) * int64(4)))


@device_function
def long_at(base: Any, index: Any) -> Any:
    """Load an int64."""
    return ptx.load_global_i64(base + int64(index) * int64(8))


@device_function
def byte_at(base: Any, index: Any) -> Any:
    """Load a uint8, as int64."""
    return int64(ptx.load_global_u8(base + int64(index)))


@device_function
def set_int(base: Any, index: Any, value: Any) -> None:
    """Store the low 32 bits of an int64."""
    ptx.store_global_i32(base + int64(index) * int64(4), int32(value))


@device_function
def set_long(base: Any, index: Any, value: Any) -> None:
    """Store an int64."""
    ptx.store_global_i64(base + int64(index) * int64(8), int64(value))


@device_function
def set_byte(base: Any, index: Any, value: Any) -> None:
    """Store the low 8 bits of an int64."""
    ptx.store_global_u8(base + int64(index), uint32(value))


def wide_count(name: str, tensor: torch.Tensor) -> int:
    """Count the 16-byte elements of a row of the tensor's last extent. Raises ShapeError if it is no multiple of 16."""
    size = tensor.shape[-1] * tensor.element_size()
    if size % WIDE or tensor.data_ptr() % WIDE:
        raise ShapeError(f"rows of {name} must be whole multiples of {WIDE} bytes, got {size}")
    return size // WIDE


def threads_for(count: int) -> int:
    """Return the threads of a block that copies a row of `count` wide elements; in long rows a thread takes two."""
    return min(MAX_THREADS, -(-count // 32) * 32)


@device_function
def divide(value: Any, divisor: Any) -> Any:
    """Return quotient and remainder of a number from 0 to 2**32 - 1; a constant divisor takes one product."""
    quotient = int64(uint32(value) // uint32(divisor))
    return quotient, int64(value) - quotient * divisor


@device_function
def turns(count: Any, threads: Any) -> Any:
    """Return the number of turns in which all threads together take `count` elements; a constant for constants.

    If a loop's number of turns is known and is one, the loop costs nothing. Else the compiler unrolls it fourfold.
    """
    return int64(uint32(count + threads - 1) // uint32(threads))


@device_function
def copy_row(thread: Any, threads: Any, count: Any, source: Any, target: Any) -> None:
    """Copy `count` wide elements, two loads at a time, since a load after a store would wait for the store."""
    for turn in range(turns(count, threads * 2)):
        place = thread + turn * (threads * 2)
        if place < count:
            second = place + threads
            a0, a1, a2, a3 = ptx.load_global_128(source + place * 16)
            b0, b1, b2, b3 = ptx.load_global_128(source + min(second, int64(count - 1)) * 16)
            ptx.store_global_128(target + place * 16, a0, a1, a2, a3)
            if second < count:
                ptx.store_global_128(target + second * 16, b0, b1, b2, b3)


@device_function
def zero_row(thread: Any, threads: Any, count: Any, target: Any) -> None:
    """Store zeros to `count` wide elements."""
    zero = uint32(0)
    for turn in range(turns(count, threads)):
        place = thread + turn * threads
        if place < count:
            ptx.store_global_128(target + place * 16, zero, zero, zero, zero)
