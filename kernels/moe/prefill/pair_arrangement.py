"""This module arranges the rows of pairs, in order of experts, as the second operand of a grouped GEMM by warpgroups.

A row is copied for each of its experts. `gemm.prefill.activation_layout` describes the order of its columns.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.prefill.activation_layout import STEP, arranged_shape, transposed
from lowlat.kernels.moe.prefill.pair_tiles import TILE_WORDS
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, types, uint32

__all__ = ["arrange_pairs", "examples", "start_of"]

THREADS = 256
PARTS = 6  # blocks of a tile


@device_function
def start_of(expert: Any, first: Any) -> Any:
    """The place of a tile's first pair, which is the `first` of all pairs."""
    return uint32(uint32(uint32(first >> uint32(3)) + expert) * uint32(8))


def arrange_pairs(
    *, x: torch.Tensor, top_k: int, order: torch.Tensor, tiles: torch.Tensor, places: torch.Tensor, out: torch.Tensor
) -> list[KernelCall]:
    """Arrange the rows of all live pairs, in one launch.

    x       [M, K]         bf16, K a multiple of 64
    order   [M * k]        int32: pairs by expert, as `group_pairs` has them
    tiles   [n, 4]         int32: tiles of a multiple of 8 pairs, as `group_pairs` has them
    places  [M * k]        int32, out: each live pair's row of the arranged ones
    out     [K/64, P, 64]  bf16, out, P as `num_places` has it: row places[p] that of pair p, as `arrange` leaves it;
                           other rows are not written
    Time: rows read and written over the L2's and the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit.
    """
    rows, columns = x.shape
    check_shape("order", order, rows * top_k)
    check_shape("places", places, rows * top_k)
    check_shape("tiles", tiles, tiles.shape[0], TILE_WORDS)
    check_shape("out", out, *arranged_shape(out.shape[1], columns))
    if columns % STEP:
        raise ShapeError(f"pairs' rows must be a multiple of {STEP} wide to be arranged, got {columns}")
    grid = (tiles.shape[0] * PARTS, 1, 1)
    return [KernelCall(_make(columns, top_k), grid, (x, order, tiles, places, out, out.shape[1]))]


@cache
def _make(columns: int, top_k: int) -> Kernel:
    """A warp has a row, of which a lane loads and stores 16 bytes at a time."""
    pieces, warps = columns // 8, THREADS // 32
    turns = -(-pieces // 32)

    @device_function
    def copy_row(source: Any, target: Any, row: Any, capacity: Any, lane: Any) -> None:
        for turn in range(turns):
            piece = uint32(uint32(turn * 32) + lane)
            words = (uint32(0), uint32(0), uint32(0), uint32(0))
            if piece < uint32(pieces):
                words = ptx.load_global_128(source + int64(piece) * int64(16))
            a, b, c, d = transposed(words, lane)
            if piece < uint32(pieces):
                at = (int64(piece >> uint32(3)) * int64(capacity) + int64(row)) * int64(2 * STEP)
                place = uint32((piece ^ row) & uint32(7))
                ptx.store_global_128(target + at + int64(place) * int64(16), a, b, c, d)

    def arrange_pairs_kernel(x: Any, order: Any, tiles: Any, places: Any, out: Any, capacity: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        thread, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        tile = uint32(block // uint32(PARTS))
        expert, first, live, _ = ptx.load_global_128(tiles + int64(tile) * int64(16))
        start, row = start_of(expert, first), uint32(uint32(block - tile * uint32(PARTS)) * uint32(warps) + warp)
        while row < live:
            pair = uint32(ptx.load_global_i32(order + int64(uint32(first + row)) * int64(4)))
            place = uint32(start + row)
            if lane == uint32(0):
                ptx.store_global_i32(places + int64(pair) * int64(4), int32(place))
            source = x + int64(uint32(pair // uint32(top_k))) * int64(2 * columns)
            copy_row(source, out, place, uint32(capacity), lane)
            row = uint32(row + uint32(PARTS * warps))

    return Kernel(f"arrange_pairs_{columns}x{top_k}", arrange_pairs_kernel, (types.int64,) * 6, THREADS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(2880, 4)]
