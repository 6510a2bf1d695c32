"""This module finds each row's likeliest id, a chain's draft, from the best pairs that the GEMM of its logits left.

A warp has a row. Of equal logits the lowest id wins. If a chain's next draft is computed from this token's vector, the
warp gathers that, too.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import int_at, set_byte, set_int
from lowlat.kernels.common.norm_row import gather_chunk
from lowlat.kernels.elementwise.embed import check_table
from lowlat.kernels.gemm.packing import PackedMatrix
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.sampling.select import BROKEN, best_partial, index_of_low
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint32
from lowlat.kernels.toolchain.ptx import let_next_kernel_start, wait_for_previous_kernel

__all__ = ["NextLevel", "argmax", "drafted_token", "examples"]

THREADS = 32
BYTES = types.Array(types.uint8, 1, "C")
INTS = types.Array(types.int32, 1, "C")
INTS_2D = types.Array(types.int32, 2, "C")


@device_function
def drafted_token(best: Any, blocks: Any, live: Any, names: Any) -> Any:
    """The name of the index of a row's best pair, in every lane of a warp; -1 of a dead or a broken row.

    best, names  addresses of the row's [blocks, 2] uint32, and of [V] int32
    """
    key, low = best_partial(best, blocks)
    token = int32(-1)
    if live and key != uint32(BROKEN) and low != uint32(0):
        token = int32(int_at(names, index_of_low(low)))
    return token


@dataclass(frozen=True)
class NextLevel:
    """The level after a chain's drafts, each the only parent there: what `parent_tokens` and `embed` give.

    tokens    [B, R]  int32  of the block; a slot is dead where its first is -1
    parents   [B, 1]  int32  out
    row_live  [B, 1]  uint8  out
    weight    [V, N]  bf16   row-major or packed
    vectors   [B, N]  bf16   out
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    row_live: torch.Tensor
    weight: torch.Tensor | PackedMatrix
    vectors: torch.Tensor


def argmax(
    best: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    names: torch.Tensor,
    assign: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    then: NextLevel | None = None,
) -> list[KernelCall]:
    """The name of the index of each row's largest logit, the lowest index among equals.

    best      [R, B, 2]   int32    the GEMM's best pairs: see `decode_gemm.PartialArgmax`
    row_live  [R] or [..] uint8    R entries; None: all live
    out       [R]         int32    out: the name; -1 in a dead row and in one that is broken
    names     [V]         int32    what to write in place of an index
    assign    children, child_rows, child_ranks [n] int32 and draft_nodes [B, T] int32, updated: as `assign_drafts`
              takes them, with out as [R, 1] top tokens
    then      R = B
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
    level, arguments = _level(then, rows)
    kernel = _make(blocks, per_slot, nodes, row_live is not None, level)
    own = (best, out.view(torch.uint8) if live is None else live, names, out, children, child_rows, draft_nodes)
    return [KernelCall(kernel, (rows, 1, 1), (*own, *arguments))]


def _level(then: NextLevel | None, rows: int) -> tuple[tuple[int, int, bool], tuple[Argument, ...]]:
    """The part of a next level that the kernel's code depends on, and its arguments. Raises ShapeError."""
    if then is None:
        return (0, 0, False), (0,) * 5
    block, width = then.tokens.shape[1], then.vectors.shape[1]
    table, tiled = check_table(then.weight, width)
    check_shape("tokens", then.tokens, rows, block)
    for name, array in (("parents", then.parents), ("the parents' row_live", then.row_live)):
        check_shape(name, array, rows, 1)
    check_shape("vectors", then.vectors, rows, width)
    if width % 8:
        raise ShapeError(f"vectors must have a multiple of 8 elements, got {width}")
    return (block, width, tiled), (then.tokens, then.parents, then.row_live, table, then.vectors)


@functools.cache
def _make(blocks: int, per_slot: int, nodes: int, masked: bool, level: tuple[int, int, bool] = (0, 0, False)) -> Kernel:
    """Specialised by B, the rows of a slot, the children to assign, whether rows may be dead; and of a next level by
    the rows of a block, the elements of a vector (0: there are none), and whether their table is packed."""
    block, width, tiled = level

    def argmax_kernel(
        best: Any, row_live: Any, names: Any, out: Any, children: Any, child_rows: Any, draft_nodes: Any, tokens: Any,
        parents: Any, parent_live: Any, weight: Any, vectors: Any,
    ) -> None:  # fmt: skip
        wait_for_previous_kernel()
        let_next_kernel_start()
        row, thread = int64(cuda.blockIdx.x), cuda.threadIdx.x
        token = drafted_token(best + row * (8 * blocks), blocks, not masked or row_live[row] != 0, names)
        if thread == 0:
            out[row] = token
        slot = row // per_slot
        for child in range(thread, nodes, THREADS):
            if child_rows[child] == row - slot * per_slot:
                draft_nodes[slot, children[child]] = token
        if width > 0:
            if int_at(tokens, row * block) < 0:
                token = int32(-1)
            if thread == 0:
                set_int(parents, row, token)
                set_byte(parent_live, row, 1 if token >= 0 else 0)
            for chunk in range(thread, width // 8, THREADS):
                gather_chunk(weight, token, uint32(chunk), vectors + row * int64(width * 2), width, tiled)

    signature = (types.int64, BYTES, types.int64, INTS, INTS, INTS, INTS_2D, *(types.int64,) * 5)
    vectors_of = f"_{block}_n{width}_{'packed' if tiled else 'rows'}" if width else ""
    name = f"argmax_{blocks}_{per_slot}_{nodes}_{'masked' if masked else 'whole'}{vectors_of}"
    return Kernel(name, argmax_kernel, signature, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: a chain's drafts, and rows that all live; with vectors of the next level."""
    levels = [_make(132, 1, 1, True, level) for level in ((7, 256, False), (4, 16, True))]
    return [_make(132, 1, 1, True), _make(3, 2, 3, False), *levels]
