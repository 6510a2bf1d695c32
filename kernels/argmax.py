"""The likeliest id of each row of logits, spread over several blocks a row: a chain's draft, or any plain argmax.

A lowest id wins among equals. It knows no temperature; `sample` draws.
"""

import functools
from typing import Any

import torch

from lowlat.kernels.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.numba_cuda import cuda, int32, int64, types, uint32
from lowlat.kernels.ptx import let_next_kernel_start, wait_for_previous_kernel
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.select import (
    BROKEN,
    CHUNK,
    INFINITY,
    MINUS_INFINITY,
    THREADS,
    WARPS,
    count_chunks,
    index_of_low,
    make_own_words,
    row_best,
    words_best,
    words_broken,
)

__all__ = ["argmax", "examples"]

PAIRS = 2 * WARPS
BYTES = types.Array(types.uint8, 1, "C")
INTS = types.Array(types.int32, 1, "C")
INTS_2D = types.Array(types.int32, 2, "C")


def argmax(
    logits: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    workspace: Workspace,
    names: torch.Tensor | None = None,
    assign: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> list[KernelCall]:
    """The index of each row's largest logit, the lowest among equals.

    logits    [R, V]      float32
    row_live  [R] or [..] uint8    R entries; None: all live
    out       [R]         int32    out: the index, or its name; -1 in a dead row and in one that holds a NaN
    names     [V]         int32    what to write in place of an index
    assign    children, child_rows, child_ranks [n] int32 and draft_nodes [B, T] int32, updated: as `assign_drafts`
              takes them, with out as [R, 1] top tokens
    Time: one read of the logits. Raises ShapeError for shapes that do not fit and for V above 262144.
    """
    rows, width = logits.shape
    chunks = count_chunks("logits", width)
    check_shape("out", out, rows)
    dummy = out
    if names is not None:
        check_shape("names", names, width)
    live = _flat_live(row_live, rows)
    children, child_rows, draft_nodes, per_slot, nodes = dummy, dummy, dummy.reshape(1, -1), rows, 0
    if assign is not None:
        children, child_rows, ranks, draft_nodes = assign
        nodes = children.shape[0]
        check_shape("child_rows", child_rows, nodes)
        check_shape("child_ranks", ranks, nodes)
        per_slot = rows // draft_nodes.shape[0]
        check_shape("logits", logits, per_slot * draft_nodes.shape[0], width)
    kernel = _make(width, per_slot, nodes, row_live is not None, names is not None)
    partials = workspace(f"argmax.partials.{rows}.{chunks}", (rows, chunks, 2), torch.int32)
    counters = workspace(f"argmax.counters.{rows}", (rows,), torch.int32)
    arguments = (
        logits,
        out.view(torch.uint8) if live is None else live,
        dummy if names is None else names,
        out,
        children,
        child_rows,
        draft_nodes,
        partials,
        counters,
    )
    return [KernelCall(kernel, (chunks, rows, 1), arguments)]


def _flat_live(row_live: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """The live flags as [R]. Raises ShapeError unless there are R."""
    if row_live is None:
        return None
    flat = row_live.reshape(-1)
    check_shape("row_live", flat, rows)
    return flat


@functools.cache
def _make(width: int, per_slot: int, nodes: int, masked: bool, named: bool) -> Kernel:
    """Specialised by V, the rows of a slot, the children to assign, and which arguments count."""
    chunks = count_chunks("logits", width)
    own_words = make_own_words(width)

    def argmax_kernel(
        logits: Any,
        row_live: Any,
        names: Any,
        out: Any,
        children: Any,
        child_rows: Any,
        draft_nodes: Any,
        partials: Any,
        counters: Any,
    ) -> None:
        wait_for_previous_kernel()
        let_next_kernel_start()
        pairs = cuda.shared.array(PAIRS, types.uint32)
        chunk, row = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        first = chunk * CHUNK
        key, low = uint32(0), uint32(0)
        # before it is known whether it lives
        words = own_words(logits + row * (4 * width), first, uint32(MINUS_INFINITY))
        if not masked or row_live[row] != 0:
            key, low = words_best(words, first)
            if words_broken(words, first, width, uint32(INFINITY)):
                key = uint32(BROKEN)
        last, key, low = row_best(key, low, pairs, partials + row * (8 * chunks), counters + row * 4, chunk, chunks)
        if last:
            token = int32(-1)
            if key != uint32(BROKEN) and low != uint32(0):
                index = index_of_low(low)
                token = names[index] if named else int32(index)
            if cuda.threadIdx.x == 0:
                out[row] = token
            slot = row // per_slot
            for child in range(cuda.threadIdx.x, nodes, 32):
                if child_rows[child] == row - slot * per_slot:
                    draft_nodes[slot, children[child]] = token

    signature = (types.int64, BYTES, INTS, INTS, INTS, INTS, INTS_2D, types.int64, types.int64)
    name = f"argmax_{width}_{per_slot}_{nodes}_{'masked' if masked else 'whole'}_{'named' if named else 'plain'}"
    return Kernel(name, argmax_kernel, signature, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: chains' drafts, a full vocabulary, and a width without wide loads."""
    drafts = [_make(width, 1, 1, True, True) for width in (32000, 201088)]
    return [*drafts, _make(201088, 1, 0, True, False), _make(97, 2, 3, False, True)]
