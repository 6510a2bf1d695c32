"""What travels to a block's shared memory: the weights of its run of tiles, one step after the other, and inputs.

A warp's cursor is a tuple: the number of its next step among the steps of all tiles of all experts, the unit, the tile
in it and the step in that, and how many tiles of the run are left.
"""

from typing import Any

from lowlat.kernels import ptx
from lowlat.kernels.experts_list import make_expert_of, make_members_of, make_pair_of
from lowlat.kernels.experts_multiply import scaled
from lowlat.kernels.experts_plan import GATE_UP, SCALE_BYTES, ExpertPlan, ExpertShape
from lowlat.kernels.numba_cuda import device_function, int64, uint32

__all__ = ["make_copy_step", "make_load_inputs", "make_start"]


def make_start(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function: a warp's cursor at tile `first` of all units' tiles, to go on to `last`; and what it needs to move:
    the addresses of the lane's words and scales in the first step of all, and its warp."""
    tiles, steps = shape.tiles, shape.steps
    expert_of = make_expert_of(plan)

    @device_function
    def start(lists: Any, weight: Any, scales: Any, first: Any, last: Any, thread: Any) -> Any:
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        unit = uint32(first // uint32(tiles))
        inner, left, number = uint32(first - unit * uint32(tiles)), uint32(0), uint32(0)
        if first < last and warp < uint32(steps):
            left = uint32(last - first)
            number = uint32((expert_of(lists, unit) * uint32(tiles) + inner) * uint32(steps) + warp)
        fixed = weight + int64(lane) * 16, scales + int64(lane >> uint32(2)) * 4, warp
        return (number, unit, inner, warp, left), fixed

    return start


def make_copy_step(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function: copy the step at the cursor, if any is left, to a lane's place; returns the cursor moved on."""
    tiles, steps, warps, step_bytes = shape.tiles, shape.steps, plan.warps, shape.step_bytes
    expert_of, issue = make_expert_of(plan), _make_issue(shape)

    @device_function
    def copy_step(lists: Any, here: Any, to_scales: Any, cursor: Any, fixed: Any) -> Any:
        number, unit, inner, step, left = cursor
        words, powers, warp = fixed
        if left > uint32(0):
            issue(here, to_scales, words + int64(number) * step_bytes, powers + int64(number) * SCALE_BYTES)
            on = uint32(step + uint32(warps))
            if on < uint32(steps):
                number, step = uint32(number + uint32(warps)), on
            else:
                number, step = uint32(number - step + uint32(steps) + warp), warp
                left, inner = uint32(left - uint32(1)), uint32(inner + uint32(1))
                if inner == uint32(tiles):
                    inner, unit = uint32(0), uint32(unit + uint32(1))
                    if left > uint32(0):
                        number = uint32(expert_of(lists, unit) * uint32(tiles * steps) + warp)
        return number, unit, inner, step, left

    return copy_step


def _make_issue(shape: ExpertShape) -> Any:
    """Copy a lane's own bytes of one step."""

    @device_function
    def issue_codes(here: Any, to_scales: Any, words: Any, powers: Any) -> None:
        ptx.copy_async_16(here, words)
        ptx.copy_async_4(here + to_scales, powers)

    @device_function
    def issue_numbers(here: Any, _to_scales: Any, words: Any, _powers: Any) -> None:
        for quarter in range(4):
            ptx.copy_async_16(here + uint32(quarter * 512), words + quarter * 512)

    return issue_codes if shape.quantised else issue_numbers


def make_load_inputs(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function of all threads: a unit's inputs to shared memory, as lanes read them; past the last column zeros.

    Columns that no pair has keep what was there: they feed columns of the product that nobody reads.
    """
    columns, threads, pieces, depth = plan.columns, plan.threads, shape.steps * 8, shape.columns
    ranks = shape.ranks if shape.kind == GATE_UP else 1
    quantised, members_of, pair_of = shape.quantised, make_members_of(plan), make_pair_of(plan)

    @device_function
    def load_inputs(lists: Any, area: Any, x: Any, unit: Any, thread: Any) -> None:
        count, index = uint32(members_of(lists, unit) * uint32(pieces)), thread
        while index < count:
            column = uint32(index // uint32(pieces))
            piece = uint32(index - column * uint32(pieces))
            index = uint32(index + uint32(threads))
            row = uint32(pair_of(lists, unit, column) // uint32(ranks))
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if piece < uint32(depth // 8):
                a, b, c, d = ptx.load_global_128(x + (int64(row) * depth + int64(piece) * 8) * 2)
                if quantised:
                    a, b, c, d = scaled(a), scaled(b), scaled(c), scaled(d)
            place = (piece >> uint32(2)) * uint32(columns * 64) + column * uint32(64) + (piece & uint32(3)) * uint32(16)
            ptx.store_shared_128(area + place, a, b, c, d)

    return load_inputs
