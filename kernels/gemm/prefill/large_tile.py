"""The main loop of a prefill GEMM's large tiles: two warpgroups multiply, and copy steps to shared memory themselves.

Sums of 64 weight rows by 256 rows of x take half of a thread's registers, which no other warps may then have. A warp
copies its own tile of weights, and the first warp the rows of x, when all have multiplied what was in their place.
Segments of K are added up in the output, by the thread that stores them. Copies run on across the tiles of a block.
"""

from collections.abc import Callable
from typing import Any

from lowlat.kernels.common.handover import BARRIER_BYTES, Handover
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.gemm.prefill.mainloop import Cut, make_send, make_unit_of
from lowlat.kernels.gemm.prefill.plan import GROUP_ROWS, STEP_ROW_BYTES, PrefillGemmPlan
from lowlat.kernels.gemm.prefill.weight_steps import load_half
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["make_multiply"]

GROUP_TILES = GROUP_ROWS // TILE_ROWS
HALF, HALF_BYTES = ptx_hopper.SLICES // 2, STEP_ROW_BYTES // 2  # of a step: slices, and of a row of the second matrix


def _make_copies(cut: Cut, plan: PrefillGemmPlan, handover: Handover) -> Any:
    """Functions of a warp: the first copies of a block; and the copy of the next step, whatever unit it is of.

    What is copied next is a tuple: the unit, the step and the end of its steps, the stage and the parity of its phase,
    where the warp's weights and the rows begin.
    """
    stages, stage_bytes, steps, length, apart = plan.stages, plan.stage_bytes, cut.steps, cut.length, plan.apart
    unit_of, await_free, after = make_unit_of(cut, plan), handover.await_free, handover.after
    sources_of, send_weights, send_rows = make_send(cut, plan)

    @device_function
    def begin_unit(weight: Any, x: Any, x_tiles: Any, unit: Any, warp: Any, lane: Any) -> Any:
        x_tile, block, segment = unit_of(unit, x_tiles)
        source, x_source = sources_of(weight, x, x_tile, block, warp, lane)
        step = uint32(segment * uint32(length))
        end = min(uint32(step + uint32(length)), uint32(steps)) if apart else uint32(steps)
        return step, end, source, x_source

    @device_function
    def send_next(place: Any, given: Any, following: Any, warp: Any, lane: Any) -> Any:
        base, barriers = place
        weight, x, rows, x_tiles, units, grid, policy = given
        unit, step, end, stage, parity, source, x_source = following
        if unit < units:
            if warp == uint32(0):
                await_free(barriers, stage, parity)
            full = uint32(barriers + stage * uint32(BARRIER_BYTES))
            here = uint32(base + stage * uint32(stage_bytes))
            send_weights(here, full, source, step, warp, lane, policy)
            send_rows(here, full, x_source, rows, step, warp, lane)
            stage, parity = after(stage, parity)
            step = uint32(step + uint32(1))
            if step >= end:
                unit = uint32(unit + grid)
                step, end, source, x_source = begin_unit(weight, x, x_tiles, unit, warp, lane)
        return unit, step, end, stage, parity, source, x_source

    @device_function
    def send_first(place: Any, given: Any, unit: Any, warp: Any, lane: Any) -> Any:
        """All stages but one: weights before the kernel before has ended, then rows."""
        base, barriers = place
        weight, x, rows, x_tiles, _, _, policy = given
        step, end, source, x_source = begin_unit(weight, x, x_tiles, unit, warp, lane)
        ahead = min(uint32(uint32(end - step) - uint32(1)), uint32(stages - 1))
        for number in range(stages - 1):
            if uint32(number) < ahead:
                full = uint32(barriers + uint32(number * BARRIER_BYTES))
                here = uint32(base + uint32(number * stage_bytes))
                send_weights(here, full, source, uint32(step + uint32(number)), warp, lane, policy)
        ptx.wait_for_previous_kernel()
        for number in range(stages - 1):
            if uint32(number) < ahead:
                full = uint32(barriers + uint32(number * BARRIER_BYTES))
                here = uint32(base + uint32(number * stage_bytes))
                send_rows(here, full, x_source, rows, uint32(step + uint32(number)), warp, lane)
        following = (unit, uint32(step + ahead), end, ahead, uint32(1), source, x_source)
        for number in range(stages - 1):
            if uint32(number) >= ahead:
                following = send_next(place, given, following, warp, lane)
        return following

    return send_first, send_next


