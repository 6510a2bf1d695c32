"""The rows of drafters that draft all positions in one pass: laid out, and those that draft taken out of them.

A block a row. It knows neither model nor dtype: rows are whole multiples of 16 bytes.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import (
    byte_at,
    copy_row,
    divide,
    int_at,
    set_byte,
    set_int,
    threads_for,
    wide_count,
    zero_row,
)
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types

__all__ = ["block_rows", "examples", "mask_rows", "take_block"]

MASK_THREADS = 64


def block_rows(
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    commit_lens: torch.Tensor,
    draft_live: torch.Tensor,
    dense_lens: torch.Tensor,
    mask_state: torch.Tensor,
    *,
    out: torch.Tensor,
    block_tokens: torch.Tensor,
    block_live: torch.Tensor,
    block_positions: torch.Tensor,
    drafting_live: torch.Tensor,
    drafting_positions: torch.Tensor,
    mask_token: int,
) -> list[KernelCall]:
    """`block_rows` of the reference, whose arguments these are. Raises ShapeError for shapes that do not fit."""
    (batch, accepted), width = tokens.shape, hidden.shape[1]
    count, drafting = block_live.shape[1], drafting_live.shape[1]
    if not 1 <= drafting <= count <= accepted + drafting - 1:
        raise ShapeError(
            f"block_rows: {count} rows a slot do not hold up to {accepted} committed ones with {drafting} that draft"
        )
    for array in (commit_lens, draft_live, dense_lens):
        check_shape("commit_lens, draft_live and dense_lens", array, batch)
    for array in (block_tokens, block_live, block_positions):
        check_shape("block_tokens, block_live and block_positions", array, batch, count)
    for array in (drafting_live, drafting_positions):
        check_shape("drafting_live and drafting_positions", array, batch, drafting)
    check_shape("hidden", hidden, batch * accepted, width)
    check_shape("mask_state", mask_state, width)
    check_shape("out", out, batch * count, width)
    if mask_state.dtype != hidden.dtype:
        raise ShapeError(f"block_rows: mask_state must be {hidden.dtype}, got {mask_state.dtype}")
    wide_count("mask_state", mask_state)
    reads = (tokens, hidden, commit_lens, draft_live, dense_lens, mask_state)
    writes = (out, block_tokens, block_live, block_positions, drafting_live, drafting_positions)
    kernel = _make_rows(accepted, count, drafting, wide_count("hidden", hidden))
    return [KernelCall(kernel, (batch * count, 1, 1), (*reads, *writes, mask_token))]


@cache
def _make_rows(accepted: int, count: int, drafting: int, width: int) -> Kernel:
    """Grid (B * R,); the first S blocks of a slot write for the rows that draft, too."""
    threads = threads_for(width)

    def kernel(
        tokens: Any,
        hidden: Any,
        commit_lens: Any,
        draft_live: Any,
        dense_lens: Any,
        mask_state: Any,
        out: Any,
        block_tokens: Any,
        block_live: Any,
        block_positions: Any,
        drafting_live: Any,
        drafting_positions: Any,
        mask_token: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        owner, row = divide(place, count)
        committed, going = int_at(commit_lens, owner), byte_at(draft_live, owner) != 0
        live = going and row < committed + (drafting - 1)
        target = out + place * (width * 16)
        if live:
            source = mask_state
            if row < committed:
                source = hidden + (owner * accepted + row) * (width * 16)
            copy_row(thread, threads, width, source, target)
        else:
            zero_row(thread, threads, width, target)
        if thread == 0:
            position, token = int_at(dense_lens, owner), int64(-1)
            if live:
                token = int_at(tokens, owner * accepted + row) if row < committed else int64(mask_token)
            set_int(block_tokens, place, token)
            set_byte(block_live, place, 1 if live else 0)
            set_int(block_positions, place, position + row if live else int64(0))
            if row < drafting:
                at = owner * drafting + row
                set_byte(drafting_live, at, 1 if going else 0)
                set_int(drafting_positions, at, position + committed - 1 + row if going else int64(0))

    return Kernel(f"block_rows_{accepted}_{count}_{drafting}_{width}", kernel, (types.int64,) * 13, threads)


def take_block(x: torch.Tensor, commit_lens: torch.Tensor, *, out: torch.Tensor) -> list[KernelCall]:
    """`take_block` of the reference, whose arguments these are. Raises ShapeError for shapes that do not fit."""
    batch, width = commit_lens.shape[0], x.shape[1]
    count, drafting = x.shape[0] // batch, out.shape[0] // batch
    check_shape("x", x, batch * count, width)
    check_shape("out", out, batch * drafting, width)
    if not 1 <= drafting <= count:
        raise ShapeError(f"take_block: {drafting} rows of {count} cannot be taken")
    kernel = _make_take(count, drafting, wide_count("x", x))
    return [KernelCall(kernel, (batch * drafting, 1, 1), (x, commit_lens, out))]


@cache
def _make_take(count: int, drafting: int, width: int) -> Kernel:
    """Grid (B * S,)."""
    threads = threads_for(width)

    def kernel(x: Any, commit_lens: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        owner, number = divide(place, drafting)
        committed = int_at(commit_lens, owner)
        target = out + place * (width * 16)
        if committed > 0:
            row = min(committed - 1 + number, int64(count - 1))
            copy_row(thread, threads, width, x + (owner * count + row) * (width * 16), target)
        else:
            zero_row(thread, threads, width, target)

    return Kernel(f"take_block_{count}_{drafting}_{width}", kernel, (types.int64,) * 3, threads)


def mask_rows(
    accepted_tokens: torch.Tensor,
    commit_lens: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_live: torch.Tensor,
    write_lens: torch.Tensor,
    mask_token: int,
) -> list[KernelCall]:
    """`mask_rows` of the reference, whose arguments these are. Raises ShapeError for shapes that do not fit."""
    (batch, accepted), count = accepted_tokens.shape, tokens.shape[1]
    for array in (commit_lens, draft_live, draft_lens, write_lens):
        check_shape("commit_lens, draft_live, draft_lens and write_lens", array, batch)
    for array in (tokens, positions, row_live):
        check_shape("tokens, positions and row_live", array, batch, count)
    if not 1 <= count <= MASK_THREADS:
        raise ShapeError(f"mask_rows: a block has 1 to {MASK_THREADS} rows, got {count}")
    reads = (accepted_tokens, commit_lens, draft_live, draft_lens)
    kernel = _make_mask_rows(accepted, count)
    return [KernelCall(kernel, (batch, 1, 1), (*reads, tokens, positions, row_live, write_lens, mask_token))]


@cache
def _make_mask_rows(accepted: int, count: int) -> Kernel:
    """A block of threads a slot, a thread a row: grid (B,)."""

    def kernel(
        accepted_tokens: Any,
        commit_lens: Any,
        draft_live: Any,
        draft_lens: Any,
        tokens: Any,
        positions: Any,
        row_live: Any,
        write_lens: Any,
        mask_token: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner, row = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        going = byte_at(draft_live, owner) != 0
        start = int_at(draft_lens, owner) - 1
        if row < count:
            token = int64(mask_token)
            if row == 0:
                last = max(int_at(commit_lens, owner) - 1, int64(0))
                token = int_at(accepted_tokens, owner * accepted + last)
            place = owner * count + row
            set_int(tokens, place, token if going else int64(-1))
            set_int(positions, place, start + row if going else int64(0))
            set_byte(row_live, place, 1 if going else 0)
        if row == 0:
            set_int(write_lens, owner, start if going else int64(0))

    return Kernel(f"mask_rows_{accepted}_{count}", kernel, (types.int64,) * 9, MASK_THREADS)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [_make_rows(4, 6, 3, 512), _make_take(6, 3, 512), _make_mask_rows(4, 4)]
