"""This module finds the exact bounds of top_k and top_p for a row in the shared memory of several blocks.

All are device functions. Every number of a row is a distance below the likeliest, and is ranked by the bits of its
magnitude; the likeliest is 0. A bound is found byte by byte, from the leading byte on. Each block adds up weights by
the value of the next byte (counts for top_k, masses for top_p). The blocks add theirs to the row's table, wait for each
other, and read the sums. All weights are integers, so the order of additions does not matter. The blocks of a row must
be resident together: they are at most those of `limits.VOCABULARY`, neighbours in the grid, and wait for no other
block.
"""

import functools
import math
from typing import Any

from lowlat.kernels.common.sentinels import next_turn
from lowlat.kernels.reference.sampling.sample import MASS_UNIT
from lowlat.kernels.sampling.select import CHUNK, EVERY_LANE, THREADS, WARPS
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, float64, int64, uint32
from lowlat.kernels.toolchain.ptx import atomic_add_gpu, float_of_bits, load_acquire_gpu, warp_sum

__all__ = ["BINS", "PASSES", "TALLY_WORDS", "clear_masses", "make_find_bound", "probabilities", "wait_for_row"]

BINS = 256
PASSES = 4  # 31 bits as 8 + 8 + 8 + 7
LIMB_BITS = 20  # a mass is two limbs: sums of 2048 of either fit 32 bits
LIMB_MASK = (1 << LIMB_BITS) - 1
COPIES = 2  # half a block each
TALLY_WORDS = COPIES * 2 * BINS
PARTS = CHUNK // THREADS
COMMON_DIGITS = 4  # digits added up by whole warps before lanes go their own ways
MAGNITUDE = 0x7FFFFFFF


@device_function
def probabilities(bits: Any) -> Any:
    """How likely a token is, as a multiple of the likeliest's: the exponential of a number given by its bits."""
    return float32(math.exp(float_of_bits(bits)))


@device_function
def _add(tally: Any, digit: Any, low: Any, high: Any) -> None:
    """Add a weight's limbs to a digit's two words; each half of the block has its own."""
    at = int64(digit) + (cuda.threadIdx.x // (THREADS // COPIES)) * (2 * BINS)
    cuda.atomic.add(tally, at, low)
    if high != uint32(0):
        cuda.atomic.add(tally, at + BINS, high)


@device_function
def _tally(tally: Any, digit: Any, low: Any, high: Any) -> None:
    """Add one weight of each lane, (0, 0) for none. Whole warps must come here: equal digits are added up first."""
    active = low != uint32(0) or high != uint32(0)
    for _ in range(COMMON_DIGITS):
        pending = cuda.ballot_sync(EVERY_LANE, active)
        if pending == 0:
            break
        leader = cuda.ffs(pending) - 1
        common = cuda.shfl_sync(EVERY_LANE, digit, leader)
        mine = active and digit == common
        low_sum = warp_sum(low if mine else uint32(0))
        high_sum = warp_sum(high if mine else uint32(0))
        if cuda.threadIdx.x & 31 == leader:
            _add(tally, common, low_sum, high_sum)
        active = active and not mine
    if active:
        _add(tally, digit, low, high)


@device_function
def wait_for_row(counter: Any, target: Any) -> None:
    """A barrier of all blocks of a row; `target` is how often it has been counted up then."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        atomic_add_gpu(counter, uint32(1))
        turns = uint32(0)
        while int64(load_acquire_gpu(counter)) < target:
            turns = next_turn(turns)
    cuda.syncthreads()


@device_function
def _sum_up_to(value: Any, sums: Any) -> Any:
    """Sums over a block's threads up to each, itself included, and of all. sums: [WARPS] int64 shared scratch."""
    thread = cuda.threadIdx.x
    for distance in (1, 2, 4, 8, 16):
        below = cuda.shfl_up_sync(EVERY_LANE, value, distance)
        if thread & 31 >= distance:
            value += below
    if thread & 31 == 31:
        sums[thread >> 5] = value
    cuda.syncthreads()
    total = int64(0)
    for warp in range(WARPS):
        if warp == thread >> 5:
            value += total
        total += sums[warp]
    return value, total


@device_function
def clear_masses(masses: Any, row: Any, tables: Any) -> None:
    """Put the first tables of a row back to zero, by one warp of the row's last block."""
    for table in range(tables):
        for digit in range(cuda.threadIdx.x & 31, BINS, 32):
            masses[row, table, digit] = 0


@functools.cache
def make_find_bound(chunks: int) -> Any:
    """A device function that finds one bound; specialised by the blocks of a row. All threads of all must come here."""

    @device_function
    def find_bound(
        chunk: Any,
        bound: Any,
        by_mass: Any,
        top_k: Any,
        top_p: Any,
        masses: Any,
        row: Any,
        table: Any,
        counter: Any,
        tally: Any,
        sums: Any,
    ) -> Any:
        """The magnitude that a token may have at most.

        chunk    [CHUNK] uint32  shared: bits of the numbers, pads minus infinity; visible to all threads
        bound    what larger magnitudes weigh nothing by mass
        by_mass  top_p's bound, else top_k's
        masses   [M, .., BINS] int64: the row's tables from `table` on, zero before
        counter  address of the row's barrier, counted up `table` times before
        tally    [TALLY_WORDS] uint32, sums [WARPS + 2] int64: shared scratch
        """
        thread = cuda.threadIdx.x
        prefix, need = uint32(0), int64(top_k)
        for step in range(PASSES):
            digits = 8 if step < PASSES - 1 else 7
            shift = 23 - 8 * step if step < PASSES - 1 else 0
            for part in range(TALLY_WORDS // THREADS):
                tally[part * THREADS + thread] = uint32(0)
            cuda.syncthreads()
            for part in range(cuda.blockDim.x // (THREADS // PARTS)):  # not a constant: copies would cost registers
                bits = chunk[part * THREADS + thread]
                magnitude = uint32(bits & uint32(MAGNITUDE))
                low, high = uint32(0), uint32(0)
                if uint32(magnitude >> uint32(shift + digits)) == prefix:
                    low = uint32(1)
                    if by_mass:
                        mass = int64(probabilities(bits) * float32(MASS_UNIT)) if magnitude <= bound else int64(0)
                        low, high = uint32(mass & LIMB_MASK), uint32(mass >> LIMB_BITS)
                digit = int64(uint32(magnitude >> uint32(shift))) & ((1 << digits) - 1)
                _tally(tally, digit, low, high)
            cuda.syncthreads()
            weight = int64(tally[thread]) + int64(tally[thread + 2 * BINS])
            weight += (int64(tally[thread + BINS]) + int64(tally[thread + 3 * BINS])) << LIMB_BITS
            if weight != 0:
                cuda.atomic.add(masses, (row, table + step, thread), weight)
            wait_for_row(counter, (table + step + 1) * chunks)
            weight = masses[row, table + step, thread]
            up_to, total = _sum_up_to(weight, sums)
            if by_mass and step == 0:
                need = int64(math.ceil(float64(top_p) * float64(total)))
                need = min(max(need, int64(1)), total)
            if up_to - weight < need <= up_to:
                sums[WARPS], sums[WARPS + 1] = thread, need - (up_to - weight)
            cuda.syncthreads()
            prefix = uint32((int64(prefix) << digits) | sums[WARPS])
            need = sums[WARPS + 1]
        return prefix

    return find_bound
