"""This module lays out a level of the draft tree and stores its children's tokens, if no other kernel does it.

Rows are whole multiples of 16 bytes.
"""

from functools import cache
from typing import Any

from lowlat.kernels.common.memory import (
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
from lowlat.kernels.reference.speculation import draft_rows as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types

__all__ = ["assign_drafts", "examples", "gather_level"]

THREADS = 64


@launches(reference.gather_level)
def gather_level(given: Given) -> list[KernelCall]:
    """`gather_level` of the reference."""
    batch, wide, num_nodes, above = given.sizes("B", "W", "T", "V")
    kernel = _make_gather_level(
        wide, num_nodes, above, wide_count("feedback", given["feedback"]), given.params["depth"]
    )
    return [KernelCall(kernel, (batch * wide, 1, 1), given.tensors)]


@cache
def _make_gather_level(wide: int, num_nodes: int, above: int, count: int, depth: int) -> Kernel:
    """A block a row: grid (B * W,)."""
    threads = threads_for(count)

    def kernel(
        feedback: Any,
        draft_nodes: Any,
        draft_live: Any,
        draft_lens: Any,
        nodes: Any,
        parent_rows: Any,
        masks: Any,
        hidden: Any,
        tokens: Any,
        row_live: Any,
        positions: Any,
        row_masks: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        owner, place = divide(row, wide)
        source = feedback + (owner * above + int_at(parent_rows, place)) * (count * 16)
        copy_row(thread, threads, count, source, hidden + row * (count * 16))
        if thread == 0:
            chosen = int_at(draft_nodes, owner * num_nodes + int_at(nodes, place))
            live = byte_at(draft_live, owner) != 0 and chosen >= 0
            set_int(tokens, row, chosen if live else int64(-1))
            set_byte(row_live, row, 1 if live else 0)
            set_int(positions, row, int_at(draft_lens, owner) + (depth - 2) if live else int64(0))
            set_long(row_masks, row, long_at(masks, place) if live else int64(0))

    name = f"gather_level_{wide}_{num_nodes}_{above}_{count}_{depth}"
    return Kernel(name, kernel, (types.int64,) * 12, threads)


@launches(reference.assign_drafts)
def assign_drafts(given: Given) -> list[KernelCall]:
    """`assign_drafts` of the reference."""
    batch, count, num_nodes, above, ranks = given.sizes("B", "n", "T", "W", "k")
    return [KernelCall(_make_assign_drafts(count, num_nodes, above, ranks), (batch, 1, 1), given.tensors)]


@cache
def _make_assign_drafts(count: int, num_nodes: int, above: int, ranks: int) -> Kernel:
    """A block a slot: grid (B,)."""

    def kernel(top_tokens: Any, children: Any, child_rows: Any, child_ranks: Any, draft_nodes: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner = int64(cuda.blockIdx.x)
        for turn in range(turns(count, THREADS)):
            child = int64(cuda.threadIdx.x) + turn * THREADS
            if child < count:
                node, row, rank = int_at(children, child), int_at(child_rows, child), int_at(child_ranks, child)
                token = int_at(top_tokens, (owner * above + row) * ranks + rank)
                set_int(draft_nodes, owner * num_nodes + node, token)

    return Kernel(f"assign_drafts_{count}_{num_nodes}_{above}_{ranks}", kernel, (types.int64,) * 5, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [_make_gather_level(8, 64, 6, 512, 3), _make_assign_drafts(25, 64, 8, 10)]
