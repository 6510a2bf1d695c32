"""This module has the mainloop of a grouped GEMM by warpgroups: three multiply, half a step at a time, four warps copy.

Each warp decodes the weights of its step in registers. While it decodes one half, the tensor cores multiply its other
half, and the halves of the other warpgroups. A tile's pairs are multiplied by an instruction of about that size, so
each size has a loop.
"""

from collections.abc import Callable
from typing import Any

from lowlat.kernels.common.pipeline import Pipeline
from lowlat.kernels.gemm.prefill.plan import STEP_ROW_BYTES
from lowlat.kernels.moe.plan import ExpertShape
from lowlat.kernels.moe.prefill.pair_arrangement import start_of
from lowlat.kernels.moe.prefill.warpgroup_copies import make_tile_of
from lowlat.kernels.moe.prefill.warpgroup_plan import SIZES, WARPS, WarpgroupPlan
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["make_multiply"]

HALF, HALF_BYTES = ptx_hopper.SLICES // 2, STEP_ROW_BYTES // 2  # of a step: slices, and of a row of pairs


def _make_run(shape: ExpertShape, plan: WarpgroupPlan, pipeline: Pipeline, pairs: int) -> Any:
    """A function of a warpgroup: the sums of a unit of up to so many pairs.

    The tensor cores have half a step before them when they end another; the half after it is decoded meanwhile. Each
    product is written once: one next to the loop would have registers of its own, in every size's.
    """
    stage_bytes, steps = plan.stage_bytes, shape.steps
    await_full, release, after = pipeline.await_full, pipeline.release, pipeline.after
    hold, decode_first, decode_second = shape.format.prefill_halves()
    multiply, zeros = ptx_hopper.multiply_group(pairs, slices=HALF), ptx.zeros(pairs // 2)
    await_all, await_former = (ptx_hopper.await_group(pairs, words=4 * HALF, under_way=number) for number in (0, 1))
    use = ptx_hopper.use_words(HALF)

    @device_function
    def run(place: Any, own: Any, now: Any, never: Any, lane: Any) -> Any:
        """own: where in a stage the warp's weights are; now: the stage and its phase's parity; never: zero."""
        base, barriers = place
        stage, parity = now
        here, before, done = uint32(base + stage * uint32(stage_bytes)), stage, uint32(0)
        await_full(barriers, stage, parity)
        held = hold(uint32(here + own), lane)
        first = decode_first(held)
        sums, second = zeros(), first
        while done < uint32(steps):
            sums = multiply(sums, first, here, done)
            sums = await_former(sums, second)
            use(second, never)
            if done > uint32(0):
                release(barriers, before, lane)
            second = decode_second(held)
            sums = multiply(sums, second, uint32(here + uint32(HALF_BYTES)), uint32(1))
            before, done = stage, uint32(done + uint32(1))
            stage, parity = after(stage, parity)
            if done < uint32(steps):
                await_full(barriers, stage, parity)
                here = uint32(base + stage * uint32(stage_bytes))
                held = hold(uint32(here + own), lane)
            sums = await_former(sums, first)
            use(first, never)
            first = decode_first(held)  # after the last step for nobody
        sums = await_all(sums, second)
        use(second, never)
        release(barriers, before, lane)
        return sums, (stage, parity)

    return run


def _make_run_of(
    shape: ExpertShape, plan: WarpgroupPlan, pipeline: Pipeline, make_finish: Callable[[int], Any], number: int
) -> Any:
    """A function of a warpgroup: multiply and finish a unit, by the first size from this one on that holds its pairs.

    Nothing of the sums is handed from size to size: registers would be reserved for the most sums in every loop.
    """
    pairs, is_last = SIZES[number], number == len(SIZES) - 1
    run, finish = _make_run(shape, plan, pipeline, pairs), make_finish(pairs)
    run_larger: Any = None if is_last else _make_run_of(shape, plan, pipeline, make_finish, number + 1)

    @device_function
    def run_of(
        place: Any,
        own: Any,
        now: Any,
        never: Any,
        beside: Any,
        out: Any,
        expert: Any,
        tile: Any,
        start: Any,
        live: Any,
        lane: Any,
    ) -> Any:
        if is_last or live <= uint32(pairs):
            sums, now = run(place, own, now, never, lane)
            finish(sums, beside, out, expert, tile, start, live, lane)
        else:
            now = run_larger(place, own, now, never, beside, out, expert, tile, start, live, lane)
        return now

    return run_of


def make_multiply(
    shape: ExpertShape, plan: WarpgroupPlan, pipeline: Pipeline, make_finish: Callable[[int], Any]
) -> Any:
    """A function of a warp that multiplies: all steps of a block's units, each of whose sums it finishes.

    make_finish  makes the function that finishes the sums of up to so many pairs

    given: as `make_copy` has it.
    """
    pair_bytes, slot_bytes = plan.pair_bytes, plan.step_bytes
    tile_of, run_of = make_tile_of(shape, plan), _make_run_of(shape, plan, pipeline, make_finish, 0)

    @device_function
    def multiply_all(place: Any, given: Any, beside: Any, out: Any, unit: Any, warp: Any, lane: Any) -> None:
        own = ptx.varying(uint32(uint32(pair_bytes) + warp * uint32(slot_bytes)))
        now, never = (uint32(0), uint32(0)), uint32(given[4] >> uint32(31))  # which the assembler does not know
        row_block, expert, first, live = tile_of(given[3], given[4], unit)
        while live > uint32(0):
            tile = uint32(row_block * uint32(WARPS) + warp)
            now = run_of(place, own, now, never, beside, out, expert, tile, start_of(expert, first), live, lane)
            unit = uint32(unit + given[6])
            row_block, expert, first, live = tile_of(given[3], given[4], unit)

    return multiply_all
