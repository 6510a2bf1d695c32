"""This module has the gated norm of a delta net's heads as a kernel; a thread has four neighbouring columns of a row.

The columns of a block of the recurrence are summed first, then these sums in order. So the bits are those of the step's
kernel, which norms its own output.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.common.memory import divide
from lowlat.kernels.common.norm_math import high_value, low_value
from lowlat.kernels.common.norm_row import is_live
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.recurrent.delta_math import four_numbers, gated, head_inverse, lane_squares, part_sum
from lowlat.kernels.recurrent.delta_rule import check_norm_weight
from lowlat.kernels.recurrent.limits import NORMED_DIM, part_columns
from lowlat.kernels.reference.recurrent import gates as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.launches import Given, launches
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["delta_norm", "examples"]

THREADS = 256
FOUR = 4


@cache
def _make(heads: int, dim: int, width: int, wide_weight: bool, eps: float) -> Kernel:
    """Grid (M, heads / heads a block)."""
    fours = dim // FOUR
    together = max(THREADS // fours, 1)
    columns = part_columns(dim)
    parts, part_fours = dim // columns, columns // FOUR
    threads = -(-together * fours // 32) * 32
    count = together * parts

    @device_function
    def weight_four(weight: Any, piece: Any) -> Any:
        if wide_weight:
            return four_numbers(ptx.load_global_nc_128(weight + piece * int64(16)))
        low, high = ptx.load_global_64(weight + piece * int64(8))
        return low_value(low), high_value(low), low_value(high), high_value(high)

    def delta_norm_kernel(x: Any, gates: Any, weight: Any, row_live: Any, out: Any) -> None:
        sums = cuda.shared.array(shape=count, dtype=types.float32)
        thread, row = int64(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        own, piece = divide(thread, fours)
        head = int64(cuda.blockIdx.y) * int64(together) + own
        active = own < int64(together) and head < int64(heads)
        weights = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
        if active:
            weights = weight_four(weight, piece)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        live = is_live(row_live, row)
        column = head * int64(dim) + piece * int64(FOUR)
        place = row * int64(heads * dim) + column
        low, high = uint32(0), uint32(0)
        z = (float32(0.0), float32(0.0), float32(0.0), float32(0.0))
        if active and live:
            low, high = ptx.load_global_64(x + place * int64(2))
            z = four_numbers(
                ptx.load_global_128(gates + (row * int64(width) + int64(width - heads * dim) + column) * int64(4))
            )
        values = (low_value(low), high_value(low), low_value(high), high_value(high))
        total = part_sum(lane_squares(values), part_fours)
        part, in_part = divide(piece, part_fours)
        address = ptx.shared_address(sums)
        if active and in_part == int64(0):
            ptx.store_shared_f32(uint32(address + uint32((own * int64(parts) + part) * int64(4))), total)
        cuda.syncthreads()
        if active:
            low, high = uint32(0), uint32(0)
            if live:
                inverse = head_inverse(uint32(address + uint32(own * int64(4 * parts))), parts, dim, eps)
                low = ptx.bf16_pair(
                    gated(values[0], inverse, weights[0], z[0]), gated(values[1], inverse, weights[1], z[1])
                )
                high = ptx.bf16_pair(
                    gated(values[2], inverse, weights[2], z[2]), gated(values[3], inverse, weights[3], z[3])
                )
            ptx.store_global_64(out + place * int64(2), low, high)

    name = f"gated_delta_norm_{heads}_{dim}_{width}_{'f32' if wide_weight else 'bf16'}_eps{eps!r}"
    return Kernel(name, delta_norm_kernel, (types.int64,) * 5, threads, waits_before_trigger=True)


@launches(reference.delta_norm)
def delta_norm(given: Given) -> list[KernelCall]:
    """`delta_norm` of the reference; x and out are bf16, the weight that or float32.

    One launch. Time: 8 bytes a number of out over the memory's bandwidth. Raises ShapeError for other dtypes, and for
    heads whose size is no multiple of 8.
    """
    (rows, total), (dim, width) = given["x"].shape, given.sizes("Dv", "W")
    wide = check_norm_weight(given["weight"], dim)
    check_dtype(torch.bfloat16, x=given["x"])
    NORMED_DIM.check("columns of a head", dim)
    if width < total or width % FOUR:
        raise ShapeError(f"gates must have {total} columns or more, a multiple of {FOUR}, got {width}")
    heads, together = total // dim, max(THREADS // (dim // FOUR), 1)
    kernel = _make(heads, dim, width, wide, given.params["eps"])
    arguments = given.take("x", "gates", "weight", "row_live", "out")
    return [KernelCall(kernel, (rows, -(-heads // together), 1), arguments)]


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: 35B-A3B's heads, weights of both dtypes."""
    return [_make(32, 128, 12288, False, 1e-6), _make(32, 128, 12288, True, 1e-6)]
