"""The likeliest id of each row, from the best pairs that the GEMM of its logits left: a chain's draft.

A warp a row. A lowest id wins among equals. It knows no temperature; `sample` draws.
"""

import functools
from typing import Any

import torch

from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.sampling.select import BROKEN, best_partial, index_of_low
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, int32, int64, types, uint32
from lowlat.kernels.toolchain.ptx import let_next_kernel_start, wait_for_previous_kernel

__all__ = ["argmax", "examples"]

THREADS = 32
BYTES = types.Array(types.uint8, 1, "C")
INTS = types.Array(types.int32, 1, "C")
INTS_2D = types.Array(types.int32, 2, "C")


def argmax(
    best: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    names: torch.Tensor,
    assign: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> list[KernelCall]:
    """The name of the index of each row's largest logit, the lowest index among equals.

    best      [R, B, 2]   int32    the GEMM's best pairs: see `decode_gemm.PartialArgmax`
    row_live  [R] or [..] uint8    R entries; None: all live
    out       [R]         int32    out: the name; -1 in a dead row and in one that is broken
    names     [V]         int32    what to write in place of an index
    assign    children, child_rows, child_ranks [n] int32 and draft_nodes [B, T] int32, updated: as `assign_drafts`
              takes them, with out as [R, 1] top tokens
    Raises ShapeError for shapes that do not fit.
    """
    rows, blocks = best.shape[:2]
    check_shape("best", best, rows, blocks, 2)
    check_shape("out", out, rows)
    live = None if row_live is None else row_live.reshape(-1)
    if live is not None:
        check_shape("row_live", live, rows)
    children, child_rows, draft_nodes, per_slot, nodes = out, out, out.reshape(1, -1), rows, 0
    if assign is not None:
        children, child_rows, ranks, draft_nodes = assign
        nodes = children.shape[0]
        check_shape("child_rows", child_rows, nodes)
        check_shape("child_ranks", ranks, nodes)
        per_slot = rows // draft_nodes.shape[0]
        check_shape("best", best, per_slot * draft_nodes.shape[0], blocks, 2)
    kernel = _make(blocks, per_slot, nodes, row_live is not None)
    arguments = (best, out.view(torch.uint8) if live is None else live, names, out, children, child_rows, draft_nodes)
    return [KernelCall(kernel, (rows, 1, 1), arguments)]


@functools.cache
def _make(blocks: int, per_slot: int, nodes: int, masked: bool) -> Kernel:
    """Specialised by B, the rows of a slot, the children to assign, and whether rows may be dead."""

    def argmax_kernel(
        best: Any, row_live: Any, names: Any, out: Any, children: Any, child_rows: Any, draft_nodes: Any
    ) -> None:
        wait_for_previous_kernel()
        let_next_kernel_start()
        row, thread = int64(cuda.blockIdx.x), cuda.threadIdx.x
        key, low = best_partial(best + row * (8 * blocks), blocks)
        token = int32(-1)
        if (not masked or row_live[row] != 0) and key != uint32(BROKEN) and low != uint32(0):
            token = names[index_of_low(low)]
        if thread == 0:
            out[row] = token
        slot = row // per_slot
        for child in range(thread, nodes, THREADS):
            if child_rows[child] == row - slot * per_slot:
                draft_nodes[slot, children[child]] = token

    signature = (types.int64, BYTES, INTS, INTS, INTS, INTS, INTS_2D)
    name = f"argmax_{blocks}_{per_slot}_{nodes}_{'masked' if masked else 'whole'}"
    return Kernel(name, argmax_kernel, signature, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: a chain's drafts, and rows that all live."""
    return [_make(132, 1, 1, True), _make(3, 2, 3, False)]
