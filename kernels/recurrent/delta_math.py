"""This module has device functions of gated delta nets: the convolution's sum, gates, l2 norms, the gated norm.

Kernels of steps and of prompts call the same functions, so a row's convolution, gates and norm do not depend on the
kernel. Results that are rounded to bf16 are float32 here. A lane has four neighbouring numbers of a head. Sums over a
head add a lane's squares by fused multiply-adds in order, then the lanes by a butterfly.
"""

import math
from typing import Any

from lowlat.kernels.common.activation import logistic, silu_times
from lowlat.kernels.common.norm_math import EVERY_LANE, high_value, inverse_rms, lane_sum, low_value
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, uint32

__all__ = [
    "NORM_EPS",
    "beta_of",
    "convolved",
    "convolved_pair",
    "decay_of",
    "four_numbers",
    "gated",
    "head_inverse",
    "lane_squares",
    "part_sum",
    "rounded",
    "store_four",
    "tile_sum",
    "unit_factor",
    "unit_heads",
]

NORM_EPS = 1e-6  # of the l2 norms, in every model


@device_function
def rounded(value: Any) -> Any:
    """A float32 rounded to bf16."""
    return low_value(ptx.bf16_bits(value))


@device_function
def convolved(x0: Any, x1: Any, x2: Any, x3: Any, w0: Any, w1: Any, w2: Any, w3: Any) -> Any:
    """The convolution's output, rounded, of inputs and taps that are numbers of bf16, the oldest first."""
    total = ptx.fma_rn(x3, w3, ptx.fma_rn(x2, w2, ptx.fma_rn(x1, w1, ptx.mul_rn(x0, w0))))
    return rounded(silu_times(rounded(total), float32(1.0)))


@device_function
def convolved_pair(a: Any, b: Any, c: Any, d: Any, low: Any, high: Any) -> Any:
    """Two channels that are `convolved`, packed: of packed inputs, the oldest first, and of the two words of taps of
    either channel."""
    first = ptx.fma_rn(low_value(b), high_value(low[0]), ptx.mul_rn(low_value(a), low_value(low[0])))
    first = ptx.fma_rn(low_value(d), high_value(low[1]), ptx.fma_rn(low_value(c), low_value(low[1]), first))
    second = ptx.fma_rn(high_value(b), high_value(high[0]), ptx.mul_rn(high_value(a), low_value(high[0])))
    second = ptx.fma_rn(high_value(d), high_value(high[1]), ptx.fma_rn(high_value(c), low_value(high[1]), second))
    pair = ptx.bf16_pair(first, second)
    first, second = low_value(pair), high_value(pair)
    return ptx.bf16_pair(ptx.mul_rn(first, logistic(first)), ptx.mul_rn(second, logistic(second)))


@device_function
def beta_of(b: Any) -> Any:
    """The share of a row's correction that is taken, of a GEMM's output b."""
    return rounded(logistic(rounded(b)))


@device_function
def decay_of(a: Any, a_log: Any, dt_bias: Any) -> Any:
    """The decay of the state at a row, of a GEMM's output a: exp(-exp(a_log) softplus(a + dt_bias))."""
    x = ptx.add_rn(rounded(a), dt_bias)
    small = float32(math.log1p(float32(math.exp(-abs(x)))))
    softplus = ptx.add_rn(x, small) if x > float32(0.0) else small
    return float32(math.exp(-ptx.mul_rn(float32(math.exp(a_log)), softplus)))


@device_function
def four_numbers(words: Any) -> Any:
    """Four words as float32."""
    return (
        ptx.float_of_bits(words[0]),
        ptx.float_of_bits(words[1]),
        ptx.float_of_bits(words[2]),
        ptx.float_of_bits(words[3]),
    )


