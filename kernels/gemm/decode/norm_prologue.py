"""In a decode GEMM's norm prologue every block norms the rows for itself, which saves a launch and a trip to memory.

A block has as many threads as `norm_math` uses to sum squares, so a row has the bits of `rms_norm`.
"""

from dataclasses import dataclass
from typing import Any

from lowlat.kernels.common.norm_math import EVERY_LANE, THREADS, WARPS, add_squares, inverse_rms
from lowlat.kernels.common.norm_row import NormFunctions, is_live, make_norm_functions
from lowlat.kernels.gemm.decode.plan import DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, uint32

__all__ = ["RowNorm", "make_norm"]


@dataclass(frozen=True)
class RowNorm:
    """Device functions for all threads of a block, and the numbers of words that a thread keeps for them.

    words, scales  words of its part of all rows, and of the norm's weight
    begin          loads before the wait for the kernel before this one
    finish         norms the rows after the wait, into shared memory, and synchronises the block; the first block also
                   writes them to `kept`, if the shape says so
    """

    words: int
    scales: int
    begin: Any
    finish: Any


def make_norm(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> RowNorm:
    """The functions for a shape with a norm; for others, functions that do nothing."""
    if shape.norm_eps is None:
        return _nothing()
    own = -(-shape.depth // (8 * THREADS))
    functions = make_norm_functions(shape.wide_norm)
    load_rows, load_scales = _make_load_rows(shape, plan, own), _make_load_scales(shape, own, functions)
    sum_squares, scale_rows = _make_sum_squares(plan, own), _make_scale_rows(shape, plan, own, functions)
    depth, eps, sums_at, share = shape.depth, shape.norm_eps, plan.steps_held * plan.rows_bytes, _lanes_a_row(plan)

    @device_function
    def begin(scales: Any, weight: Any, thread: Any) -> None:
        load_scales(scales, weight, thread)

    @device_function
    def finish(held: Any, words: Any, scales: Any, x: Any, row_live: Any, count: Any, kept: Any, thread: Any) -> None:
        row = int64((thread & uint32(31)) // uint32(share))
        live = ptx.ballot(uint32(is_live(row_live, min(row, int64(count) - int64(1)))))
        load_rows(words, x, count, thread)
        sums = uint32(held + uint32(sums_at))
        sum_squares(words, sums, thread)
        cuda.syncthreads()
        inverse = inverse_rms(_total(uint32(sums + uint32(row) * uint32(WARPS * 4))), depth, eps)
        scale_rows(held, inverse, live, words, scales, count, kept, thread)
        cuda.syncthreads()

    return RowNorm(4 * own * plan.columns, functions.size * own, begin, finish)


def _lanes_a_row(plan: DecodeGemmPlan) -> int:
    """The number of consecutive lanes of a warp for each row: a warp computes the inverses of all rows at once."""
    return 32 // plan.columns


def _nothing() -> RowNorm:
    @device_function
    def begin(_scales: Any, _weight: Any, _thread: Any) -> None:
        return

    @device_function
    def finish(
        _held: Any, _words: Any, _scales: Any, _x: Any, _row_live: Any, _count: Any, _kept: Any, _thread: Any
    ) -> None:
        return

    return RowNorm(1, 1, begin, finish)


def _make_load_scales(shape: DecodeGemmShape, own: int, functions: NormFunctions) -> Any:
    chunks, size = shape.depth // 8, functions.size
    load_weights, no_weights = functions.load_weights, functions.no_weights

    @device_function
    def load_narrow(scales: Any, weight: Any, thread: Any) -> None:
        """Load a thread's chunks of the norm's weight; zeros after its end."""
        for part in range(own):
            chunk = uint32(thread + uint32(part * THREADS))
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if chunk < uint32(chunks):
                a, b, c, d = load_weights(weight, chunk)
            at = 4 * part
            scales[at], scales[at + 1], scales[at + 2], scales[at + 3] = a, b, c, d

    @device_function
    def load_wide(scales: Any, weight: Any, thread: Any) -> None:
        """Load the same of a float32 weight."""
        for part in range(own):
            chunk = uint32(thread + uint32(part * THREADS))
            weights = no_weights()
            if chunk < uint32(chunks):
                weights = load_weights(weight, chunk)
            for word in range(size):
                scales[size * part + word] = weights[word]

    return load_wide if shape.wide_norm else load_narrow


def _make_load_rows(shape: DecodeGemmShape, plan: DecodeGemmPlan, own: int) -> Any:
    columns, depth, chunks = plan.columns, shape.depth, shape.depth // 8

    @device_function
    def load_rows(words: Any, x: Any, count: Any, thread: Any) -> None:
        """Load a thread's chunks of all rows; zeros after their end, and after the last row."""
        for row in range(columns):
            source = x + int64(row * 2 * depth)
            for part in range(own):
                chunk = uint32(thread + uint32(part * THREADS))
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                if int64(row) < int64(count) and chunk < uint32(chunks):
                    a, b, c, d = ptx.load_global_128(source + int64(chunk) * int64(16))
                at = 4 * (row * own + part)
                words[at], words[at + 1], words[at + 2], words[at + 3] = a, b, c, d

    return load_rows


def _make_sum_squares(plan: DecodeGemmPlan, own: int) -> Any:
    columns, share, together = plan.columns, _lanes_a_row(plan), _make_sum_lanes(plan)

    @device_function
    def sum_squares(words: Any, sums: Any, thread: Any) -> None:
        """Each warp's sum of each row, in the order of `norm_math.block_sum`."""
        totals = cuda.local.array(columns, float32)
        for row in range(columns):
            total = float32(0.0)
            for part in range(own):
                at = 4 * (row * own + part)
                total = add_squares(total, words[at], words[at + 1], words[at + 2], words[at + 3])
            totals[row] = total
        lane = thread & uint32(31)
        total = together(totals, lane)
        if lane % uint32(share) == uint32(0):
            place = sums + (lane // uint32(share)) * uint32(WARPS * 4) + (thread >> uint32(5)) * uint32(4)
            ptx.store_shared_f32(uint32(place), total)

    return sum_squares


def _make_sum_lanes(plan: DecodeGemmPlan) -> Any:
    """A function of a warp: `norm_math.lane_sum` of all rows at once; a lane gets the sum of its own row.

    While there are rows to divide, each lane of a pair adds one half of the rows and gives the other half to its
    partner. The pairs, and so the bits, are those of a butterfly that gives all rows to all lanes.
    """
    columns, share = plan.columns, _lanes_a_row(plan)
    turns = columns.bit_length() - 1

    @device_function
    def sum_lanes(totals: Any, lane: Any) -> Any:
        for turn in range(turns):
            distance, half = 16 >> turn, columns >> (turn + 1)
            upper = lane & uint32(distance) != uint32(0)
            for row in range(half):
                low, high = totals[row], totals[row + half]
                kept, given = low, high
                if upper:
                    kept, given = high, low
                totals[row] = ptx.add_rn(kept, cuda.shfl_xor_sync(EVERY_LANE, given, distance))
        total, distance = totals[0], share >> 1
        while distance > 0:
            total = ptx.add_rn(total, cuda.shfl_xor_sync(EVERY_LANE, total, distance))
            distance = distance >> 1
        return total

    return sum_lanes


def _make_scale_rows(shape: DecodeGemmShape, plan: DecodeGemmPlan, own: int, functions: NormFunctions) -> Any:
    scale, size, held_weights = functions.scale, functions.size, functions.held
    columns, rows_bytes, padded, share = plan.columns, plan.rows_bytes, shape.steps * 8, _lanes_a_row(plan)
    keeps, depth = shape.keeps_norm, shape.depth

    @device_function
    def scale_rows(
        held: Any, lane_inverse: Any, live: Any, words: Any, scales: Any, count: Any, kept: Any, thread: Any
    ) -> None:
        """Norm all rows, in the GEMM's order of steps; zeros for dead rows and after a row's end."""
        for row in range(columns):
            inverse = lane_inverse
            if columns > 1:
                inverse = cuda.shfl_sync(EVERY_LANE, lane_inverse, row * share)
            for part in range(own):
                chunk, at = uint32(thread + uint32(part * THREADS)), 4 * (row * own + part)
                if chunk < uint32(padded):
                    own_words = words[at], words[at + 1], words[at + 2], words[at + 3]
                    a, b, c, d = scale(own_words, inverse, held_weights(scales, size * part))
                    if live & uint32(1 << row * share) == uint32(0):
                        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                    place = held + (chunk >> uint32(3)) * uint32(rows_bytes) + uint32(row * 64)
                    place = place + ((chunk >> uint32(2)) & uint32(1)) * uint32(rows_bytes // 2)
                    ptx.store_shared_128(uint32(place + (chunk & uint32(3)) * uint32(16)), a, b, c, d)
                    if keeps and cuda.blockIdx.x == 0 and row < count and chunk < uint32(depth // 8):
                        ptx.store_global_128(kept + int64(row * 2 * depth) + int64(chunk) * int64(16), a, b, c, d)

    return scale_rows


@device_function
def _total(sums: Any) -> Any:
    """The warps' sums of a row, added from the first to the last."""
    total = ptx.load_shared_f32(sums)
    for warp in range(1, WARPS):
        total = ptx.add_rn(total, ptx.load_shared_f32(sums + uint32(warp * 4)))
    return total
