"""This module has the scalar instructions of `ptx` in Python, for Numba's simulator: loads, stores, order, rounding."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "add_rn",
    "array_address",
    "atomic_add_gpu",
    "bf16_bits",
    "bf16_pair",
    "bits_of_float",
    "div_rn",
    "exp2_approx",
    "exp2_approx_ftz",
    "fence_system",
    "float_of_bits",
    "fma_rn",
    "let_next_kernel_start",
    "load_acquire_gpu",
    "load_acquire_system",
    "load_ahead_128",
    "load_global_64",
    "load_global_128",
    "load_global_f32",
    "load_global_i32",
    "load_global_i64",
    "load_global_nc_128",
    "load_global_u8",
    "load_volatile_i32",
    "load_volatile_i64",
    "mul_rn",
    "rcp_approx_ftz",
    "store_global_64",
    "store_global_128",
    "store_global_f32",
    "store_global_i32",
    "store_global_i64",
    "store_global_u8",
    "store_global_u16",
    "store_global_u32",
    "store_relaxed_gpu_f32",
    "store_release_system",
    "sync_warp",
    "wait_for_previous_kernel",
]


def _nothing() -> None:
    return None


wait_for_previous_kernel = let_next_kernel_start = fence_system = sync_warp = _nothing


def _load(kind: Any) -> Callable[[int], Any]:
    return lambda address: kind.from_address(int(address)).value


def _store(kind: Any) -> Callable[[int, Any], None]:
    def store(address: int, value: Any) -> None:
        kind.from_address(int(address)).value = value.item() if isinstance(value, np.generic) else value

    return store


load_global_f32 = _load(ctypes.c_float)
load_global_i32 = load_volatile_i32 = _load(ctypes.c_int32)
load_global_i64 = load_volatile_i64 = load_acquire_system = _load(ctypes.c_int64)
load_global_u8 = _load(ctypes.c_uint8)
load_acquire_gpu = _load(ctypes.c_uint32)
store_global_f32 = store_relaxed_gpu_f32 = _store(ctypes.c_float)
store_global_i32 = _store(ctypes.c_int32)
store_global_u16 = _store(ctypes.c_uint16)
store_global_u32 = _store(ctypes.c_uint32)
store_global_u8, store_global_i64 = _store(ctypes.c_uint8), _store(ctypes.c_int64)
store_release_system = _store(ctypes.c_int64)


def load_global_128(address: int) -> tuple[int, int, int, int]:
    """Four words."""
    a, b, c, d = (load_acquire_gpu(address + 4 * k) for k in range(4))
    return a, b, c, d


load_global_nc_128 = load_ahead_128 = load_global_128


def load_global_64(address: int) -> tuple[int, int]:
    """Two words."""
    return load_acquire_gpu(address), load_acquire_gpu(address + 4)


def store_global_64(address: int, a: int, b: int) -> None:
    """Two words."""
    store_global_u32(address, a)
    store_global_u32(address + 4, b)


def store_global_128(address: int, a: int, b: int, c: int, d: int) -> None:
    """Four words."""
    for place, word in enumerate((a, b, c, d)):
        store_global_u32(address + 4 * place, word)


def atomic_add_gpu(address: int, value: int) -> int:
    """The value before."""
    before = load_acquire_gpu(address)
    store_global_u32(address, before + value)
    return int(before)


def add_rn(a: float, b: float) -> np.float32:
    """One rounding."""
    return np.float32(a) + np.float32(b)


def mul_rn(a: float, b: float) -> np.float32:
    """One rounding."""
    return np.float32(a) * np.float32(b)


def div_rn(a: float, b: float) -> np.float32:
    """One rounding."""
    return np.float32(a) / np.float32(b)


def fma_rn(a: float, b: float, c: float) -> np.float32:
    """One rounding: the product of two float32 is exact in float64."""
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def exp2_approx(x: float) -> np.float32:
    """2 to the x."""
    with np.errstate(over="ignore"):
        return np.float32(np.exp2(np.float32(x)))


def _flushed(value: Any) -> np.float32:
    """Round to float32; a subnormal number becomes 0 with its sign."""
    number = np.float32(value)
    return np.copysign(np.float32(0), number) if abs(number) < np.float32(2**-126) else number


def exp2_approx_ftz(x: float) -> np.float32:
    """Return 2 to the x; results below 2**-126 are 0."""
    return _flushed(exp2_approx(float(_flushed(x))))


def rcp_approx_ftz(x: float) -> np.float32:
    """Return 1 / x; 0 for x above 2**126, infinite for x below 2**-126."""
    with np.errstate(divide="ignore"):
        return _flushed(np.float32(1) / _flushed(x))


def bf16_bits(x: float) -> np.uint32:
    """The nearest bf16, ties to even; NaN stays NaN."""
    bits = int(np.float32(x).view(np.uint32))
    if np.isnan(x):
        return np.uint32(0x7FFF)
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF)


def bf16_pair(low: float, high: float) -> np.uint32:
    """Two of them in one word."""
    return np.uint32(int(bf16_bits(low)) | int(bf16_bits(high)) << 16)


def float_of_bits(bits: int) -> np.float32:
    """The float32 with these bits."""
    return np.uint32(bits).view(np.float32)


def bits_of_float(value: float) -> np.uint32:
    """The bits of a float32."""
    bits: np.uint32 = np.float32(value).view(np.uint32)
    return bits


def array_address(array: Any) -> int:
    """The address of the first element."""
    return int(getattr(array, "_ary", array).ctypes.data)
