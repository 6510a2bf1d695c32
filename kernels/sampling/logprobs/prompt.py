"""This module has the kernels of a prompt's logprobs, which take, rank and store a fixed number of rows at a time.

A cursor on the device points to the rows, so a captured launch takes the next ones each time that it is replayed.
Results are stored in pinned host memory.
"""

from functools import cache
from typing import Any

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
from lowlat.kernels.reference.sampling import prompt_logprobs as reference
from lowlat.kernels.reference.step.slot_record import MAX_LOGPROBS
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types

__all__ = ["examples", "keep_prompt_logprobs", "take_prompt_rows", "token_ranks"]

COLUMNS = MAX_LOGPROBS + 1
THREADS = 256


@launches(reference.take_prompt_rows)
def take_prompt_rows(given: Given) -> list[KernelCall]:
    """`take_prompt_rows` of the reference."""
    positions, rows = given.sizes("P", "R")
    return [KernelCall(_make_take(positions, wide_count("residual", given["residual"])), (rows, 1, 1), given.tensors)]


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


@launches(reference.token_ranks)
def token_ranks(given: Given) -> list[KernelCall]:
    """`token_ranks` of the reference. Time: one read of the rows' logits, a block a row."""
    batch, rows, width = given.sizes("B", "T", "V")
    return [KernelCall(_make_ranks(width), (batch * rows, 1, 1), given.tensors)]


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


@launches(reference.keep_prompt_logprobs)
def keep_prompt_logprobs(given: Given) -> list[KernelCall]:
    """`keep_prompt_logprobs` of the reference. One block: the cursor goes on when all of it has read it."""
    return [KernelCall(_make_keep(*given.sizes("R", "P")), (1, 1, 1), given.tensors)]


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
