"""Rows gathered between the target and the head: accepted features, each slot's last row, features at block ends.

One launch each, a block a row. It knows neither model nor dtype: rows are whole multiples of 16 bytes.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import byte_at, copy_row, divide, int_at, threads_for, wide_count, zero_row
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, int64, types

__all__ = ["examples", "gather_features", "store_boundary", "take_last"]

MAX_SOURCES = 5
PAIRS = 2


def gather_features(accepted_nodes: torch.Tensor, *, out: torch.Tensor, **sources: torch.Tensor) -> list[KernelCall]:
    """Features of the accepted rows in order, the captured residual streams side by side.

    accepted_nodes  [B, T]          int32  -1 pads
    source0..       [B * T, Ht]            five at most
    out             [B * T, F * Ht]        out; zero for pads
    Raises ShapeError for shapes that do not fit.
    """
    batch, rows = accepted_nodes.shape
    given = [sources[f"source{number}"] for number in range(len(sources))]
    if not 1 <= len(given) <= MAX_SOURCES:
        raise ShapeError(f"features have 1 to {MAX_SOURCES} sources, got {len(given)}")
    for source in given:
        check_shape("source", source, batch * rows, given[0].shape[1])
    check_shape("out", out, batch * rows, len(given) * given[0].shape[1])
    kernel = _make_gather(rows, len(given), wide_count("source0", given[0]))
    padded: list[Argument] = [*given, *[0] * (MAX_SOURCES - len(given))]
    return [KernelCall(kernel, (batch * rows, len(given), 1), (accepted_nodes, *padded, out))]


@cache
def _make_gather(rows: int, num_sources: int, count: int) -> Kernel:
    threads = threads_for(count)

    def kernel(nodes: Any, source0: Any, source1: Any, source2: Any, source3: Any, source4: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row, number = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y)
        node, thread = int_at(nodes, row), int64(cuda.threadIdx.x)
        source = source0
        if number == 1:
            source = source1
        elif number == 2:
            source = source2
        elif number == 3:
            source = source3
        elif number == 4:
            source = source4
        target = out + (row * num_sources + number) * (count * 16)
        if node >= 0:
            index, _ = divide(row, rows)
            copy_row(thread, threads, count, source + (index * rows + node) * (count * 16), target)
        else:
            zero_row(thread, threads, count, target)

    return Kernel(f"gather_features_{rows}_{num_sources}_{count}", kernel, (types.int64,) * 7, threads)


def take_last(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], commit_lens: torch.Tensor) -> list[KernelCall]:
    """Row commit_lens - 1 of each slot, of one or two tensors at once.

    pairs        (x [B * T, W], out [B, W] out; zero where nothing was committed), of any widths
    commit_lens  [B]  int32
    Raises ShapeError for shapes that do not fit.
    """
    batch = commit_lens.shape[0]
    if not 1 <= len(pairs) <= PAIRS:
        raise ShapeError(f"take_last takes 1 or {PAIRS} pairs, got {len(pairs)}")
    rows = pairs[0][0].shape[0] // batch
    for x, out in pairs:
        check_shape("x", x, batch * rows, out.shape[1])
        check_shape("out", out, batch, out.shape[1])
    both = [pairs[0], pairs[-1]]
    kernel = _make_take(rows, *(wide_count("x", x) for x, _ in both))
    arguments = (*both[0], *both[1], commit_lens)
    return [KernelCall(kernel, (batch, len(pairs), 1), arguments)]


@cache
def _make_take(rows: int, first: int, second: int) -> Kernel:
    threads = threads_for(max(first, second))

    def kernel(x0: Any, out0: Any, x1: Any, out1: Any, commit_lens: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        index, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        last = int_at(commit_lens, index) - 1
        x, out, count = x0, out0, int64(first)
        if cuda.blockIdx.y > 0:
            x, out, count = x1, out1, int64(second)
        if last >= 0:
            copy_row(thread, threads, count, x + (index * rows + last) * count * 16, out + index * count * 16)
        else:
            zero_row(thread, threads, count, out + index * count * 16)

    return Kernel(f"take_last_{rows}_{first}_{second}", kernel, (types.int64,) * 5, threads)


def store_boundary(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    row_live: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_features: torch.Tensor,
    block_size: int,
) -> list[KernelCall]:
    """Keep the feature of each block's last position, as the reference's `store_boundary`, whose arguments these are.

    Raises ShapeError for shapes that do not fit.
    """
    batch, rows = positions.shape
    check_shape("hidden", hidden, batch * rows, block_features.shape[1])
    check_shape("row_live", row_live, batch, rows)
    check_shape("slots", slots, batch)
    kernel = _make_store(rows, wide_count("hidden", hidden), block_table.shape[1], block_size)
    arguments = (hidden, positions, row_live, block_table, slots, block_features)
    return [KernelCall(kernel, (batch * rows, 1, 1), arguments)]


@cache
def _make_store(rows: int, count: int, table_width: int, block: int) -> Kernel:
    threads = threads_for(count)

    def kernel(hidden: Any, positions: Any, row_live: Any, block_table: Any, slots: Any, block_features: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = int64(cuda.blockIdx.x)
        index, _ = divide(row, rows)
        position, live, slot = int_at(positions, row), byte_at(row_live, row), int_at(slots, index)
        number, offset = divide(position, block)
        if live != 0 and slot >= 0 and offset == block - 1:
            number = int_at(block_table, slot * table_width + number)
            source, target = hidden + row * (count * 16), block_features + number * (count * 16)
            copy_row(int64(cuda.threadIdx.x), threads, count, source, target)

    name = f"store_boundary_{rows}_{count}_{table_width}_{block}"
    return Kernel(name, kernel, (types.int64,) * 6, threads)


def examples() -> list[Kernel]:
    """What CI compiles."""
    return [_make_gather(4, 3, 512), _make_take(4, 1024, 512), _make_store(4, 512, 513, 32)]
