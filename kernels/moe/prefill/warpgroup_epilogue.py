"""This module has the epilogues of grouped GEMMs by warpgroups: SwiGLU, arranged for the next GEMM, and outputs.

Of every eight pairs of its tile, a thread has the sums of two pairs, for one weight row and the row 8 below: a gate and
its up row, or two rows of the output. Outputs are not yet multiplied by their weights; the kernel that adds them up
does that.
"""

from collections.abc import Callable
from typing import Any

from lowlat.kernels.common.activation import clamped_swiglu, gated_activation
from lowlat.kernels.gemm.prefill.plan import STEP_ROW_BYTES
from lowlat.kernels.moe.plan import ExpertShape
from lowlat.kernels.moe.prefill.warpgroup_plan import RUN
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, int64, uint32

__all__ = ["make_gated_finish", "make_outputs_finish"]

AT_ONCE = 4  # runs of eight pairs, whose chains of instructions go side by side


def _make_beside(shape: ExpertShape) -> Any:
    """A device function that loads the scale and bias of one weight row, and of the row 8 below."""
    rows, padded, biased, scaled = shape.rows, shape.padded_rows, shape.biased, shape.format.row_scales

    @device_function
    def load_beside(beside: Any, expert: Any, row: Any) -> Any:
        bias, scales = beside[0], beside[1]
        first, second, scale, other = float32(0), float32(0), float32(1), float32(1)
        if biased:
            at = bias + (int64(expert) * int64(rows) + int64(row)) * int64(2)
            first, second = ptx.load_global_bf16(at), ptx.load_global_bf16(at + int64(16))
        if scaled:
            at = scales + (int64(expert) * int64(padded) + int64(row)) * int64(4)
            scale, other = ptx.load_global_f32(at), ptx.load_global_f32(at + int64(32))
        return scale, first, other, second

    return load_beside


def _make_finished(shape: ExpertShape) -> Any:
    """A device function that multiplies a sum by its row's scale and adds its bias, if rows have them."""
    biased, scaled = shape.biased, shape.format.row_scales

    @device_function
    def finished(value: Any, scale: Any, bias: Any) -> Any:
        if scaled:
            value = ptx.mul_rn(value, scale)
        if biased:
            value = ptx.add_rn(value, bias)
        return value

    return finished