@device_function
def store_four(address: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    """Four float32 to shared memory."""
    ptx.store_shared_128(
        address, ptx.bits_of_float(a), ptx.bits_of_float(b), ptx.bits_of_float(c), ptx.bits_of_float(d)
    )


@device_function
def unit_factor(squares: Any) -> Any:
    """1 / the l2 norm of a head, of the sum of its squares."""
    return float32(1.0) / float32(math.sqrt(ptx.add_rn(squares, float32(NORM_EPS))))


@device_function
def unit_heads(q: Any, k: Any, lane: Any, dim: Any, scale: Any) -> Any:
    """Divide a query and a key in shared memory by their l2 norms, scale the query, and give their product.

    q, k  addresses of dim float32 each. All lanes of a warp must come here; a lane reads and writes its own numbers.
    """
    query_squares, key_squares, product = float32(0.0), float32(0.0), float32(0.0)
    piece = lane
    while piece < uint32(dim // 4):
        x, y = (
            four_numbers(ptx.load_shared_128(q + piece * uint32(16))),
            four_numbers(ptx.load_shared_128(k + piece * uint32(16))),
        )
        for place in range(4):
            query_squares = ptx.fma_rn(x[place], x[place], query_squares)
            key_squares = ptx.fma_rn(y[place], y[place], key_squares)
        piece = uint32(piece + uint32(32))
    query_factor, key_factor = unit_factor(lane_sum(query_squares)), unit_factor(lane_sum(key_squares))
    piece = lane
    while piece < uint32(dim // 4):
        at = uint32(piece * uint32(16))
        x, y = four_numbers(ptx.load_shared_128(q + at)), four_numbers(ptx.load_shared_128(k + at))
        a, e = ptx.mul_rn(ptx.mul_rn(x[0], query_factor), float32(scale)), ptx.mul_rn(y[0], key_factor)
        b, f = ptx.mul_rn(ptx.mul_rn(x[1], query_factor), float32(scale)), ptx.mul_rn(y[1], key_factor)
        c, g = ptx.mul_rn(ptx.mul_rn(x[2], query_factor), float32(scale)), ptx.mul_rn(y[2], key_factor)
        d, h = ptx.mul_rn(ptx.mul_rn(x[3], query_factor), float32(scale)), ptx.mul_rn(y[3], key_factor)
        product = ptx.fma_rn(d, h, ptx.fma_rn(c, g, ptx.fma_rn(b, f, ptx.fma_rn(a, e, product))))
        store_four(q + at, a, b, c, d)
        store_four(k + at, e, f, g, h)
        piece = uint32(piece + uint32(32))
    return lane_sum(product)


@device_function
def tile_sum(value: Any) -> Any:
    """The sum over the 8 lanes that share a tile's columns, the same bits in each."""
    for offset in (4, 2, 1):
        value = ptx.add_rn(value, cuda.shfl_xor_sync(EVERY_LANE, value, offset))
    return value


@device_function
def lane_squares(x: Any) -> Any:
    """The squares of four numbers added up in order."""
    total = ptx.mul_rn(x[0], x[0])
    for place in range(1, 4):
        total = ptx.fma_rn(x[place], x[place], total)
    return total


@device_function
def part_sum(value: Any, lanes: Any) -> Any:
    """The sum over so many neighbouring lanes, 2, 4 or 8, the same bits in each."""
    if lanes == 8:
        value = ptx.add_rn(value, cuda.shfl_xor_sync(EVERY_LANE, value, 4))
    if lanes >= 4:
        value = ptx.add_rn(value, cuda.shfl_xor_sync(EVERY_LANE, value, 2))
    return ptx.add_rn(value, cuda.shfl_xor_sync(EVERY_LANE, value, 1))


@device_function
def gated(x: Any, inverse: Any, weight: Any, z: Any) -> Any:
    """One element of the gated norm, before it is rounded; inverse: 1 / rms of its head."""
    weighted = rounded(ptx.mul_rn(rounded(ptx.mul_rn(x, inverse)), weight))
    return ptx.mul_rn(weighted, silu_times(rounded(z), float32(1.0)))


@device_function
def head_inverse(sums: Any, parts: Any, dim: Any, eps: Any) -> Any:
    """1 / rms of a head, of the sums of its parts' squares at an address in shared memory, added up in order."""
    total = ptx.load_shared_f32(sums)
    for part in range(1, parts):
        total = ptx.add_rn(total, ptx.load_shared_f32(sums + uint32(4) * uint32(part)))
    return inverse_rms(total, dim, eps)
