"""This module lists a block's units of a grouped GEMM by warpgroups, and copies weights and pairs' rows.

Copies continue across the units of a block, as far ahead as there are stages.
"""

from typing import Any

from lowlat.kernels.common.pipeline import BARRIER_BYTES, Pipeline
from lowlat.kernels.gemm.prefill.plan import STEP_ROW_BYTES
from lowlat.kernels.moe.plan import ExpertShape
from lowlat.kernels.moe.prefill.pair_arrangement import start_of
from lowlat.kernels.moe.prefill.warpgroup_plan import COPYING, WARPS, WarpgroupPlan
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, int64, uint32

__all__ = ["make_copy", "make_tile_of"]

TILES = WARPS // COPYING  # of weights, that a warp copies
ROWS_LANE = 2 * TILES  # of the first warp, which copies rows; lanes before it copy a tile's words, or its scales


def make_tile_of(shape: ExpertShape, plan: WarpgroupPlan) -> Any:
    """A device function that returns a unit's block of weight rows, expert, first pair and number of pairs.

    Past the last unit the number is 0.
    """
    row_blocks = plan.row_blocks(shape)

    @device_function
    def tile_of(tiles: Any, num_tiles: Any, unit: Any) -> Any:
        tile = uint32(unit // uint32(row_blocks))
        expert, first, live = uint32(0), uint32(0), uint32(0)
        if tile < num_tiles:
            expert, first, live, _ = ptx.load_global_128(tiles + int64(tile) * int64(16))
        return uint32(unit - tile * uint32(row_blocks)), expert, first, live

    return tile_of


def _make_begin_unit(shape: ExpertShape, plan: WarpgroupPlan) -> Any:
    """A function of a copying warp's lane: of what it copies of a unit the source of step 0, and a step's bytes.

    After these come the step's bytes of rows, 0 past the last unit.
    """
    tiles, steps, tile_of = shape.tiles, shape.steps, make_tile_of(shape, plan)
    word_bytes, scale_bytes = shape.step_bytes, shape.scale_bytes

    @device_function
    def begin_unit(given: Any, unit: Any, part: Any, lane: Any) -> Any:
        weight, scales, x, list_, num_tiles, _, _ = given
        row_block, expert, first, live = tile_of(list_, num_tiles, unit)
        within, source, count = lane, weight, uint32(word_bytes)
        if lane >= uint32(TILES):
            within, source, count = uint32(lane - uint32(TILES)), scales, uint32(scale_bytes)
        tile = uint32(row_block * uint32(WARPS) + part * uint32(TILES) + within)
        tile = uint32(expert * uint32(tiles) + min(tile, uint32(tiles - 1)))
        source = source + int64(tile) * int64(uint32(count * uint32(steps)))
        rows = uint32(uint32(uint32(live + uint32(7)) & uint32(0xFFFFFFF8)) * uint32(STEP_ROW_BYTES))
        if lane == uint32(ROWS_LANE):
            source = x + int64(start_of(expert, first)) * int64(STEP_ROW_BYTES)
            count = rows if part == uint32(0) else uint32(0)
        if lane > uint32(ROWS_LANE):
            count = uint32(0)
        return source, count, rows

    return begin_unit


def make_copy(shape: ExpertShape, plan: WarpgroupPlan, pipeline: Pipeline) -> Any:
    """A function of a warp that copies, the `part`-th of them: all steps of a block's units.

    given: weights, scales, rows of pairs, tiles, how many of these, bytes of a step of all rows, and blocks.
    """
    stage_bytes, pair_bytes, slot_bytes, steps = plan.stage_bytes, plan.pair_bytes, plan.step_bytes, shape.steps
    await_free, after, begin_unit = pipeline.await_free, pipeline.after, _make_begin_unit(shape, plan)
    word_bytes, scale_bytes = shape.step_bytes, shape.scale_bytes

    @device_function
    def place_of(part: Any, lane: Any) -> Any:
        """Where in a stage a lane's copies go."""
        tile = uint32(part * uint32(TILES))
        if lane < uint32(TILES):
            return uint32(uint32(pair_bytes) + uint32(tile + lane) * uint32(slot_bytes))
        if lane < uint32(ROWS_LANE):
            tile = uint32(tile + lane - uint32(TILES))
            return uint32(uint32(pair_bytes + word_bytes) + tile * uint32(slot_bytes))
        return uint32(0)

    @device_function
    def copy_all(place: Any, given: Any, unit: Any, part: Any, lane: Any) -> None:
        base, barriers = place
        target, stage, parity = uint32(base + place_of(part, lane)), uint32(0), uint32(1)
        source, count, rows = begin_unit(given, unit, part, lane)
        pitch = given[5] if lane == uint32(ROWS_LANE) else int64(count)
        while rows > uint32(0):
            whole, step = uint32(TILES * (word_bytes + scale_bytes)), uint32(0)
            if part == uint32(0):
                whole = uint32(whole + rows)
            while step < uint32(steps):
                await_free(barriers, stage, parity)
                full = uint32(barriers + stage * uint32(BARRIER_BYTES))
                if lane == uint32(0):
                    ptx_hopper.barrier_expect(full, whole)
                ptx.sync_warp()
                if count > uint32(0):
                    ptx_hopper.copy_bulk(uint32(target + stage * uint32(stage_bytes)), source, count, full)
                source, step = source + pitch, uint32(step + uint32(1))
                stage, parity = after(stage, parity)
            unit = uint32(unit + given[6])
            source, count, rows = begin_unit(given, unit, part, lane)

    return copy_all
