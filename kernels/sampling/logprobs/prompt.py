"""The rows of a prompt whose logits are made, a bounded number at a time: taken, ranked, and kept for the host.

The rows are named by a cursor on the device, so a captured launch does the next ones each time that it is replayed.
What is kept lies in pinned host memory.
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
    turns,
    wide_count,
    zero_row,
)
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types

__all__ = ["examples", "keep_prompt_logprobs", "take_prompt_rows", "token_ranks"]

COLUMNS = MAX_LOGPROBS + 1
THREADS = 256


def take_prompt_rows(
    residual: torch.Tensor,
    targets: torch.Tensor,
    count: torch.Tensor,
    cursor: torch.Tensor,
    *,
    out: torch.Tensor,
    row_live: torch.Tensor,
    target_tokens: torch.Tensor,
) -> list[KernelCall]:
    """`take_prompt_rows` of the reference, whose arguments these are. Raises ShapeError for shapes that do not fit."""
    positions, rows = residual.shape[0], out.shape[0]
    check_shape("out", out, rows, residual.shape[1])
    check_shape("targets", targets, positions)
    check_shape("row_live", row_live, rows)
    check_shape("target_tokens", target_tokens, 1, rows)
    if out.dtype != residual.dtype:
        raise ShapeError(f"out must be {residual.dtype}, as residual is, got {out.dtype}")
    kernel = _make_take(positions, wide_count("residual", residual))
    arguments = (residual, targets, count, cursor, out, row_live, target_tokens)
    return [KernelCall(kernel, (rows, 1, 1), arguments)]


@cache
def _make_take(positions: int, width: int) -> Kernel:
    """Grid (R,). width: of a row, in 16 bytes."""
    threads = threads_for(width)

    def kernel(
        residual: Any, targets: Any, count: Any, cursor: Any, out: Any, row_live: Any, target_tokens: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        place, token = int_at(cursor, 0) + row, int64(-1)
        if place < min(int_at(count, 0), int64(positions)):
            token = max(int_at(targets, place), int64(-1))
        if thread == 0:
            set_byte(row_live, row, int64(1) if token >= 0 else int64(0))
            set_int(target_tokens, row, token)
        target = out + row * (width * 16)
        if token >= 0:
            copy_row(thread, threads, width, residual + place * (width * 16), target)
        else:
            zero_row(thread, threads, width, target)

    return Kernel(f"take_prompt_rows_{positions}_{width}", kernel, (types.int64,) * 7, threads)


def token_ranks(
    logits: torch.Tensor, row_live: torch.Tensor, target_tokens: torch.Tensor, *, ranks: torch.Tensor
) -> list[KernelCall]:
    """`token_ranks` of the reference, whose arguments these are.

    Time: one read of the rows' logits, a block a row. Raises ShapeError for shapes that do not fit.
    """
    batch, rows = target_tokens.shape
    width = logits.shape[1]
    check_shape("logits", logits, batch * rows, width)
    check_shape("row_live", row_live.reshape(-1), batch * rows)
    check_shape("ranks", ranks, batch, rows)
    return [KernelCall(_make_ranks(width), (batch * rows, 1, 1), (logits, row_live, target_tokens, ranks))]


@device_function
def _is_before(value: Any, index: Any, own: Any, token: Any) -> Any:
    """1 for a logit that comes before the token's own, else 0."""
    return int64(1) if value > own or (value == own and index < token) else int64(0)


