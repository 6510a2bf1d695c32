"""This module takes the likeliest draft ids of each row, as target ids, with their log-softmax.

Each block ranks its chunk of a row and sums its exponentials. The last block of a row combines them, in an order that
is fixed by the vocabulary alone.
"""

import functools
import math
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, int_at, set_int
from lowlat.kernels.reference.speculation import draft_scores as reference
from lowlat.kernels.sampling.logprobs.tokens import chunk_sum, make_row_sum
from lowlat.kernels.sampling.ranking import block_ranks, count_lists, make_row_ranks
from lowlat.kernels.sampling.select import (
    BROKEN,
    CHUNK,
    FINITE,
    MINUS_INFINITY,
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
from lowlat.kernels.speculation.limits import MAX_SCORED_RANKS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, float32, int32, int64, types, uint32

__all__ = ["draft_topk_logprobs", "examples"]


@launches_with(reference.draft_topk_logprobs)
def draft_topk_logprobs(given: Given, *, workspace: Workspace) -> list[KernelCall]:
    """`draft_topk_logprobs` of the reference.

    Time: one read of the logits, k steps of a warp, three times over, and an exponential for each logit.
    Raises ShapeError for k outside 1..32 or above Vd, for Vd above 327680, and for arguments that do not fit.
    """
    rows, width, k = given.sizes("R", "Vd", "k")
    if not 1 <= k <= min(width, MAX_SCORED_RANKS):
        raise ShapeError(f"k must be from 1 to {min(width, MAX_SCORED_RANKS)}, got {k}")
    row_live = given.arrays.get("row_live")
    live = 0 if row_live is None else row_live.reshape(-1)
    chunks = count_chunks("logits", width)
    partials = workspace(f"draft_topk_logprobs.partials.{rows}.{chunks}.{k}", (rows, chunks, k, 2), torch.int32)
    sums = workspace(f"draft_topk_logprobs.sums.{rows}.{chunks}", (rows, chunks), torch.float32)
    counters = workspace(f"draft_topk_logprobs.counters.{rows}", (rows,), torch.int32)
    outs = given.take("draft_to_target", "top_tokens", "top_logprobs")
    calls = (given["logits"], live, *outs, partials, sums, counters)
    return [KernelCall(_make(width, k, row_live is not None), (chunks, rows, 1), calls)]


@functools.cache
def _make(width: int, k: int, masked: bool) -> Kernel:
    """Specialised by Vd, k and whether rows may be dead."""
    chunks = count_chunks("logits", width)
    stage, row_ranks, row_sum = make_stage(width), make_row_ranks(chunks), make_row_sum(chunks)
    memory_words, ranked_words = max(CHUNK + 2 * k * WARPS, 2 * k * count_lists(chunks)), 2 * k

    def kernel(
        logits: Any,
        row_live: Any,
        draft_to_target: Any,
        top_tokens: Any,
        top_logprobs: Any,
        partials: Any,
        chunk_sums: Any,
        counters: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        memory = cuda.shared.array(memory_words, types.uint32, alignment=16)  # a chunk and its lists, then the row's
        ranked = cuda.shared.array(ranked_words, types.uint32)
        flag = cuda.shared.array(1, types.uint32)
        sums = cuda.shared.array(WARPS, types.float32)
        base = ptx.shared_address(memory)
        chunk, row, thread = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), cuda.threadIdx.x
        first, live, finishes = chunk * CHUNK, True, chunk == 0
        if masked:
            live = byte_at(row_live, row) != 0
        if live:
            stage(base, logits + row * (4 * width), first, uint32(MINUS_INFINITY))
            copies_wait_all()
            bad = words_broken(load_words(base), first, width, uint32(FINITE))
            ptx.sync_warp()  # the barrier that counts wants whole warps
            broken = cuda.syncthreads_or(int32(1) if bad else int32(0)) != 0
            block_ranks(base, first, k, k, memory[CHUNK:], ranked)
            total = chunk_sum(base, value_of_key(ranked[0]), sums)
            if thread == 0:
                ptx.store_global_f32(chunk_sums + 4 * (row * chunks + chunk), total)
                if broken:
                    ranked[0] = uint32(BROKEN)
            mine = partials + row * (8 * chunks * k)
            finishes = row_ranks(ranked, k, k, mine, counters + 4 * row, chunk, memory, flag)
            live = ranked[0] != uint32(BROKEN)
        if not finishes or thread >= 32:
            return
        logarithm, largest = float32(0.0), float32(0.0)
        if live:
            largest = value_of_key(ranked[0])
            logarithm = float32(math.log(row_sum(memory, k, chunk_sums + 4 * row * chunks, largest)))
        for rank in range(thread, k, 32):
            token, value = int64(-1), float32(0.0)
            if live:
                token = int_at(draft_to_target, index_of_low(ranked[2 * rank + 1]))
                value = ptx.add_rn(ptx.add_rn(value_of_key(ranked[2 * rank]), -largest), -logarithm)
            set_int(top_tokens, row * k + rank, token)
            ptx.store_global_f32(top_logprobs + 4 * (row * k + rank), value)

    name = f"draft_topk_logprobs_{width}_{k}_{'masked' if masked else 'whole'}"
    return Kernel(name, kernel, (types.int64,) * 8, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile."""
    return [_make(32000, 8, True)]
