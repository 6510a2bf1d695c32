"""Rows that wait for the draft model, and their features: the reference's `waiting_rows`, `take_features` and
`keep_features`, one launch each. It knows neither model nor dtype: rows are whole multiples of 16 bytes.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import copy_row, divide, int_at, set_byte, set_int, threads_for, wide_count, zero_row
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types

__all__ = ["examples", "keep_features", "take_features", "waiting_rows"]

MAX_SOURCES = 5
MAX_WAITING = 32


def waiting_rows(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    *,
    extended: torch.Tensor,
    waiting_tokens: torch.Tensor,
    counts: torch.Tensor,
    firsts: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
) -> list[KernelCall]:
    """Lay out the waiting positions, as the reference's `waiting_rows`, whose arguments these are.

    A block a slot. Raises ShapeError for shapes that do not fit.
    """
    batch, most = waiting_tokens.shape
    if not 1 <= most <= MAX_WAITING:
        raise ShapeError(f"from 1 to {MAX_WAITING} positions of a slot may wait for the draft model, got {most}")
    for name, tensor in (("slots", slots), ("counts", counts), ("firsts", firsts), ("draft_live", draft_live)):
        check_shape(name, tensor, batch)
    check_shape("draft_lens", draft_lens, batch)
    check_shape("lengths", lengths, tokens.shape[0])
    check_shape("extended", extended, tokens.shape[0])
    outs = (extended, waiting_tokens, counts, firsts, draft_live, draft_lens)
    return [KernelCall(_make_rows(tokens.shape[1], most), (batch, 1, 1), (slots, lengths, tokens, *outs))]


@cache
def _make_rows(context: int, most: int) -> Kernel:
    def kernel(
        slots: Any,
        lengths: Any,
        tokens: Any,
        extended: Any,
        waiting_tokens: Any,
        counts: Any,
        firsts: Any,
        draft_live: Any,
        draft_lens: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        index, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        slot = int_at(slots, index)
        length, first, count = int64(0), int64(0), int64(0)
        if slot >= 0:
            length = int_at(lengths, slot)
            first = max(int_at(extended, slot), length - 1 - most, int64(0))
            count = length - 1 - first
        cuda.syncthreads()
        if thread < most:
            token = int64(-1)
            if thread < count:
                token = int_at(tokens, slot * context + first + 1 + thread)
            set_int(waiting_tokens, index * most + thread, token)
        if thread == 0:
            set_int(counts, index, count)
            set_int(firsts, index, first)
            set_byte(draft_live, index, int64(1) if slot >= 0 else int64(0))
            set_int(draft_lens, index, length)
            if slot >= 0:
                set_int(extended, slot, length - 1)

    return Kernel(f"waiting_rows_{context}_{most}", kernel, (types.int64,) * 9, MAX_WAITING)


def take_features(
    waiting_features: torch.Tensor,
    slots: torch.Tensor,
    firsts: torch.Tensor,
    counts: torch.Tensor,
    *,
    out: torch.Tensor,
) -> list[KernelCall]:
    """Features of the waiting positions, as the reference's `take_features`, whose arguments these are.

    A block a row. Raises ShapeError for shapes that do not fit.
    """
    (batch,), (_, most, width) = slots.shape, waiting_features.shape
    check_shape("firsts", firsts, batch)
    check_shape("counts", counts, batch)
    rows = out.shape[0] // batch
    check_shape("out", out, batch * rows, width)
    if rows > most:
        raise ShapeError(f"{rows} rows of a slot are taken of {most} that are kept")
    kernel = _make_take(rows, most, wide_count("out", out))
    return [KernelCall(kernel, (batch * rows, 1, 1), (waiting_features, slots, firsts, counts, out))]


@cache
def _make_take(rows: int, most: int, width: int) -> Kernel:
    threads = threads_for(width)

    def kernel(waiting_features: Any, slots: Any, firsts: Any, counts: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        index, place = divide(row, rows)
        slot, first, count = int_at(slots, index), int_at(firsts, index), int_at(counts, index)
        target = out + row * (width * 16)
        if slot >= 0 and place < count:
            _, at = divide(first + place, most)
            copy_row(thread, threads, width, waiting_features + (slot * most + at) * (width * 16), target)
        else:
            zero_row(thread, threads, width, target)

    return Kernel(f"take_features_{rows}_{most}_{width}", kernel, (types.int64,) * 5, threads)


def keep_features(
    accepted_nodes: torch.Tensor,
    commit_lens: torch.Tensor,
    dense_lens: torch.Tensor,
    slots: torch.Tensor,
    *,
    waiting_features: torch.Tensor,
    **sources: torch.Tensor,
) -> list[KernelCall]:
    """Keep the features of the committed positions, as the reference's `keep_features`, whose arguments these are.

    A block for each row and source, of which there are five at most. Raises ShapeError for shapes that do not fit.
    """
    batch, rows = accepted_nodes.shape
    given = [sources[f"source{number}"] for number in range(len(sources))]
    if not 1 <= len(given) <= MAX_SOURCES:
        raise ShapeError(f"features have 1 to {MAX_SOURCES} sources, got {len(given)}")
    (_, most, width), extent = waiting_features.shape, given[0].shape[1]
    if width != len(given) * extent or rows > most:
        raise ShapeError(f"{most} kept features of {width} do not hold {rows} rows of {len(given)} times {extent}")
    for source in given:
        check_shape("source", source, batch * rows, extent)
    for name, tensor in (("commit_lens", commit_lens), ("dense_lens", dense_lens), ("slots", slots)):
        check_shape(name, tensor, batch)
    kernel = _make_keep(rows, most, len(given), wide_count("source0", given[0]))
    padded: list[Argument] = [*given, *[0] * (MAX_SOURCES - len(given))]
    arguments = (accepted_nodes, commit_lens, dense_lens, slots, *padded, waiting_features)
    return [KernelCall(kernel, (batch * rows, len(given), 1), arguments)]


@cache
def _make_keep(rows: int, most: int, num_sources: int, width: int) -> Kernel:
    threads = threads_for(width)

    def kernel(
        nodes: Any,
        commit_lens: Any,
        dense_lens: Any,
        slots: Any,
        source0: Any,
        source1: Any,
        source2: Any,
        source3: Any,
        source4: Any,
        waiting_features: Any,
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, number = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        index, place = divide(row, rows)
        slot, count = int_at(slots, index), int_at(commit_lens, index)
        node, root = int_at(nodes, row), int_at(dense_lens, index)
        source = source0
        if number == 1:
            source = source1
        elif number == 2:
            source = source2
        elif number == 3:
            source = source3
        elif number == 4:
            source = source4
        if slot >= 0 and place < count:
            _, at = divide(root + place, most)
            target = waiting_features + ((slot * most + at) * num_sources + number) * (width * 16)
            origin = source + (index * rows + node) * (width * 16)
            copy_row(int64(cuda.threadIdx.x), threads, width, origin, target)

    return Kernel(f"keep_features_{rows}_{most}_{num_sources}_{width}", kernel, (types.int64,) * 10, threads)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles."""
    return [_make_rows(8192, 8), _make_take(8, 32, 1536), _make_keep(4, 32, 3, 512)]
