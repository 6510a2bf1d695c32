"""This module adds up weighted outputs if K is summed in parts: experts for each part, then parts as a tree."""

from functools import cache, partial
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.k_parts import add_four, load_four, make_tree
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["add_topk_parts", "examples"]

THREADS = 256


def add_topk_parts(
    *, partials: torch.Tensor, parts: int, expert_ids: torch.Tensor, out: torch.Tensor
) -> list[KernelCall]:
    """Add up the weighed outputs of each row's experts, part by part, and the parts, in one launch.

    partials    [M, k * P, N]  float32: those of a pair's parts after each other; dead pairs' are not read
    parts       P: a power of two
    expert_ids  [M, k]         int32: -1 dead
    out         [M, N]         float32, out: of each part zero plus a row's first expert to its last, and these as a
                               tree of neighbouring pairs, every sum rounded by itself; zero for a dead row
    Time: (k * P + 1) * M * N * 4 bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit, or N that is no multiple of 4.
    """
    rows, top_k = expert_ids.shape
    width = out.shape[1]
    check_shape("partials", partials, rows, top_k * parts, width)
    check_shape("out", out, rows, width)
    if width % 4:
        raise ShapeError(f"rows must be a multiple of 4 wide, got {width}")
    blocks = -(-rows * (width // 4) // THREADS)
    return [KernelCall(_make(width, top_k, parts), (blocks, 1, 1), (partials, expert_ids, out, rows))]


def _make_part(width: int, top_k: int, parts: int, part: int) -> Any:
    """A device function that adds up four columns of a part of a row, from the addresses of its outputs and ids."""

    @device_function
    def add_experts(place: Any, ids: Any) -> Any:
        zero = float32(0)
        sums = (zero, zero, zero, zero)
        for k in range(top_k):
            if ptx.load_global_i32(ids + int64(k * 4)) >= 0:
                sums = add_four(sums, load_four(place + int64((k * parts + part) * 4 * width)))
        return sums

    return add_experts


@cache
def _make(width: int, top_k: int, parts: int) -> Kernel:
    """A thread has four columns of a row."""
    chunks, add_up = width // 4, make_tree(partial(_make_part, width, top_k, parts), 0, parts, add_four)

    def add_topk_parts_kernel(partials: Any, ids: Any, out: Any, rows: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        row = uint32(number // uint32(chunks))
        if row < uint32(rows):
            column = int64(uint32(number - row * uint32(chunks))) * int64(16)
            place = partials + int64(row) * int64(4 * width * top_k * parts) + column
            a, b, c, d = add_up(place, ids + int64(row) * int64(4 * top_k))
            ptx.store_global_128(
                out + int64(row) * int64(4 * width) + column,
                ptx.bits_of_float(a), ptx.bits_of_float(b), ptx.bits_of_float(c), ptx.bits_of_float(d),
            )  # fmt: skip

    return Kernel(f"add_topk_parts_{width}x{top_k}x{parts}", add_topk_parts_kernel, (types.int64,) * 4, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(2880, 4, 8), _make(2048, 8, 1)]
