"""The norm of a decode GEMM's rows, by every block for itself: a launch and a trip to memory less than a norm alone.

A block has as many threads as `norm_math` sums squares with, so a row has the bits that `rms_norm` gives it.
"""

from dataclasses import dataclass
from typing import Any

from lowlat.kernels.common.norm_math import THREADS, WARPS, add_squares, inverse_rms, lane_sum, normalised_pair
from lowlat.kernels.common.norm_row import is_live
from lowlat.kernels.gemm.decode.plan import DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, uint32

__all__ = ["RowNorm", "make_norm"]


@dataclass(frozen=True)
class RowNorm:
    """Device functions of all threads of a block, and the words that a thread keeps for them.

    words, scales  of its part of all rows, and of the norm's weight
    begin          before the wait
    finish         after it: the rows, normed, in shared memory; the block has met when it returns
    """

    words: int
    scales: int
    begin: Any
    finish: Any


def make_norm(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> RowNorm:
    """For a shape with a norm; else functions that do nothing."""
    if shape.norm_eps is None:
        return _nothing()
    own = -(-shape.depth // (8 * THREADS))
    load_rows, load_scales = _make_load_rows(shape, plan, own), _make_load_scales(shape, own)
    sum_squares, scale_rows = _make_sum_squares(plan, own), _make_scale_rows(shape, plan, own, shape.norm_eps)
    sums_at = plan.steps_held * plan.rows_bytes

    @device_function
    def begin(scales: Any, weight: Any, thread: Any) -> None:
        load_scales(scales, weight, thread)

    @device_function
    def finish(held: Any, words: Any, scales: Any, x: Any, row_live: Any, count: Any, thread: Any) -> None:
        load_rows(words, x, count, thread)
        sums = uint32(held + uint32(sums_at))
        sum_squares(words, sums, thread)
        cuda.syncthreads()
        scale_rows(held, sums, words, scales, row_live, count, thread)
        cuda.syncthreads()

    return RowNorm(4 * own * plan.columns, 4 * own, begin, finish)


def _nothing() -> RowNorm:
    @device_function
    def begin(_scales: Any, _weight: Any, _thread: Any) -> None:
        return

    @device_function
    def finish(_held: Any, _words: Any, _scales: Any, _x: Any, _row_live: Any, _count: Any, _thread: Any) -> None:
        return

    return RowNorm(1, 1, begin, finish)


def _make_load_scales(shape: DecodeGemmShape, own: int) -> Any:
    chunks = shape.depth // 8

    @device_function
    def load_scales(scales: Any, weight: Any, thread: Any) -> None:
        """A thread's chunks of the norm's weight; zeros past its end."""
        for part in range(own):
            chunk = uint32(thread + uint32(part * THREADS))
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if chunk < uint32(chunks):
                a, b, c, d = ptx.load_global_nc_128(weight + int64(chunk) * int64(16))
            at = 4 * part
            scales[at], scales[at + 1], scales[at + 2], scales[at + 3] = a, b, c, d

    return load_scales


def _make_load_rows(shape: DecodeGemmShape, plan: DecodeGemmPlan, own: int) -> Any:
    columns, depth, chunks = plan.columns, shape.depth, shape.depth // 8

    @device_function
    def load_rows(words: Any, x: Any, count: Any, thread: Any) -> None:
        """A thread's chunks of all rows; zeros past their end, the last row again past the last."""
        for row in range(columns):
            source = x + min(int64(row), int64(count) - int64(1)) * int64(2 * depth)
            for part in range(own):
                chunk = uint32(thread + uint32(part * THREADS))
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                if chunk < uint32(chunks):
                    a, b, c, d = ptx.load_global_128(source + int64(chunk) * int64(16))
                at = 4 * (row * own + part)
                words[at], words[at + 1], words[at + 2], words[at + 3] = a, b, c, d

    return load_rows


def _make_sum_squares(plan: DecodeGemmPlan, own: int) -> Any:
    columns = plan.columns

    @device_function
    def sum_squares(words: Any, sums: Any, thread: Any) -> None:
        """Each warp's sum of each row, in the order of `norm_math.block_sum`."""
        for row in range(columns):
            total = float32(0.0)
            for part in range(own):
                at = 4 * (row * own + part)
                total = add_squares(total, words[at], words[at + 1], words[at + 2], words[at + 3])
            total = lane_sum(total)
            if thread & uint32(31) == uint32(0):
                ptx.store_shared_f32(sums + uint32(row * WARPS * 4) + (thread >> uint32(5)) * uint32(4), total)

    return sum_squares


def _make_scale_rows(shape: DecodeGemmShape, plan: DecodeGemmPlan, own: int, eps: float) -> Any:
    columns, depth, rows_bytes, padded = plan.columns, shape.depth, plan.rows_bytes, shape.steps * 8

    @device_function
    def scale_rows(held: Any, sums: Any, words: Any, scales: Any, row_live: Any, count: Any, thread: Any) -> None:
        """The norm of all rows, step by step as the GEMM reads them; zeros for dead rows and past a row's end."""
        for row in range(columns):
            live = is_live(row_live, min(int64(row), int64(count) - int64(1)))
            inverse = inverse_rms(_total(sums + uint32(row * WARPS * 4)), depth, eps)
            for part in range(own):
                chunk, at, of = uint32(thread + uint32(part * THREADS)), 4 * (row * own + part), 4 * part
                if chunk < uint32(padded):
                    a = normalised_pair(words[at], inverse, scales[of])
                    b = normalised_pair(words[at + 1], inverse, scales[of + 1])
                    c = normalised_pair(words[at + 2], inverse, scales[of + 2])
                    d = normalised_pair(words[at + 3], inverse, scales[of + 3])
                    if not live:
                        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                    place = held + (chunk >> uint32(3)) * uint32(rows_bytes) + uint32(row * 64)
                    place = place + ((chunk >> uint32(2)) & uint32(1)) * uint32(rows_bytes // 2)
                    ptx.store_shared_128(uint32(place + (chunk & uint32(3)) * uint32(16)), a, b, c, d)

    return scale_rows


@device_function
def _total(sums: Any) -> Any:
    """The warps' sums of a row, added from the first to the last."""
    total = ptx.load_shared_f32(sums)
    for warp in range(1, WARPS):
        total = ptx.add_rn(total, ptx.load_shared_f32(sums + uint32(warp * 4)))
    return total
