"""This module has the mainloop of a prefill GEMM's wide tiles, half a step at a time.

The tensor cores never wait for a warp while steps are ready. It uses registers that copying warps give up.
"""

from typing import Any

from lowlat.kernels.common.pipeline import Pipeline
from lowlat.kernels.gemm.prefill.plan import STEP_ROW_BYTES, PrefillGemmPlan
from lowlat.kernels.gemm.prefill.weight_steps import make_load_halves
from lowlat.kernels.gemm.tiles import TileFormat
from lowlat.kernels.toolchain import ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["make_run_by_halves"]

HALF, HALF_BYTES = ptx_hopper.SLICES // 2, STEP_ROW_BYTES // 2  # of a step: slices, and of a row of the second matrix


def make_run_by_halves(weights: TileFormat, plan: PrefillGemmPlan, pipeline: Pipeline) -> Any:
    """A function of a warpgroup: the sums of so many steps, from zero.

    The tensor cores have half a step before them when they end another, so they wait for no warp, though both
    warpgroups' may end at once. A half's weights are loaded, and decoded, while they have the half before.
    """
    stage_bytes, (hold, first_half, second_half) = plan.stage_bytes, make_load_halves(weights, is_shared=True)
    await_full, release, after = pipeline.await_full, pipeline.release, pipeline.after
    multiply = ptx_hopper.multiply_group(plan.rows, slices=HALF, by_codes=weights.by_codes)
    await_all, await_former = (ptx_hopper.await_group(plan.rows, words=4 * HALF, under_way=number) for number in (0, 1))

    @device_function
    def run(
        sums: Any, base: Any, barriers: Any, within: Any, stage: Any, parity: Any, number: Any, lane: Any, rows: Any
    ) -> Any:
        """within: the warp's tile in a stage; parity: of the stage's phase; rows: not asked for."""
        here, done = uint32(base + stage * uint32(stage_bytes)), uint32(1)
        await_full(barriers, stage, parity)
        held = hold(uint32(here + within), lane)
        first, second = first_half(held), second_half(held)
        sums = multiply(sums, first, here, uint32(0))
        while done < number:
            sums = multiply(sums, second, uint32(here + uint32(HALF_BYTES)), uint32(1))
            sums = await_former(sums, first)
            later, later_parity = after(stage, parity)
            await_full(barriers, later, later_parity)
            here = uint32(base + later * uint32(stage_bytes))
            held = hold(uint32(here + within), lane)
            first = first_half(held)
            sums = multiply(sums, first, here, uint32(1))
            sums = await_former(sums, second)
            release(barriers, stage, lane)
            second = second_half(held)
            stage, parity, done = later, later_parity, uint32(done + uint32(1))
        sums = multiply(sums, second, uint32(here + uint32(HALF_BYTES)), uint32(1))
        sums = await_former(sums, first)
        sums = await_all(sums, second)
        release(barriers, stage, lane)
        stage, parity = after(stage, parity)
        return sums, stage, parity

    return run
