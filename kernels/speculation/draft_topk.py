"""This module takes the likeliest draft ids of each row, as target ids, and stores them as children in the tree.

Chains (k = 1) use `argmax`, which reads pairs. For trees each block ranks its chunk, and the last block of a row ranks
the row.
"""

import functools
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation import draft_topk as reference
from lowlat.kernels.sampling.argmax import NextLevel, argmax
from lowlat.kernels.sampling.ranking import block_ranks, count_lists, make_row_ranks
from lowlat.kernels.sampling.row_pairs import row_pairs
from lowlat.kernels.sampling.select import (
    BROKEN,
    CHUNK,
    INFINITY,
    MINUS_INFINITY,
    THREADS,
    WARPS,
    copies_wait_all,
    count_chunks,
    index_of_low,
    load_words,
    make_stage,
    words_broken,
)
from lowlat.kernels.speculation.limits import MAX_RANKS
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.launches import Given, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, int32, int64, types, uint32
from lowlat.kernels.toolchain.ptx import let_next_kernel_start, shared_address, sync_warp, wait_for_previous_kernel

__all__ = ["draft_topk", "examples"]

BYTES = types.Array(types.uint8, 1, "C")
INTS = types.Array(types.int32, 1, "C")
INTS_2D = types.Array(types.int32, 2, "C")


@launches_with(reference.draft_topk)
def draft_topk(
    given: Given,
    *,
    workspace: Workspace,
    best: torch.Tensor | None = None,
    children: torch.Tensor | None = None,
    child_rows: torch.Tensor | None = None,
    child_ranks: torch.Tensor | None = None,
    draft_nodes: torch.Tensor | None = None,
    then: NextLevel | None = None,
) -> list[KernelCall]:
    """Take the k largest logits of each row and name their target ids; with the last four, `assign_drafts` too.

    The arguments of the reference's `draft_topk`, and
    best             [R, B, 2]     int32  with k = 1: what the logits' GEMM left, with the limit INFINITY (see
                                          `decode_gemm.PartialArgmax`); None: one more launch makes them
    children, child_rows, child_ranks  [n] int32, and draft_nodes [B, T] int32, updated: see `assign_drafts`
    then             with k = 1, of a chain: what is made of the drafts for the next ones
    Time: with k = 1 some trips to memory; else one read of the logits, and k steps of a warp, three times over.
    Raises ShapeError for k outside 1..64 or above Vd, for Vd above 327680, and for arguments that do not fit.
    """
    rows, width, k = given.sizes("R", "Vd", "k")
    if then is not None and k != 1:
        raise ShapeError(f"a next level is of a chain's drafts, k = 1, got {k}")
    if not 1 <= k <= min(width, MAX_RANKS):
        raise ShapeError(f"k must be from 1 to {min(width, MAX_RANKS)}, got {k}")
    assign = None
    if children is not None and child_rows is not None and child_ranks is not None and draft_nodes is not None:
        assign = (children, child_rows, child_ranks, draft_nodes)
    if k != 1:
        return _ranked(given, assign, workspace)
    calls: list[KernelCall] = []
    if best is None:
        best, calls = row_pairs(given["logits"], INFINITY, workspace)
    check_shape("best", best, rows, best.shape[1], 2)
    out, live = given["out"].reshape(-1), given.arrays.get("row_live")
    return [*calls, *argmax(best, live, out=out, names=given["draft_to_target"], assign=assign, then=then)]