@cache
def _make_ranks(width: int) -> Kernel:
    """Grid (M,)."""
    parts = 4 if width % 4 == 0 else 1

    def kernel(logits: Any, row_live: Any, target_tokens: Any, ranks: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        counts = cuda.shared.array(THREADS, types.int64)
        row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        token, source, before = int_at(target_tokens, row), logits + row * (4 * width), int64(0)
        live = byte_at(row_live, row) != 0 and token >= 0
        if live:
            own = ptx.load_global_f32(source + token * 4)
            for turn in range(turns(width // parts, THREADS)):
                place = thread + turn * THREADS
                if place < width // parts:
                    if parts == 4:
                        w0, w1, w2, w3 = ptx.load_global_128(source + place * 16)
                        before += _is_before(ptx.float_of_bits(w0), place * 4, own, token)
                        before += _is_before(ptx.float_of_bits(w1), place * 4 + 1, own, token)
                        before += _is_before(ptx.float_of_bits(w2), place * 4 + 2, own, token)
                        before += _is_before(ptx.float_of_bits(w3), place * 4 + 3, own, token)
                    else:
                        before += _is_before(ptx.load_global_f32(source + place * 4), place, own, token)
        counts[thread] = before
        cuda.syncthreads()
        for step in (128, 64, 32, 16, 8, 4, 2, 1):
            if thread < step:
                counts[thread] += counts[thread + step]
            cuda.syncthreads()
        if thread == 0:
            set_int(ranks, row, counts[0] + 1 if live else int64(0))

    return Kernel(f"token_ranks_{width}", kernel, (types.int64,) * 4, THREADS)


def keep_prompt_logprobs(
    logprob_values: torch.Tensor,
    logprob_ids: torch.Tensor,
    ranks: torch.Tensor,
    count: torch.Tensor,
    *,
    cursor: torch.Tensor,
    prompt_logprob_values: torch.Tensor,
    prompt_logprob_ids: torch.Tensor,
    prompt_ranks: torch.Tensor,
) -> list[KernelCall]:
    """`keep_prompt_logprobs` of the reference, whose arguments these are.

    One block: the cursor goes on when all of it has read it. Raises ShapeError for shapes that do not fit.
    """
    rows, positions = ranks.shape[1], prompt_ranks.shape[0]
    for name, array in (("logprob_values", logprob_values), ("logprob_ids", logprob_ids)):
        check_shape(name, array, 1, rows, COLUMNS)
    for name, array in (("prompt_logprob_values", prompt_logprob_values), ("prompt_logprob_ids", prompt_logprob_ids)):
        check_shape(name, array, positions, COLUMNS)
    arguments = (logprob_values, logprob_ids, ranks, count, cursor)
    kept = (prompt_logprob_values, prompt_logprob_ids, prompt_ranks)
    return [KernelCall(_make_keep(rows, positions), (1, 1, 1), (*arguments, *kept))]


@cache
def _make_keep(rows: int, positions: int) -> Kernel:
    """Grid (1,)."""

    def kernel(
        values: Any, ids: Any, ranks: Any, count: Any, cursor: Any, kept_values: Any, kept_ids: Any, kept_ranks: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        thread, first, last = int64(cuda.threadIdx.x), int_at(cursor, 0), int_at(count, 0)
        for turn in range(turns(rows * COLUMNS, THREADS)):
            place = thread + turn * THREADS
            if place < rows * COLUMNS and first + divide(place, COLUMNS)[0] < positions:
                value, token = int_at(values, place), int_at(ids, place)  # the value's bits
                set_int(kept_values, first * COLUMNS + place, value)
                set_int(kept_ids, first * COLUMNS + place, token)
        for turn in range(turns(rows, THREADS)):
            row = thread + turn * THREADS
            if row < rows and first + row < positions:
                set_int(kept_ranks, first + row, int_at(ranks, row))
        cuda.syncthreads()
        if thread == 0:
            set_int(cursor, 0, first + rows if first + rows < last else int64(0))

    return Kernel(f"keep_prompt_logprobs_{rows}_{positions}", kernel, (types.int64,) * 8, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: rows of an 8B model and of a small one, with and without wide loads."""
    return [
        _make_take(2048, 512), _make_take(64, 8), _make_ranks(128256), _make_ranks(97), _make_keep(64, 2048),
        _make_keep(8, 8),
    ]  # fmt: skip
