"""This module computes logprobs of drawn tokens and of their likeliest alternatives, from the raw logits.

Each block ranks its chunk of a row and sums the exponentials relative to the chunk's largest. The last block of a row
combines them. The order of every sum is fixed by the vocabulary alone.
"""

import functools
import math
from typing import Any

import torch

from lowlat.kernels.common.norm_math import lane_sum
from lowlat.kernels.reference.sampling import logprobs as reference
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS, NUM_LOGPROBS
from lowlat.kernels.sampling.ranking import block_ranks, count_lists, make_row_ranks
from lowlat.kernels.sampling.select import (
    BROKEN,
    CHUNK,
    FINITE,
    GROUPS,
    MINUS_INFINITY,
    STRIDE,
    THREADS,
    WARPS,
    copies_wait_all,
    count_chunks,
    index_of_low,
    load_words,
    make_stage,
    value_of_key,
    words_broken,
)
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32
from lowlat.kernels.toolchain.ptx import (
    add_rn,
    float_of_bits,
    let_next_kernel_start,
    load_global_f32,
    load_shared_128,
    mul_rn,
    shared_address,
    store_global_f32,
    sync_warp,
    wait_for_previous_kernel,
)

__all__ = ["chunk_sum", "examples", "logprobs", "make_row_sum"]

COLUMNS = MAX_LOGPROBS + 1
RANKED_WORDS = 2 * MAX_LOGPROBS
BYTES = types.Array(types.uint8, 1, "C")
INTS = types.Array(types.int32, 1, "C")
INTS_2D = types.Array(types.int32, 2, "C")
LONGS_2D = types.Array(types.int64, 2, "C")
FLOATS_2D = types.Array(types.float32, 2, "C")


@launches_with(reference.logprobs)
def logprobs(given: Given, *, workspace: Workspace) -> list[KernelCall]:
    """Log-softmax of the drawn token and of the NUM_LOGPROBS likeliest, for the slots that ask.

    Time: rows that ask for nothing cost their fill. Raises ShapeError for arguments that do not fit and for V above
    327680.
    """
    batch, rows, width = given.sizes("B", "T", "V")
    count, chunks = batch * rows, count_chunks("logits", width)
    calls = (
        given["logits"],
        *(given[name].reshape(-1) for name in ("row_live", "target_tokens")),
        given["slots"],
        given["slot_ints"],
        *(given[name].reshape(count, COLUMNS) for name in ("logprob_values", "logprob_ids")),
        workspace(f"logprobs.partials.{count}.{chunks}", (count, chunks, MAX_LOGPROBS, 2), torch.int32),
        workspace(f"logprobs.sums.{count}.{chunks}", (count, chunks), torch.float32),
        workspace(f"logprobs.counters.{count}", (count,), torch.int32),
    )
    return [KernelCall(_make(width, rows), (chunks, count, 1), calls)]


@device_function
def _probabilities(bits: Any, largest: Any) -> Any:
    """The exponential of a number less the largest."""
    return float32(math.exp(add_rn(float_of_bits(bits), -largest)))


@device_function
def chunk_sum(staged: Any, largest: Any, sums: Any) -> Any:
    """The sum of a chunk's exponentials, the same bits in every thread; pads are minus infinity.

    sums  [WARPS] float32, shared memory that nobody reads or writes meanwhile
    """
    thread = cuda.threadIdx.x
    total = float32(0.0)
    for group in range(GROUPS):
        words = load_shared_128(uint32(staged + 4 * int64(group * STRIDE + 4 * thread)))
        total = add_rn(total, _probabilities(words[0], largest))
        total = add_rn(total, _probabilities(words[1], largest))
        total = add_rn(total, _probabilities(words[2], largest))
        total = add_rn(total, _probabilities(words[3], largest))
    total = lane_sum(total)
    if thread & 31 == 0:
        sums[thread >> 5] = total
    cuda.syncthreads()
    total = sums[0]
    for warp in range(1, WARPS):
        total = add_rn(total, sums[warp])
    return total