def _make_run(plan: PrefillGemmPlan, handover: Handover, send_next: Any) -> Any:
    """A function of a warpgroup: the sums of so many steps, from zero.

    The tensor cores have half a step before them when they end another, so they wait for no warp, though both
    warpgroups' may end at once. A half's weights are loaded while they have the half before.
    """
    stage_bytes = plan.stage_bytes
    await_full, release, after = handover.await_full, handover.release, handover.after
    multiply = ptx_hopper.multiply_group(plan.rows, slices=HALF)
    await_all, await_former = (ptx_hopper.await_group(plan.rows, words=4 * HALF, under_way=number) for number in (0, 1))

    @device_function
    def run(
        sums: Any, place: Any, given: Any, within: Any, now: Any, following: Any, number: Any, warp: Any, lane: Any
    ) -> Any:
        """now: the stage and the parity of its phase; within: the warp's tile in a stage."""
        base, barriers = place
        stage, parity = now
        here, done = uint32(base + stage * uint32(stage_bytes)), uint32(1)
        await_full(barriers, stage, parity)
        first, second = load_half(uint32(here + within), lane, 0), load_half(uint32(here + within), lane, 1)
        sums = multiply(sums, first, here, uint32(0))
        while done < number:
            sums = multiply(sums, second, uint32(here + uint32(HALF_BYTES)), uint32(1))
            following = send_next(place, given, following, warp, lane)
            sums = await_former(sums, first)
            later, later_parity = after(stage, parity)
            await_full(barriers, later, later_parity)
            here = uint32(base + later * uint32(stage_bytes))
            first = load_half(uint32(here + within), lane, 0)
            sums = multiply(sums, first, here, uint32(1))
            sums = await_former(sums, second)
            release(barriers, stage, lane)
            second = load_half(uint32(here + within), lane, 1)
            stage, parity, done = later, later_parity, uint32(done + uint32(1))
        sums = multiply(sums, second, uint32(here + uint32(HALF_BYTES)), uint32(1))
        following = send_next(place, given, following, warp, lane)
        sums = await_former(sums, first)
        sums = await_all(sums, second)
        release(barriers, stage, lane)
        return sums, after(stage, parity), following

    return run


def make_multiply(cut: Cut, plan: PrefillGemmPlan, handover: Handover, finish: Callable[..., Any]) -> Any:
    """A function of a warpgroup: copy and multiply all steps of a block's units, and hand the sums to `finish`.

    The sums are those of a unit, or of each of its segments in turn.

    It waits for the kernel before, and copies weights until then. `given`: weights, rows, how many of these, tiles of
    them, units, blocks, and the policy of the weights' copies.
    """
    steps, length, segments, apart = cut.steps, cut.length, cut.segments, plan.apart
    parts, unit_of, x_bytes = 1 if apart else segments, make_unit_of(cut, plan), plan.rows * STEP_ROW_BYTES
    tile_bytes = plan.tile_bytes
    send_first, send_next = _make_copies(cut, plan, handover)
    run, zeros = _make_run(plan, handover, send_next), ptx.zeros(plan.sums)

    @device_function
    def multiply_all(place: Any, given: Any, beside: Any, out: Any, unit: Any, warp: Any, lane: Any) -> None:
        rows, x_tiles, units, grid = given[2], given[3], given[4], given[5]
        group, quarter = uint32(warp >> uint32(2)), uint32(warp & uint32(3))
        first = uint32(group * uint32(GROUP_TILES) + quarter)  # of the block's tiles, the warp's own
        within = uint32(uint32(x_bytes) + first * uint32(tile_bytes))
        following = send_first(place, given, unit, warp, lane)
        sums, now = zeros(), (uint32(0), uint32(0))
        while unit < units:
            x_tile, block, segment = unit_of(unit, x_tiles)
            for part in range(parts):
                begun = uint32(uint32(segment + uint32(part)) * uint32(length))
                number = min(uint32(length), uint32(uint32(steps) - begun))
                sums, now, following = run(sums, place, given, within, now, following, number, warp, lane)
                finish(sums, beside, out, rows, x_tile, block, segment, uint32(part), first, lane)
            unit = uint32(unit + grid)

    return multiply_all
