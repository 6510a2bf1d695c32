"""This module copies the weights of a mainloop warp, one part of a tile at a time, and loads the inputs of its steps.

A part is several steps of a tile, contiguous in memory. A pipeline stage holds their words, then their scales.
"""

from typing import Any

from lowlat.kernels.common.sentinels import lacks_one, next_turn
from lowlat.kernels.moe.decode.expert_list import make_members_of, make_pair_of
from lowlat.kernels.moe.plan import GATE_UP, ExpertPlan, ExpertShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, int64, uint32

__all__ = ["make_fetch", "make_load_inputs"]

PIECE_BYTES = 512  # a warp copies so many bytes at once


def make_fetch(shape: ExpertShape, plan: ExpertPlan) -> tuple[Any, Any]:
    """Make two device functions of a warp's lanes: one returns a lane's sources, one copies a part to a stage.

    The first takes the addresses of the words and scales, and the lane. The second copies asynchronously. It takes the
    lane's place in the stage, 16 bytes from lane to lane; the sources that the first returned; the number of the part's
    first step among the steps of all tiles of all experts; the number of steps left to the warp from there; the lane.
    """
    part, step_bytes, scale_bytes = plan.part, shape.step_bytes, shape.scale_bytes
    has_scales, pieces, even = shape.format.has_scales, step_bytes // PIECE_BYTES, plan.is_even(shape)
    turns, together = -(-part * scale_bytes // PIECE_BYTES), plan.together > 1
    # all scales in one copy without a branch: superfluous lanes repeat the last lane's copy
    at_once, last = together and has_scales and even and turns == 1, part * scale_bytes // 16 - 1

    @device_function
    def sources(words: Any, scales: Any, lane: Any) -> Any:
        own, to_scales = lane, uint32(part * step_bytes)
        if at_once:
            own = min(lane, uint32(last))
            to_scales = uint32(to_scales + own * uint32(16) - lane * uint32(16))
        if together:
            words, scales = words + int64(lane * uint32(16)), scales + int64(own * uint32(16))
        return words, scales, to_scales

    @device_function
    def fetch(place: Any, source: Any, number: Any, count: Any, lane: Any) -> None:
        words, scales, to_scales = source
        if not together:
            along = int64(lane * uint32(16))
            words, scales = words + along, scales + along
        words = words + int64(number) * step_bytes
        for step in range(part):
            if even or uint32(step) < count:
                for piece in range(pieces):
                    at = step * step_bytes + piece * PIECE_BYTES
                    ptx.copy_async_16_once(uint32(place + uint32(at)), words + at)
        if at_once:
            ptx.copy_async_16_once(uint32(place + to_scales), scales + int64(number) * scale_bytes)
        elif has_scales:
            whole = uint32(part) if even else min(uint32(part), count)
            own, lanes = scales + int64(number) * scale_bytes, uint32(whole * uint32(scale_bytes // 16))
            if lane < lanes:  # inside of the loop the assembler would make this wrong for capability 10.0
                ptx.copy_async_16_once(uint32(place + uint32(part * step_bytes)), own)
            for turn in range(1, turns):
                if uint32(lane + uint32(32 * turn)) < lanes:
                    at = turn * PIECE_BYTES
                    ptx.copy_async_16_once(uint32(place + uint32(part * step_bytes + at)), own + at)

    return sources, fetch


@device_function
def _lacks(words: Any) -> Any:
    a, b, c, d, e, f, g, h = words
    first = lacks_one(a) or lacks_one(b) or lacks_one(c) or lacks_one(d)
    return first or lacks_one(e) or lacks_one(f) or lacks_one(g) or lacks_one(h)


def make_load_inputs(shape: ExpertShape, plan: ExpertPlan, *, awaited: bool) -> Any:
    """A device function that loads a lane's inputs of a part, eight words a step; zeros past the last column.

    Columns of the GEMM without a pair get another pair's inputs; their results are not read.
    awaited  other blocks write the inputs during the launch, see `sentinels`
    """
    part, depth, most = plan.part, shape.columns, plan.columns - 1
    whole = plan.is_even(shape) and depth % 64 == 0
    top_k = shape.top_k if shape.kind == GATE_UP else 1
    (as_multiplied, _), members_of, pair_of = shape.format.decode_fragment(), make_members_of(plan), make_pair_of(plan)
    load_words = ptx.load_relaxed_gpu_128 if awaited else ptx.load_global_128

    @device_function
    def load_half(row: Any, column: Any) -> Any:
        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
        if whole or column < uint32(depth):
            a, b, c, d = load_words(row + int64(column) * 2)
        return a, b, c, d

    @device_function
    def load_step(row: Any, column: Any) -> Any:
        a, b, c, d = load_half(row, column)
        e, f, g, h = load_half(row, uint32(column + uint32(32)))
        return a, b, c, d, e, f, g, h

    @device_function
    def load_part(row: Any, at: Any) -> Any:
        one = load_step(row, at)
        two = load_step(row, uint32(at + uint32(64))) if part > 1 else one
        three = load_step(row, uint32(at + uint32(128))) if part > 2 else two
        return one, two, three

    @device_function
    def load_inputs(lists: Any, x: Any, unit: Any, first: Any, lane: Any) -> Any:
        column = uint32(0)
        if most:
            column = uint32(min(uint32(lane >> uint32(2)), uint32(members_of(lists, unit) - uint32(1))))
        row = x + int64(pair_of(lists, unit, column) // uint32(top_k)) * (2 * depth)
        at = uint32(first * uint32(64) + (lane & uint32(3)) * uint32(8))
        one, two, three = load_part(row, at)
        if awaited:
            turns = uint32(0)
            while _lacks(one) or _lacks(two) or _lacks(three):
                turns = next_turn(turns)
                one, two, three = load_part(row, at)
        return as_multiplied(one), as_multiplied(two), as_multiplied(three)

    return load_inputs
