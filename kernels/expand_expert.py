"""Experts' packed matrices expanded to plain bf16 rows in their original order: what products of many rows read.

A warp has a tile of 16 rows by 64 columns: its lanes read it as the products' lanes do, and each of their four words of
codes (or of a bf16 tile each 16 bytes) is eight columns of one row. It knows nothing of who chose the experts.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.expert_packing import PackedExperts
from lowlat.kernels.experts_multiply import MINUS_ZEROS, decode, scaled
from lowlat.kernels.kernel import Kernel, KernelCall
from lowlat.kernels.norm import check_dtype
from lowlat.kernels.numba_cuda import cuda, device_function, int64, types, uint32
from lowlat.kernels.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["examples", "expand_experts"]

WARPS = 8
WORD_COLUMNS = 8  # that 16 bytes of bf16 hold


@device_function
def _expanded(word: Any, stored: Any) -> Any:
    """Eight numbers of a word of codes, exactly, as four words; stored: the block's scale as packing keeps it.

    Codes come times 2**-126; times 2**63 they are normal numbers, and the stored scale is the exponent of what is left.
    """
    power = uint32(uint32(stored) << uint32(7))
    both = uint32(power | uint32(power << uint32(16)))
    a, b, c, d = decode(uint32(word))
    return (
        ptx.fma_bf16_pair(scaled(a), both, uint32(MINUS_ZEROS)),
        ptx.fma_bf16_pair(scaled(b), both, uint32(MINUS_ZEROS)),
        ptx.fma_bf16_pair(scaled(c), both, uint32(MINUS_ZEROS)),
        ptx.fma_bf16_pair(scaled(d), both, uint32(MINUS_ZEROS)),
    )


def _make_read(quantised: bool) -> Any:
    """A function: a lane's four runs of eight numbers of a tile, from the tile's index among all experts' tiles."""

    @device_function
    def read_codes(words: Any, scales: Any, tile: Any, lane: Any) -> Any:
        w0, w1, w2, w3 = ptx.load_global_nc_128(words + tile * int64(512) + int64(lane) * int64(16))
        powers = uint32(ptx.load_global_i32(scales + tile * int64(32) + int64(uint32(lane // uint32(4))) * int64(4)))
        return (
            _expanded(w0, powers & uint32(255)),
            _expanded(w1, (powers >> uint32(8)) & uint32(255)),
            _expanded(w2, (powers >> uint32(16)) & uint32(255)),
            _expanded(w3, powers >> uint32(24)),
        )

    @device_function
    def read_numbers(words: Any, scales: Any, tile: Any, lane: Any) -> Any:
        at = words + tile * int64(2048) + int64(lane) * int64(16)
        return (
            ptx.load_global_nc_128(at),
            ptx.load_global_nc_128(at + int64(512)),
            ptx.load_global_nc_128(at + int64(1024)),
            ptx.load_global_nc_128(at + int64(1536)),
        )

    return read_codes if quantised else read_numbers


@cache
def _make(rows: int, columns: int, quantised: bool, ordered: bool) -> Kernel:
    """Grid: of each expert the tiles / WARPS, an expert's blocks side by side."""
    width = -(-columns // TILE_COLUMNS)
    tiles = -(-rows // TILE_ROWS) * width
    blocks = -(-tiles // WARPS)
    read = _make_read(quantised)

    def expand_expert(words: Any, scales: Any, order: Any, ids: Any, out: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        place = uint32(uint32(cuda.blockIdx.x) // uint32(blocks))
        part = uint32(uint32(cuda.blockIdx.x) - place * uint32(blocks))
        thread = uint32(cuda.threadIdx.x)
        lane = uint32(thread & uint32(31))
        tile = uint32(part * uint32(WARPS) + uint32(thread >> uint32(5)))
        if tile < uint32(tiles):
            expert = int64(ptx.load_global_i32(ids + int64(place) * int64(4)))
            runs = read(words, scales, expert * int64(tiles) + int64(tile), lane)
            height = uint32(tile // uint32(width))
            row = uint32(height * uint32(TILE_ROWS) + (lane >> uint32(2)))
            column = uint32((tile - height * uint32(width)) * uint32(TILE_COLUMNS) + (lane & uint32(3)) * uint32(8))
            for half in range(2):
                mine = uint32(row + uint32(8 * half))
                if mine < uint32(rows):
                    line = int64(mine)
                    if ordered:
                        line = int64(ptx.load_global_i32(order + int64(mine) * int64(4)))
                    target = out + ((int64(place) * int64(rows) + line) * int64(columns) + int64(column)) * int64(2)
                    first, second = (runs[0], runs[1]) if half == 0 else (runs[2], runs[3])
                    if column < uint32(columns):
                        ptx.store_global_128(target, first[0], first[1], first[2], first[3])
                    if uint32(column + uint32(32)) < uint32(columns):
                        ptx.store_global_128(target + int64(64), second[0], second[1], second[2], second[3])

    name = f"expand_expert_{'mxfp4' if quantised else 'bf16'}_n{rows}_k{columns}_{'ordered' if ordered else 'plain'}"
    return Kernel(name, expand_expert, (types.int64,) * 5, 32 * WARPS)


def expand_experts(
    experts: PackedExperts, expert_ids: torch.Tensor, *, out: torch.Tensor, order: torch.Tensor | None = None
) -> list[KernelCall]:
    """Matrices of some experts as plain rows, bit for bit what `expert_packing.unpack_expert` gives.

    experts     [E, N, K]  packed, MXFP4 or bf16
    expert_ids  [n]        int32, from 0 to E - 1; they may be written by the kernel before
    out         [n, N, K]  bf16, out
    order       [N]        int32: the packed matrices' own order, on their device; None: they have none
    One launch. Time: the packed bytes and those of out over the memory's bandwidth.
    Raises ShapeError for shapes that do not fit, K that is no multiple of 8, or an order where there is none.
    """
    count = expert_ids.numel()
    check_shape("expert_ids", expert_ids, count)
    check_shape("out", out, count, experts.rows, experts.columns)
    check_dtype(torch.int32, expert_ids=expert_ids)
    check_dtype(torch.bfloat16, out=out)
    if count < 1:
        raise ShapeError("expert_ids must name at least one expert")
    if experts.columns % WORD_COLUMNS:
        raise ShapeError(f"experts' columns must be a multiple of {WORD_COLUMNS}, got {experts.columns}")
    if (order is None) != (experts.order is None):
        raise ShapeError(f"the packed experts have {'no' if experts.order is None else 'an'} order of their own")
    if order is not None:
        check_shape("order", order, experts.rows)
        check_dtype(torch.int32, order=order)
    kernel = _make(experts.rows, experts.columns, experts.scales is not None, order is not None)
    blocks = -(-experts.words.shape[1] * experts.words.shape[2] // WARPS)
    scales, rows = (0 if each is None else each for each in (experts.scales, order))
    return [KernelCall(kernel, (count * blocks, 1, 1), (experts.words, scales, rows, expert_ids, out))]


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU: gpt-oss in MXFP4 and bf16, an odd shape."""
    return [
        _make(5760, 2880, True, True),
        _make(2880, 2880, True, False),
        _make(5760, 2880, False, True),
        _make(100, 96, True, False),
    ]
