"""These kernels combine gathered rows of all ranks: they sum them, or put their columns side by side."""

from functools import cache
from itertools import pairwise
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.all_reduce import CHUNK
from lowlat.kernels.collectives.peers.chunk import added, store_wide
from lowlat.kernels.common.norm_row import chunk_values
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.reference.collectives.cuts import bounds
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types

__all__ = ["all_gather", "examples", "sum_ranks"]

THREADS = 128


def _tree(first: int, last: int) -> Any:
    """A device function: the sum of 8 numbers of ranks `first` to `last` - 1, as a tree of neighbouring pairs."""
    if last - first == 1:

        @device_function
        def one(parts: Any, apart: Any, chunk: Any) -> Any:
            return chunk_values(parts + int64(first) * apart, chunk, True)

        return one
    half = (first + last) // 2
    low, high = _tree(first, half), _tree(half, last)

    @device_function
    def both(parts: Any, apart: Any, chunk: Any) -> Any:
        return added(low(parts, apart, chunk), high(parts, apart, chunk))

    return both


@cache
def _make_sum(ranks: int) -> Kernel:
    add_up = _tree(0, ranks)

    def sum_ranks(parts: Any, out: Any, chunks: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        chunk = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x)
        if chunk < chunks:
            store_wide(out + chunk * int64(32), add_up(parts, chunks * int64(32), chunk))

    return Kernel(f"sum_ranks{ranks}", sum_ranks, (types.int64,) * 3, THREADS)


def _finder(starts: tuple[int, ...], first: int, last: int) -> Any:
    """A device function: the rank, from `first` to `last` - 1, that has a column, and the column's index there."""
    if last - first == 1:
        start = starts[first]

        @device_function
        def one(column: Any) -> Any:
            return int64(first), int64(column - int64(start))

        return one
    half = (first + last) // 2
    low, high, middle = _finder(starts, first, half), _finder(starts, half, last), starts[half]

    @device_function
    def either(column: Any) -> Any:
        found = low(column)
        if column >= int64(middle):
            found = high(column)
        return found

    return either


@cache
def _make_join(columns: int, ranks: int, unit: int, width: int) -> Kernel:
    """The kernel: grid (blocks of a row, M), a thread for each column."""
    find = _finder(bounds(columns, ranks, unit), 0, ranks)

    def all_gather(parts: Any, out: Any, apart: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        column, row = int64(cuda.blockIdx.x) * int64(THREADS) + int64(cuda.threadIdx.x), int64(cuda.blockIdx.y)
        if column < int64(columns):
            rank, own = find(column)
            value = ptx.load_global_f32(parts + rank * apart + (row * int64(width) + own) * int64(4))
            ptx.store_global_f32(out + (row * int64(columns) + column) * int64(4), value)

    name = f"all_gather_v{columns}_ranks{ranks}_unit{unit}_n{width}"
    return Kernel(name, all_gather, (types.int64,) * 3, THREADS)


def sum_ranks(parts: torch.Tensor, *, out: torch.Tensor) -> list[KernelCall]:
    """Sum over ranks in float32, as the same tree as `all_reduce`.

    parts  [R, M, N]  float32
    out    [M, N]     float32  out
    One launch. Raises ShapeError for shapes that do not fit, and if M * N is no multiple of 8.
    """
    ranks, rows, width = parts.shape
    check_shape("out", out, rows, width)
    check_dtype(torch.float32, parts=parts, out=out)
    if out.numel() % CHUNK or ranks & (ranks - 1):
        raise ShapeError(f"sums are of a power of two of parts of a multiple of {CHUNK} numbers, not {parts.shape}")
    chunks = out.numel() // CHUNK
    return [KernelCall(_make_sum(ranks), (max(1, -(-chunks // THREADS)), 1, 1), (parts, out, chunks))]


def all_gather(parts: torch.Tensor, *, out: torch.Tensor, unit: int) -> list[KernelCall]:
    """Put the columns of all ranks side by side; V has R parts of whole units, see `reference.collectives.cuts`.

    parts  [R, M, N]  float32       columns after a rank's own are not read
    out    [M, V]     float32  out
    One launch. Raises ShapeError for shapes that do not fit.
    """
    ranks, rows, width = parts.shape
    check_shape("out", out, rows, out.shape[1])
    check_dtype(torch.float32, parts=parts, out=out)
    columns = out.shape[1]
    ends = bounds(columns, ranks, unit)
    widest = max(stop - start for start, stop in pairwise(ends))
    if widest > width:
        raise ShapeError(f"a rank has {widest} of {columns} columns, and parts have room for {width}")
    kernel = _make_join(columns, ranks, unit, width)
    return [KernelCall(kernel, (-(-columns // THREADS), rows, 1), (parts, out, rows * width * 4))]


def examples() -> list[Kernel]:
    """Representative specialisations, to compile without a GPU."""
    return [_make_sum(2), _make_sum(8), _make_join(128256, 8, 16, 16032), _make_join(32000, 2, 16, 16000)]
