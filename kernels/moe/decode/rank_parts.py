"""The sum of a mixture's weighed outputs where K is summed in parts: by rank for each part, then parts as a tree.

It knows neither who writes the outputs nor what becomes of the sum.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["add_rank_parts", "examples"]

THREADS = 256


def add_rank_parts(
    *, partials: torch.Tensor, parts: int, expert_ids: torch.Tensor, out: torch.Tensor
) -> list[KernelCall]:
    """Add up the weighed outputs of each row's ranks, part by part, and the parts, in one launch.

    partials    [M, R * P, N]  float32: those of a rank's parts behind each other; dead pairs' are not read
    parts       P: a power of two
    expert_ids  [M, R]         int32: -1 dead
    out         [M, N]         float32, out: of each part zero plus its ranks from the first to the last, and these as a
                               tree of neighbouring pairs, every sum rounded by itself; zero for a dead row
    Time: (R * P + 1) * M * N * 4 bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit, or N that is no multiple of 4.
    """
    rows, ranks = expert_ids.shape
    width = out.shape[1]
    check_shape("partials", partials, rows, ranks * parts, width)
    check_shape("out", out, rows, width)
    if width % 4:
        raise ShapeError(f"rows must be a multiple of 4 wide, got {width}")
    blocks = -(-rows * (width // 4) // THREADS)
    return [KernelCall(_make(width, ranks, parts), (blocks, 1, 1), (partials, expert_ids, out, rows))]


@device_function
def _added(a: Any, b: Any) -> Any:
    return ptx.add_rn(a[0], b[0]), ptx.add_rn(a[1], b[1]), ptx.add_rn(a[2], b[2]), ptx.add_rn(a[3], b[3])


def _make_tree(width: int, ranks: int, parts: int, first: int, last: int) -> Any:
    """A function: four columns of parts `first` to `last` - 1 of a row, by the addresses of its outputs and its ids."""
    if last - first == 1:

        @device_function
        def one(place: Any, ids: Any) -> Any:
            zero = float32(0)
            sums = (zero, zero, zero, zero)
            for rank in range(ranks):
                if ptx.load_global_i32(ids + int64(rank * 4)) >= 0:
                    a, b, c, d = ptx.load_global_128(place + int64((rank * parts + first) * 4 * width))
                    values = (
                        ptx.float_of_bits(a), ptx.float_of_bits(b), ptx.float_of_bits(c), ptx.float_of_bits(d),
                    )  # fmt: skip
                    sums = _added(sums, values)
            return sums

        return one
    half = (first + last) // 2
    low, high = (_make_tree(width, ranks, parts, *ends) for ends in ((first, half), (half, last)))

    @device_function
    def both(place: Any, ids: Any) -> Any:
        return _added(low(place, ids), high(place, ids))

    return both


@cache
def _make(width: int, ranks: int, parts: int) -> Kernel:
    """A thread has four columns of a row."""
    chunks, add_up = width // 4, _make_tree(width, ranks, parts, 0, parts)

    def add_rank_parts_kernel(partials: Any, ids: Any, out: Any, rows: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        row = uint32(number // uint32(chunks))
        if row < uint32(rows):
            column = int64(uint32(number - row * uint32(chunks))) * int64(16)
            place = partials + int64(row) * int64(4 * width * ranks * parts) + column
            a, b, c, d = add_up(place, ids + int64(row) * int64(4 * ranks))
            ptx.store_global_128(
                out + int64(row) * int64(4 * width) + column,
                ptx.bits_of_float(a), ptx.bits_of_float(b), ptx.bits_of_float(c), ptx.bits_of_float(d),
            )  # fmt: skip

    return Kernel(f"add_rank_parts_{width}x{ranks}x{parts}", add_rank_parts_kernel, (types.int64,) * 4, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(2880, 4, 8), _make(2048, 8, 1)]