@functools.cache
def make_row_sum(chunks: int) -> Any:
    """A device function that sums a row's exponentials; specialised by its chunks."""
    firsts = tuple(range(0, max(chunks, 64), 32))

    @device_function
    def row_sum(lists: Any, stride: Any, sums: Any, largest: Any) -> Any:
        """A row's sum of exponentials from its chunks' sums and their largest, for one whole warp.

        lists  [chunks * stride * 2] uint32  shared: the chunks' ranked lists
        sums   address of the row's [chunks] float32
        """
        lane = int64(cuda.threadIdx.x & 31)
        total = float32(0.0)
        for first in firsts:
            chunk = lane + first
            if chunk < chunks:
                its_largest = value_of_key(lists[2 * stride * chunk])
                share = float32(math.exp(add_rn(its_largest, -largest)))
                total = add_rn(total, mul_rn(load_global_f32(sums + 4 * chunk), share))
        return lane_sum(total)

    return row_sum


@functools.cache
def _make(width: int, rows: int) -> Kernel:
    """Specialised by V and T."""
    chunks = count_chunks("logits", width)
    stage, row_ranks, row_sum = make_stage(width), make_row_ranks(chunks), make_row_sum(chunks)
    memory_words = max(CHUNK + RANKED_WORDS * WARPS, RANKED_WORDS * count_lists(chunks))
    most = min(MAX_LOGPROBS, width)

    def logprobs_kernel(
        logits: Any,
        row_live: Any,
        target_tokens: Any,
        slots: Any,
        slot_ints: Any,
        values: Any,
        ids: Any,
        partials: Any,
        chunk_sums: Any,
        counters: Any,
    ) -> None:
        wait_for_previous_kernel()
        let_next_kernel_start()
        memory = cuda.shared.array(memory_words, types.uint32, alignment=16)  # a chunk and its lists, then the row's
        ranked = cuda.shared.array(RANKED_WORDS, types.uint32)
        flag = cuda.shared.array(1, types.uint32)
        sums = cuda.shared.array(WARPS, types.float32)
        base = shared_address(memory)
        chunk, row, thread = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), cuda.threadIdx.x
        first, source = chunk * CHUNK, logits + row * (4 * width)
        slot = slots[row // rows]
        wanted = int64(-1)
        if slot >= 0 and row_live[row] != 0 and target_tokens[row] >= 0:
            wanted = min(slot_ints[slot, NUM_LOGPROBS], int64(most))
        finishes, largest = chunk == 0, float32(0.0)
        if wanted >= 0:
            stage(base, source, first, uint32(MINUS_INFINITY))
            copies_wait_all()
            bad = words_broken(load_words(base), first, width, uint32(FINITE))
            sync_warp()  # the barrier that counts wants whole warps
            broken = cuda.syncthreads_or(int32(1) if bad else int32(0)) != 0
            ranks = max(wanted, int64(1))
            block_ranks(base, first, MAX_LOGPROBS, ranks, memory[CHUNK:], ranked)
            total = chunk_sum(base, value_of_key(ranked[0]), sums)
            if thread == 0:
                store_global_f32(chunk_sums + 4 * (row * chunks + chunk), total)
                if broken:
                    ranked[0] = uint32(BROKEN)
            mine = partials + row * (8 * chunks * MAX_LOGPROBS)
            finishes = row_ranks(ranked, MAX_LOGPROBS, ranks, mine, counters + 4 * row, chunk, memory, flag)
            if ranked[0] == uint32(BROKEN):
                wanted = int64(-1)
            largest = value_of_key(ranked[0])
        if not finishes or thread >= 32:
            return
        logarithm = float32(0.0)
        if wanted >= 0:
            row_total = row_sum(memory, MAX_LOGPROBS, chunk_sums + 4 * row * chunks, largest)
            logarithm = float32(math.log(row_total))
        if thread < COLUMNS:
            token, value = int32(-1), float32(0.0)
            if thread <= wanted:
                token = target_tokens[row]
                if thread > 0:
                    token = int32(index_of_low(ranked[2 * thread - 1]))
                logit = load_global_f32(source + 4 * int64(token))
                value = add_rn(add_rn(logit, -largest), -logarithm)
            values[row, thread] = value
            ids[row, thread] = token

    signature = (types.int64, BYTES, INTS, INTS, LONGS_2D, FLOATS_2D, INTS_2D, types.int64, types.int64, types.int64)
    return Kernel(f"logprobs_{width}_{rows}", logprobs_kernel, signature, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: with and without wide loads, and of more chunks than a warp merges at once."""
    return [_make(128256, 4), _make(97, 2), _make(262208, 1)]