def _ranked(given: Given, assign: tuple[torch.Tensor, ...] | None, workspace: Workspace) -> list[KernelCall]:
    rows, width, k = given.sizes("R", "Vd", "k")
    logits, names, out, row_live = given["logits"], given["draft_to_target"], given["out"], given.arrays.get("row_live")
    chunks = count_chunks("logits", width)
    live = out.view(torch.uint8).reshape(-1) if row_live is None else row_live.reshape(-1)
    tree: tuple[torch.Tensor, ...] = (names, names, names, out)  # no children: nothing of these is read
    per_slot, nodes = rows, 0
    if assign is not None:
        children, child_rows, child_ranks, draft_nodes = tree = assign
        nodes = children.shape[0]
        check_shape("child_rows", child_rows, nodes)
        check_shape("child_ranks", child_ranks, nodes)
        per_slot = rows // draft_nodes.shape[0]
        check_shape("logits", logits, per_slot * draft_nodes.shape[0], width)
    partials = workspace(f"draft_topk.partials.{rows}.{chunks}.{k}", (rows, chunks, k, 2), torch.int32)
    counters = workspace(f"draft_topk.counters.{rows}", (rows,), torch.int32)
    kernel = _make(width, k, per_slot, nodes, row_live is not None)
    return [KernelCall(kernel, (chunks, rows, 1), (logits, live, names, out, *tree, partials, counters))]


@functools.cache
def _make(width: int, k: int, per_slot: int, nodes: int, masked: bool) -> Kernel:
    """Specialised by Vd, k, the rows of a slot, the children to assign, and whether rows may be dead."""
    chunks = count_chunks("logits", width)
    stage, row_ranks = make_stage(width), make_row_ranks(chunks)
    memory_words, ranked_words = max(CHUNK + 2 * k * WARPS, 2 * k * count_lists(chunks)), 2 * k

    def draft_topk_kernel(
        logits: Any,
        row_live: Any,
        draft_to_target: Any,
        out: Any,
        children: Any,
        child_rows: Any,
        child_ranks: Any,
        draft_nodes: Any,
        partials: Any,
        counters: Any,
    ) -> None:
        wait_for_previous_kernel()
        let_next_kernel_start()
        memory = cuda.shared.array(memory_words, types.uint32, alignment=16)  # a chunk and its lists, then the row's
        ranked = cuda.shared.array(ranked_words, types.uint32)
        flag = cuda.shared.array(1, types.uint32)
        base = shared_address(memory)
        chunk, row, thread = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), cuda.threadIdx.x
        first, slot = chunk * CHUNK, row // per_slot
        stage(base, logits + row * (4 * width), first, uint32(MINUS_INFINITY))
        live = not masked or row_live[row] != 0
        copies_wait_all()
        if live:
            bad = words_broken(load_words(base), first, width, uint32(INFINITY))
            sync_warp()  # the barrier that counts wants whole warps
            broken = cuda.syncthreads_or(int32(1) if bad else int32(0)) != 0
            block_ranks(base, first, k, k, memory[CHUNK:], ranked)
            if broken and thread == 0:
                ranked[0] = uint32(BROKEN)
            mine = partials + row * (8 * chunks * k)
            last = row_ranks(ranked, k, k, mine, counters + row * 4, chunk, memory, flag)
            if not last:
                return
            live = ranked[0] != uint32(BROKEN)
        elif chunk != 0:
            return
        for rank in range(thread, k, THREADS):
            out[row, rank] = draft_to_target[index_of_low(ranked[2 * rank + 1])] if live else int32(-1)
        for child in range(thread, nodes, THREADS):
            if child_rows[child] == row - slot * per_slot:
                token = int32(-1)
                if live:
                    token = draft_to_target[index_of_low(ranked[2 * child_ranks[child] + 1])]
                draft_nodes[slot, children[child]] = token

    signature = (types.int64, BYTES, INTS, INTS_2D, INTS, INTS, INTS, INTS_2D, types.int64, types.int64)
    name = f"draft_topk_{width}_{k}_{per_slot}_{nodes}_{'masked' if masked else 'whole'}"
    return Kernel(name, draft_topk_kernel, signature, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: trees over a small, a full, an unaligned and the largest vocabulary."""
    trees = [_make(width, 10, 8, 25, True) for width in (32000, 201088)]
    return [*trees, *(_make(width, MAX_RANKS, 1, 0, True) for width in (201088, 327680)), _make(97, 3, 2, 4, False)]