def _make_store_from(make_store_runs: Callable[[int], Any], at_once: int, most: int, first: int = 0) -> Any:
    """A function of a thread: store the sums of up to `most` pairs from the first on, so many runs at once, while they
    live.

    make_store_runs  makes a function of that thread: store so many runs, which begin after so many pairs
    """
    runs = min(at_once, (most - first) // RUN)
    take, after, store_runs = (
        ptx_hopper.take_sums(most // 2, first // 2, 4 * runs),
        first + RUN * runs,
        make_store_runs(runs),
    )
    is_last = after == most
    store_rest: Any = None if is_last else _make_store_from(make_store_runs, at_once, most, after)

    @device_function
    def store(sums: Any, target: Any, numbers: Any, live: Any) -> None:
        if live > uint32(first):
            store_runs(take(sums), target, uint32(first), numbers, live)
            if not is_last:
                store_rest(sums, target, numbers, live)

    return store


def make_gated_finish(shape: ExpertShape, most: int) -> Any:
    """A function of a warp: store a tile's activations [pairs, 8] of bf16 to rows arranged in steps of 64 columns.

    most: pairs that were multiplied.

    `beside` is a bias, rows' scales, the clamped SwiGLU's limit and alpha, and how many rows are arranged.
    """
    load_beside, finished, num_tiles = _make_beside(shape), _make_finished(shape), shape.tiles
    clamped, plain = shape.clamped, gated_activation(shape.activation)

    @device_function
    def activated(gate: Any, up: Any, numbers: Any) -> Any:
        gate, up = finished(gate, numbers[0], numbers[1]), finished(up, numbers[2], numbers[3])
        if clamped:
            return clamped_swiglu(gate, up, numbers[4], numbers[5])
        return plain(gate, up)

    @device_function
    def store_run(sums: Any, targets: Any, pairs: Any, numbers: Any, live: Any) -> None:
        """The lane's channel of its two pairs in a run that begins after so many pairs."""
        first = ptx.bf16_bits(activated(sums[0], sums[2], numbers))
        second = ptx.bf16_bits(activated(sums[1], sums[3], numbers))
        at, lives = int64(pairs) * int64(STEP_ROW_BYTES), uint32(live > pairs)
        ptx.store_global_u16_if(targets[0] + at, first, lives)
        ptx.store_global_u16_if(targets[1] + at, second, lives)

    def make_store_runs(runs: int) -> Any:
        @device_function
        def store_runs(sums: Any, targets: Any, pairs: Any, numbers: Any, live: Any) -> None:
            for run in range(runs):
                own = (sums[4 * run], sums[4 * run + 1], sums[4 * run + 2], sums[4 * run + 3])
                store_run(own, targets, uint32(pairs + uint32(RUN * run)), numbers, live)

        return store_runs

    store_all = _make_store_from(make_store_runs, AT_ONCE, most)

    @device_function
    def finish(sums: Any, beside: Any, out: Any, expert: Any, tile: Any, start: Any, live: Any, lane: Any) -> None:
        if tile < uint32(num_tiles):
            channel = uint32(lane >> uint32(2))
            scale, bias, up_scale, up_bias = load_beside(beside, expert, uint32(tile * uint32(16) + channel))
            numbers = (scale, bias, up_scale, up_bias, beside[2], beside[3])
            within = uint32(uint32(lane & uint32(3)) * uint32(2))  # of eight pairs, the lane's first
            of_step = uint32(tile & uint32(7))
            piece = uint32(uint32(of_step >> uint32(2)) * uint32(4) + uint32(channel >> uint32(1)))
            in_piece = uint32(uint32(of_step & uint32(3)) * uint32(4) + uint32(channel & uint32(1)) * uint32(2))
            row = int64(tile >> uint32(3)) * beside[4] + int64(uint32(start + within))
            target = out + row * int64(STEP_ROW_BYTES) + int64(in_piece)
            upper = target + int64(uint32(piece ^ within) * uint32(16))
            other = uint32(piece ^ uint32(within + uint32(1)))
            lower = target + int64(uint32(other * uint32(16) + uint32(STEP_ROW_BYTES)))
            store_all(sums, (upper, lower), numbers, live)

    return finish


def make_outputs_finish(shape: ExpertShape, most: int) -> Any:
    """A device function of a warp that stores a tile's outputs [pairs, 16] float32 by place; `beside` as above."""
    load_beside, finished, num_tiles = _make_beside(shape), _make_finished(shape), shape.tiles
    pitch = 4 * shape.rows

    @device_function
    def store_run(sums: Any, target: Any, pairs: Any, numbers: Any, live: Any) -> None:
        scale, bias, below_scale, below_bias = numbers
        at = target + int64(pairs) * int64(pitch)
        ptx.store_global_f32(at, finished(sums[0], scale, bias))
        ptx.store_global_f32(at + int64(32), finished(sums[2], below_scale, below_bias))
        ptx.store_global_f32(at + int64(pitch), finished(sums[1], scale, bias))
        ptx.store_global_f32(at + int64(pitch + 32), finished(sums[3], below_scale, below_bias))

    store_all = _make_store_from(lambda _: store_run, 1, most)

    @device_function
    def finish(sums: Any, beside: Any, out: Any, expert: Any, tile: Any, start: Any, live: Any, lane: Any) -> None:
        if tile < uint32(num_tiles):
            row = uint32(tile * uint32(16) + uint32(lane >> uint32(2)))
            first = uint32(start + uint32(uint32(lane & uint32(3)) * uint32(2)))
            target = out + int64(first) * int64(pitch) + int64(row) * int64(4)
            store_all(sums, target, load_beside(beside, expert, row), live)

    return finish
