"""This module sums a row's squares, in the one order of every kernel, and scales by them; device functions.

A block of THREADS threads has a row. Thread t adds the squares of the 8-element chunks t, t + THREADS, .. in element
order by fused multiply-adds; a butterfly adds the lanes of each warp, and the warps' sums are added in order. So the
bits of a norm depend on the row and its width alone, whichever kernel computes it.
"""

import math
from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, uint32
from lowlat.kernels.toolchain.ptx import add_rn, bf16_pair, float_of_bits, fma_rn, mul_rn

__all__ = [
    "CHUNK",
    "EVERY_LANE",
    "THREADS",
    "WARPS",
    "add_squares",
    "block_sum",
    "high_value",
    "inverse_rms",
    "lane_sum",
    "low_value",
    "make_block_sum",
    "normalised",
    "normalised_pair",
]

THREADS = 512
WARPS = THREADS // 32
CHUNK = 8  # elements of 16 bytes
EVERY_LANE = 0xFFFFFFFF


@device_function
def low_value(word: Any) -> Any:
    """Return the first of two packed bf16, as float32."""
    return float_of_bits(uint32(word) << uint32(16))


@device_function
def high_value(word: Any) -> Any:
    """Return the second of two packed bf16, as float32."""
    return float_of_bits(uint32(word) & uint32(0xFFFF0000))


@device_function
def add_squares(total: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Add the squares of a chunk, four words of two bf16, to total, in element order."""
    for word in (a, b, c, d):
        low, high = low_value(word), high_value(word)
        total = fma_rn(low, low, total)
        total = fma_rn(high, high, total)
    return total


@device_function
def lane_sum(value: Any) -> Any:
    """Sum over a warp's lanes by butterfly; each lane gets the same bits."""
    for offset in (16, 8, 4, 2, 1):
        value = add_rn(value, cuda.shfl_xor_sync(EVERY_LANE, value, offset))
    return value


@device_function
def block_sum(value: Any, sums: Any) -> Any:
    """Sum over a block of THREADS threads, lanes by butterfly, then warps in order; each thread gets the same bits.

    sums  [WARPS] float32, shared memory that no thread uses otherwise during the call; a second call needs another
    array, or a barrier before it. All threads of the block must call it.
    """
    value = lane_sum(value)
    thread = uint32(cuda.threadIdx.x)
    if thread & uint32(31) == uint32(0):
        sums[thread >> uint32(5)] = value
    cuda.syncthreads()
    total = sums[0]
    for warp in range(1, WARPS):
        total = add_rn(total, sums[warp])
    return total


def make_block_sum(warps: int) -> Any:
    """A device function that is `block_sum` for a block of fewer warps, with the same bits.

    The missing warps' chunks must be past the row's end.
    sums  [WARPS] float32, shared memory on a multiple of 16 bytes, which is read four at a time
    """

    fours = -(-warps // 4)

    @device_function
    def sum_block(value: Any, sums: Any) -> Any:
        value = lane_sum(value)
        thread = uint32(cuda.threadIdx.x)
        if thread & uint32(31) == uint32(0):
            sums[thread >> uint32(5)] = value
        cuda.syncthreads()
        address, total = ptx.shared_address(sums), float32(0.0)
        for four in range(fours):
            words = ptx.load_shared_128(uint32(address + uint32(16 * four)))
            for place in range(4):
                if 4 * four + place < warps:
                    total = add_rn(total, float_of_bits(words[place]))
        return total

    return sum_block


@device_function
def inverse_rms(total: Any, width: Any, eps: Any) -> Any:
    """Return 1 / sqrt(total / width + eps), every step rounded once; total is the sum of squares."""
    mean = float32(total) / float32(width)
    return float32(1.0) / float32(math.sqrt(add_rn(mean, float32(eps))))


@device_function
def normalised(x: Any, inverse: Any, weight: Any) -> Any:
    """Return one element of the norm, before it is rounded to the compute dtype."""
    return mul_rn(mul_rn(x, inverse), weight)


@device_function
def normalised_pair(word: Any, inverse: Any, weights: Any) -> Any:
    """Normalise two packed bf16 elements by two packed bf16 weights, and pack them again."""
    return bf16_pair(
        normalised(low_value(word), inverse, low_value(weights)),
        normalised(high_value(word), inverse, high_value(weights)),
    )
