"""This module unpacks a quantised weight to rows of bf16 in one launch, for a library's GEMMs; memory-bound."""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.formats import representative_layouts
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS, PackedMatrix
from lowlat.kernels.gemm.prefill.weight_steps import make_load_step
from lowlat.kernels.gemm.tiles import BF16_TILES, TileFormat
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, types, uint32

__all__ = ["examples", "unpack_weight", "unpacked_shape"]

THREADS, MIN_BLOCKS = 256, 4
STEPS = 4  # of a warp, one after the other


def unpacked_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of a weight [N, K] unpacked: multiples of 16 and of 64."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def unpack_weight(*, weight: PackedMatrix, out: torch.Tensor) -> list[KernelCall]:
    """Unpack a weight, in one launch; no kernel writes it, so nothing waits but what writes the result.

    weight  [N, K]  packed in any format
    out     bf16, out: as `unpacked_shape` has it, rows in the packed order; zeros past N and K
    Numbers are those of `formats.dense.unpack_matrix`, bit for bit: without the scales of rows, rounded once.
    Time: both over the memory's bandwidth. Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    rows, columns = unpacked_shape(weight.rows, weight.columns)
    check_shape("out", out, rows, columns)
    check_dtype(torch.bfloat16, out=out)
    if weight.tile_format == BF16_TILES:
        raise ShapeError("a weight of bf16 is unpacked by `packing.unpack_rows`, not by this kernel")
    width = columns // TILE_COLUMNS
    steps = rows // TILE_ROWS * width
    blocks = -(-steps // (STEPS * THREADS // 32))
    return [KernelCall(_make(weight.tile_format, width), (blocks, 1, 1), (weight.memory, out, steps))]


def _make_store(width: int) -> Any:
    """A device function that stores a lane's sixteen words at their places."""
    pitch = 2 * TILE_COLUMNS * width

    @device_function
    def store_piece(target: Any, words: Any) -> None:
        a, b, c, d = words
        ptx.store_global_128(target, a, b, c, d)

    @device_function
    def store(out: Any, step: Any, lane: Any, words: Any) -> None:
        tile = uint32(step // uint32(width))
        row = uint32(tile * uint32(TILE_ROWS) + uint32(lane >> uint32(2)))
        target = out + int64(row) * int64(pitch) + int64(uint32(step - uint32(tile * uint32(width)))) * int64(128)
        target = target + int64(lane & uint32(3)) * int64(16)
        below = target + int64(8 * pitch)
        store_piece(target, words[:4])
        store_piece(target + int64(64), words[4:8])
        store_piece(below, words[8:12])
        store_piece(below + int64(64), words[12:])

    return store


@cache
def _make(tiles: TileFormat, width: int) -> Kernel:
    """A warp has some steps after each other, and the next one's numbers are under way while it stores one's."""
    load, store, step_bytes = make_load_step(tiles, is_shared=False), _make_store(width), tiles.step_bytes

    def unpack(weight: Any, out: Any, steps: Any) -> None:
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        step = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(THREADS // 32) + warp) * uint32(STEPS))
        ptx.let_next_kernel_start()
        end = min(uint32(step + uint32(STEPS)), uint32(steps))
        place = weight + int64(step) * int64(step_bytes)
        words = load(weight if step >= end else place, lane)
        ptx.wait_for_previous_kernel()
        while step < end:
            place = place + int64(step_bytes)
            later = uint32(step + uint32(1))
            ahead = words
            if later < end:
                ahead = load(place, lane)
            store(out, step, lane, words)
            step, words = later, ahead

    return Kernel(f"unpack_{tiles.label}_{width}", unpack, (types.int64,) * 3, THREADS, MIN_BLOCKS)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(tiles, 64) for tiles in representative_layouts()]
