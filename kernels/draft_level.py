"""From one level of drafts to the next: the children's tokens, and the rows of the nodes that have children.

`next_level` does both in one launch. It knows neither head nor topology: the level's lists are constants of the step.
"""

from functools import cache
from typing import Any

import torch

from lowlat.kernels import ptx
from lowlat.kernels.kernel import Kernel, KernelCall
from lowlat.kernels.memory import (
    byte_at,
    copy_row,
    divide,
    int_at,
    long_at,
    set_byte,
    set_int,
    set_long,
    threads_for,
    turns,
    wide_count,
)
from lowlat.kernels.numba_cuda import cuda, device_function, int32, int64, types
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["assign_drafts", "examples", "gather_level", "next_level"]

ASSIGN_THREADS = 64


def assign_drafts(
    top_tokens: torch.Tensor,
    children: torch.Tensor,
    child_rows: torch.Tensor,
    child_ranks: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
) -> list[KernelCall]:
    """Give the children of a level their tokens, as the reference's `assign_drafts`, whose arguments these are.

    Raises ShapeError for shapes that do not fit.
    """
    batch, rows = draft_nodes.shape
    kernel = _make_assign(rows, *_assignment(top_tokens, children, child_rows, child_ranks, batch))
    arguments = (top_tokens, children, child_rows, child_ranks, draft_nodes)
    return [KernelCall(kernel, (batch, 1, 1), arguments)]


def _assignment(
    top_tokens: torch.Tensor, children: torch.Tensor, child_rows: torch.Tensor, child_ranks: torch.Tensor, batch: int
) -> tuple[int, int, int]:
    """Children, rows of the level and ranks of a row."""
    count, above = children.shape[0], top_tokens.shape[0] // batch
    check_shape("top_tokens", top_tokens, batch * above, top_tokens.shape[1])
    check_shape("child_rows", child_rows, count)
    check_shape("child_ranks", child_ranks, count)
    return count, above, top_tokens.shape[1]


@device_function
def _child_token(
    index: Any, child: Any, above: Any, ranks: Any, top_tokens: Any, child_rows: Any, child_ranks: Any
) -> Any:
    """The token that a child of the level drafts."""
    row, rank = int_at(child_rows, child), int_at(child_ranks, child)
    return int_at(top_tokens, (index * above + row) * ranks + rank)


@cache
def _make_assign(rows: int, count: int, above: int, ranks: int) -> Kernel:
    def kernel(top_tokens: Any, children: Any, child_rows: Any, child_ranks: Any, draft_nodes: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        index, child = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        while child < count:
            token = _child_token(index, child, above, ranks, top_tokens, child_rows, child_ranks)
            set_int(draft_nodes, index * rows + int_at(children, child), token)
            child += ASSIGN_THREADS

    name = f"assign_drafts_{rows}_{count}_{above}_{ranks}"
    return Kernel(name, kernel, (types.int64,) * 5, ASSIGN_THREADS)


def gather_level(
    feedback: torch.Tensor,
    draft_nodes: torch.Tensor,
    draft_live: torch.Tensor,
    head_lens: torch.Tensor,
    nodes: torch.Tensor,
    parent_rows: torch.Tensor,
    masks: torch.Tensor,
    *,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    row_live: torch.Tensor,
    positions: torch.Tensor,
    row_masks: torch.Tensor,
    depth: int,
    assignment: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> list[KernelCall]:
    """Lay out one deeper level, as the reference's `gather_level`, whose arguments these are.

    assignment  top_tokens, children, child_rows, child_ranks: `assign_drafts` of the level above is done first
    hidden's rows are whole multiples of 16 bytes. Raises ShapeError for shapes that do not fit.
    """
    (batch, rows), width = draft_nodes.shape, nodes.shape[0]
    above = feedback.shape[0] // batch
    check_shape("feedback", feedback, batch * above, hidden.shape[1])
    check_shape("hidden", hidden, batch * width, hidden.shape[1])
    for array in (draft_live, head_lens):
        check_shape("draft_live and head_lens", array, batch)
    for array in (parent_rows, masks):
        check_shape("parent_rows and masks", array, width)
    for array in (tokens, row_live, positions, row_masks):
        check_shape("tokens, row_live, positions and row_masks", array, batch, width)
    assigned = None if assignment is None else _assignment(*assignment, batch)
    kernel = _make_gather(rows, width, above, wide_count("hidden", hidden), depth, assigned)
    reads = (feedback, draft_nodes, draft_live, head_lens, nodes, parent_rows, masks, *(assignment or (0, 0, 0, 0)))
    return [KernelCall(kernel, (batch * width, 1, 1), (*reads, hidden, tokens, row_live, positions, row_masks))]


def next_level(
    top_tokens: torch.Tensor,
    children: torch.Tensor,
    child_rows: torch.Tensor,
    child_ranks: torch.Tensor,
    **level: Any,
) -> list[KernelCall]:
    """`assign_drafts` and then `gather_level` in one launch; `level` is what the latter takes."""
    return gather_level(**level, assignment=(top_tokens, children, child_rows, child_ranks))


@cache
def _make_gather(
    rows: int, width: int, above: int, count: int, depth: int, assigned: tuple[int, int, int] | None
) -> Kernel:
    threads, assigns = max(ASSIGN_THREADS, threads_for(count)), assigned is not None
    num_children, above_assigned, ranks = assigned or (0, 0, 0)

    def kernel(
        feedback: Any,
        draft_nodes: Any,
        draft_live: Any,
        head_lens: Any,
        nodes: Any,
        parent_rows: Any,
        masks: Any,
        top_tokens: Any,
        children: Any,
        child_rows: Any,
        child_ranks: Any,
        hidden: Any,
        tokens: Any,
        row_live: Any,
        positions: Any,
        row_masks: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        chosen = cuda.shared.array(shape=1, dtype=int32)
        row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        index, place = divide(row, width)
        node, parent = int_at(nodes, place), int_at(parent_rows, place)
        if thread == 0:
            chosen[0] = int_at(draft_nodes, index * rows + node)
        if assigns:
            cuda.syncthreads()
            for turn in range(turns(num_children, threads)):
                child = thread + turn * threads
                if child < num_children:
                    token = _child_token(index, child, above_assigned, ranks, top_tokens, child_rows, child_ranks)
                    target = int_at(children, child)
                    if target == node:
                        chosen[0] = token
                    if place == 0:
                        set_int(draft_nodes, index * rows + target, token)
        copy_row(
            thread, threads, count, feedback + (index * above + parent) * (count * 16), hidden + row * (count * 16)
        )
        cuda.syncthreads()
        if thread == 0:
            token = int64(chosen[0])
            live = byte_at(draft_live, index) != 0 and token >= 0
            set_int(tokens, row, token if live else int64(-1))
            set_byte(row_live, row, 1 if live else 0)
            set_int(positions, row, int_at(head_lens, index) + (depth - 2) if live else int64(0))
            set_long(row_masks, row, long_at(masks, place) if live else int64(0))

    parts = (rows, width, above, count, depth, *(assigned or ("alone",)))
    name = "gather_level_" + "_".join(str(part) for part in parts)
    return Kernel(name, kernel, (types.int64,) * 16, threads)


def examples() -> list[Kernel]:
    """What CI compiles: a chain's level, and a tree's with its assignment."""
    return [
        _make_assign(4, 1, 1, 1),
        _make_gather(4, 1, 1, 512, 1, None),
        _make_gather(4, 1, 1, 512, 1, (1, 1, 1)),
        _make_gather(64, 6, 4, 360, 2, (20, 4, 8)),
    ]
