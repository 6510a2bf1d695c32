"""This module adds up a row's weighted outputs, from its first expert to its last, in a launch of its own."""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["add_placed_topk", "add_topk", "examples"]

THREADS = 256


def add_topk(*, partials: torch.Tensor, expert_ids: torch.Tensor, out: torch.Tensor) -> list[KernelCall]:
    """Add up the outputs of each row's experts, in one launch.

    partials    [M, k, N]  float32; those of dead pairs are not used
    expert_ids  [M, k]     int32: -1 dead
    out         [M, N]     float32, out: every sum rounded by itself; zero for a row that is dead
    Time: (k + 1) * M * N * 4 bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit, or N that is no multiple of 4.
    """
    rows, top_k = expert_ids.shape
    width = out.shape[1]
    check_shape("partials", partials, rows, top_k, width)
    check_shape("out", out, rows, width)
    if width % 4:
        raise ShapeError(f"rows must be a multiple of 4 wide, got {width}")
    blocks = -(-rows * (width // 4) // THREADS)
    return [KernelCall(_make(width, top_k), (blocks, 1, 1), (partials, expert_ids, 0, 0, out, rows))]


def add_placed_topk(
    *,
    outputs: torch.Tensor,
    places: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    out: torch.Tensor,
) -> list[KernelCall]:
    """Add up the outputs of each row's experts, which lie grouped by expert, times their shares, in one launch.

    outputs         [P, N]  float32: that of pair p, as `group_pairs` numbers them, at places[p]
    places          [M * k] int32; of live pairs
    expert_ids      [M, k]  int32: -1 dead
    expert_weights  [M, k]  float32: the shares
    out             [M, N]  float32, out: as `add_topk` of share * output, every product and sum rounded by itself
    Time, errors: as `add_topk`. Captured: yes.
    """
    rows, top_k = expert_ids.shape
    width = out.shape[1]
    check_shape("outputs", outputs, outputs.shape[0], width)
    check_shape("places", places, rows * top_k)
    check_shape("expert_weights", expert_weights, rows, top_k)
    check_shape("out", out, rows, width)
    if width % 4:
        raise ShapeError(f"rows must be a multiple of 4 wide, got {width}")
    blocks = -(-rows * (width // 4) // THREADS)
    arguments = (outputs, expert_ids, places, expert_weights, out, rows)
    return [KernelCall(_make(width, top_k, True), (blocks, 1, 1), arguments)]


@cache
def _make(width: int, top_k: int, placed: bool = False) -> Kernel:
    """A thread has four columns of a row."""
    chunks = width // 4

    @device_function
    def load_pair(partials: Any, ids: Any, places: Any, shares: Any, pair: Any) -> Any:
        """Where the pair's output is, whether it lives, and its share."""
        alive = ptx.load_global_i32(ids + pair * int64(4)) >= 0
        place, share = pair, float32(1)
        if placed:
            place = int64(0)
            if alive:
                place = int64(ptx.load_global_i32(places + pair * int64(4)))
            share = ptx.load_global_f32(shares + pair * int64(4))
        return partials + place * int64(4 * width), alive, share

    @device_function
    def times(words: Any, share: Any) -> Any:
        a, b, c, d = words
        if placed:
            a = ptx.bits_of_float(ptx.mul_rn(share, ptx.float_of_bits(a)))
            b = ptx.bits_of_float(ptx.mul_rn(share, ptx.float_of_bits(b)))
            c = ptx.bits_of_float(ptx.mul_rn(share, ptx.float_of_bits(c)))
            d = ptx.bits_of_float(ptx.mul_rn(share, ptx.float_of_bits(d)))
        return a, b, c, d

    @device_function
    def add(sums: Any, words: Any, alive: Any) -> Any:
        if not alive:
            return sums
        return (
            ptx.add_rn(sums[0], ptx.float_of_bits(words[0])),
            ptx.add_rn(sums[1], ptx.float_of_bits(words[1])),
            ptx.add_rn(sums[2], ptx.float_of_bits(words[2])),
            ptx.add_rn(sums[3], ptx.float_of_bits(words[3])),
        )

    def add_topk_kernel(partials: Any, ids: Any, places: Any, shares: Any, out: Any, rows: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        row = uint32(number // uint32(chunks))
        if row < uint32(rows):
            chunk = uint32(number - row * uint32(chunks))
            zero, column = float32(0), int64(chunk) * int64(16)
            sums = (zero, zero, zero, zero)
            for k in range(top_k):
                pair = int64(row) * int64(top_k) + int64(k)
                source, alive, share = load_pair(partials, ids, places, shares, pair)
                sums = add(sums, times(ptx.load_global_128(source + column), share), alive)
            a, b, c, d = sums
            ptx.store_global_128(
                out + int64(row) * int64(4 * width) + column,
                ptx.bits_of_float(a), ptx.bits_of_float(b), ptx.bits_of_float(c), ptx.bits_of_float(d),
            )  # fmt: skip

    name = f"add_{'placed_' if placed else ''}topk_{width}x{top_k}"
    return Kernel(name, add_topk_kernel, (types.int64,) * 6, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(2880, 4), _make(2880, 4, True), _make(2048, 11), _make(2048, 9, True)]
