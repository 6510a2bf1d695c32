"""This module has the mainloop of a prefill GEMM: warps that copy to shared memory, two warpgroups that multiply.

A stage has the rows of x, as `arrange` left them, then the tiles of the weights. Copies continue across the tiles of a
block. Before the previous kernel has ended only weights are copied. The blocks of a cluster multiply the same rows, and
each copies half of them to both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lowlat.kernels.common.pipeline import BARRIER_BYTES, Pipeline
from lowlat.kernels.gemm.k_parts import KParts, make_span_of
from lowlat.kernels.gemm.packing import TILE_ROWS
from lowlat.kernels.gemm.prefill.half_steps import make_run_by_halves
from lowlat.kernels.gemm.prefill.plan import (
    BLOCK_ROWS,
    GROUP_ROWS,
    PRODUCERS,
    STEP,
    STEP_ROW_BYTES,
    PrefillGemmPlan,
)
from lowlat.kernels.gemm.prefill.segment_totals import make_add_segments
from lowlat.kernels.gemm.prefill.weight_steps import make_load_step
from lowlat.kernels.gemm.tiles import BF16_TILES, TileFormat
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, int64, uint32

__all__ = ["Cut", "make_consume", "make_finish", "make_produce", "make_send", "make_unit_of"]

GROUP_TILES = GROUP_ROWS // TILE_ROWS


@dataclass(frozen=True)
class Cut:
    """A weight and how its K is cut.

    weight_rows, columns  N, K; of codes that codes of rows multiply, which are bytes, half of K
    segments, length      how many, and steps of each but the last
    weights               how the weight is held
    parts                 that the segments are, if there are several: they need not be equal
    """

    weight_rows: int
    columns: int
    segments: int
    length: int
    weights: TileFormat = BF16_TILES
    parts: KParts | None = None

    @property
    def has_empty(self) -> bool:
        """Whether some parts have no columns."""
        ends = (0, 1) if self.parts is None else self.parts.ends(self.steps)
        return any(start == stop for start, stop in pairwise(ends))

    @property
    def steps(self) -> int:
        """Of 64 columns."""
        return -(-self.columns // STEP)

    @property
    def tiles(self) -> int:
        """Of 16 weight rows."""
        return -(-self.weight_rows // TILE_ROWS)


def make_unit_of(cut: Cut, plan: PrefillGemmPlan) -> Any:
    """A function of a unit's number and the tiles of x: the tile of x, the block's weight rows, the first segment.

    Units of the same weights stand side by side. Blocks of a cluster have the same unit, and weight rows side by side.
    """
    own, cluster = cut.segments if plan.apart else 1, plan.cluster

    @device_function
    def unit_of(unit: Any, x_tiles: Any) -> Any:
        rest = uint32(unit // x_tiles)
        block = uint32(rest // uint32(own))
        segment = uint32(rest - block * uint32(own))
        if cluster > 1:
            block = uint32(block * uint32(cluster) + ptx_hopper.cluster_rank())
        return uint32(unit - rest * x_tiles), block, segment

    return unit_of


def _make_span_of(cut: Cut) -> Any:
    """A device function that returns a part's first step, and the step after its last."""
    return make_span_of(cut.parts or KParts(1, 1), cut.steps)


def make_send(cut: Cut, plan: PrefillGemmPlan) -> Any:
    """Functions of a copying warp: where a unit's weights and rows begin, and the copy of a stage of each."""
    x_bytes, depth = plan.rows * STEP_ROW_BYTES, plan.depth
    block_tiles, tiles = BLOCK_ROWS // TILE_ROWS, BLOCK_ROWS // TILE_ROWS // PRODUCERS
    step_bytes = cut.weights.step_bytes
    weight_bytes = tiles * depth * step_bytes
    steps, last_tile, x_rows, cluster = cut.steps, cut.tiles - 1, plan.rows, plan.cluster
    x_part = x_bytes // cluster

    @device_function
    def send_step(place: Any, source: Any, full: Any) -> None:
        """The rows of one step: all of them, or the block's half of them to both blocks of its cluster."""
        if cluster > 1:
            own = uint32(ptx_hopper.cluster_rank() * uint32(x_part))
            ptx_hopper.copy_bulk_to_pair(uint32(place + own), source + int64(own), uint32(x_part), full)
        else:
            ptx_hopper.copy_bulk(place, source, uint32(x_part), full)

    @device_function
    def sources_of(weight: Any, x: Any, x_tile: Any, block: Any, part: Any, lane: Any) -> Any:
        """Where a lane's tile and the rows begin, of step 0."""
        own = uint32(part * uint32(tiles) + lane)
        tile = min(uint32(block * uint32(block_tiles) + own), uint32(last_tile))
        row = uint32(x_tile * uint32(x_rows))
        return weight + int64(tile) * int64(steps * step_bytes), x + int64(row) * int64(STEP_ROW_BYTES)

    @device_function
    def send_weights(place: Any, full: Any, source: Any, step: Any, part: Any, lane: Any, policy: Any) -> None:
        if lane == uint32(0):
            whole = uint32(weight_bytes)
            if part == uint32(0):
                whole = uint32(weight_bytes + depth * x_bytes)
            ptx_hopper.barrier_expect(full, whole)
        ptx.sync_warp()
        if lane < uint32(tiles):
            own = uint32(part * uint32(tiles) + lane)
            target = uint32(place + uint32(depth * x_bytes) + own * uint32(depth * step_bytes))
            source = source + int64(step) * int64(step_bytes)
            ptx_hopper.copy_bulk_hinted(target, source, uint32(depth * step_bytes), full, policy)

    @device_function
    def send_rows(place: Any, full: Any, source: Any, rows: Any, step: Any, part: Any, lane: Any) -> None:
        if part == uint32(0) and lane == uint32(tiles):
            source = source + int64(step) * int64(rows) * int64(STEP_ROW_BYTES)
            send_step(place, source, full)
            if depth == 2:
                send_step(uint32(place + uint32(x_bytes)), source + int64(rows) * int64(STEP_ROW_BYTES), full)

    return sources_of, send_weights, send_rows


def make_produce(cut: Cut, plan: PrefillGemmPlan, pipeline: Pipeline) -> Any:
    """A function of the warps that copy: copy all steps of a block's units; wait for the kernel before meanwhile.

    Each warp has its part of a stage's weights, of which a lane each copies a tile; one lane of the first warp copies
    the rows of x. It takes the warp's number among them in `part`.
    """
    stages, stage_bytes, depth = plan.stages, plan.stage_bytes, plan.depth
    steps, length, apart = cut.steps, cut.length, plan.apart
    unit_of, await_free, after = make_unit_of(cut, plan), pipeline.await_free, pipeline.after
    sources_of, send_weights, send_rows = make_send(cut, plan)
    in_parts, span_of = cut.parts is not None, _make_span_of(cut)

    @device_function
    def produce(
        base: Any, barriers: Any, weight: Any, x: Any, rows: Any, x_tiles: Any, units: Any, unit: Any, grid: Any,
        part: Any, lane: Any, policy: Any,
    ) -> None:  # fmt: skip
        x_tile, block, segment = unit_of(unit, x_tiles)
        source, x_source = sources_of(weight, x, x_tile, block, part, lane)
        step = uint32(segment * uint32(length))
        end = min(uint32(step + uint32(length)), uint32(steps)) if apart else uint32(steps)
        if in_parts:
            step, end = span_of(segment)
        ahead = min(uint32(uint32(end - step) // uint32(depth)), uint32(stages))
        for number in range(stages):
            if uint32(number) < ahead:
                full = uint32(barriers + uint32(number * BARRIER_BYTES))
                here = uint32(base + uint32(number * stage_bytes))
                send_weights(here, full, source, uint32(step + uint32(number * depth)), part, lane, policy)
        ptx.wait_for_previous_kernel()
        for number in range(stages):
            if uint32(number) < ahead:
                full = uint32(barriers + uint32(number * BARRIER_BYTES))
                here = uint32(base + uint32(number * stage_bytes))
                send_rows(here, full, x_source, rows, uint32(step + uint32(number * depth)), part, lane)
        step, stage, parity = uint32(step + ahead * uint32(depth)), uint32(ahead), uint32(1)
        if stage == uint32(stages):
            stage, parity = uint32(0), uint32(0)
        while unit < units:
            while step < end:
                await_free(barriers, stage, parity)
                full = uint32(barriers + stage * uint32(BARRIER_BYTES))
                here = uint32(base + stage * uint32(stage_bytes))
                send_weights(here, full, source, step, part, lane, policy)
                send_rows(here, full, x_source, rows, step, part, lane)
                stage, parity = after(stage, parity)
                step = uint32(step + uint32(depth))
            unit = uint32(unit + grid)
            x_tile, block, segment = unit_of(unit, x_tiles)
            source, x_source = sources_of(weight, x, x_tile, block, part, lane)
            step = uint32(segment * uint32(length))
            end = min(uint32(step + uint32(length)), uint32(steps)) if apart else uint32(steps)
            if in_parts:
                step, end = span_of(segment)

    return produce


def _make_run(cut: Cut, plan: PrefillGemmPlan, pipeline: Pipeline) -> Any:
    """A device function of a warpgroup that computes the sums of several steps."""
    stage_bytes, depth, x_bytes = plan.stage_bytes, plan.depth, plan.rows * STEP_ROW_BYTES
    await_full, release, after = pipeline.await_full, pipeline.release, pipeline.after
    load = make_load_step(cut.weights, is_shared=True)
    multiply = ptx_hopper.multiply_group(plan.rows, by_codes=cut.weights.by_codes)
    step_bytes = cut.weights.step_bytes
    replace, await_sums = ptx_hopper.replace_words(16), ptx_hopper.await_group(plan.rows)

    @device_function
    def run(
        sums: Any, base: Any, barriers: Any, within: Any, stage: Any, parity: Any, number: Any, lane: Any, rows: Any
    ) -> Any:
        """So many steps, from zero; within: the warp's tile in a stage; rows: a number that is not zero.

        A step's weights are loaded while the tensor cores have the step before.
        """
        here, done = uint32(base + stage * uint32(stage_bytes)), uint32(0)
        await_full(barriers, stage, parity)
        words = load(uint32(here + within), lane)
        while done < number:
            sums = multiply(sums, words, here, done)
            if depth == 2:
                place = uint32(here + within + uint32(step_bytes))
                others = load(place, lane)
                sums = await_sums(sums, words)
                words = replace(words, others, rows)
                sums = multiply(sums, words, uint32(here + uint32(x_bytes)), uint32(1))
            later, later_parity = after(stage, parity)
            done, others = uint32(done + uint32(depth)), words
            if done < number:
                await_full(barriers, later, later_parity)
                here = uint32(base + later * uint32(stage_bytes))
                others = load(uint32(here + within), lane)
            sums = await_sums(sums, words)
            release(barriers, stage, lane)
            words = replace(words, others, rows)
            stage, parity = later, later_parity
        return sums, stage, parity

    return run


def make_consume(cut: Cut, plan: PrefillGemmPlan, pipeline: Pipeline, finish: Callable[..., Any]) -> Any:
    """A device function of a warpgroup that multiplies all steps of a block's units; `finish` gets each unit's sums."""
    steps, length, segments, apart = cut.steps, cut.length, cut.segments, plan.apart
    whole, unit_of = segments > 1 and not apart, make_unit_of(cut, plan)
    if plan.by_halves:
        run = make_run_by_halves(cut.weights, plan, pipeline)
    else:
        run = _make_run(cut, plan, pipeline)
    depth, x_bytes, step_bytes = plan.depth, plan.rows * STEP_ROW_BYTES, cut.weights.step_bytes
    add_segments, zeros = make_add_segments(steps, length, segments, plan, run), ptx.zeros(plan.sums)
    in_parts, span_of, has_empty = cut.parts is not None, _make_span_of(cut), cut.has_empty

    @device_function
    def consume(
        base: Any, barriers: Any, beside: Any, out: Any, rows: Any, x_tiles: Any, units: Any, unit: Any, grid: Any,
        warp: Any, lane: Any,
    ) -> None:  # fmt: skip
        group, quarter = uint32(warp >> uint32(2)), uint32(warp & uint32(3))
        first = uint32(group * uint32(GROUP_TILES) + quarter)  # of the block's tiles, the warp's own
        within = uint32(uint32(depth * x_bytes) + first * uint32(depth * step_bytes))
        sums, stage, parity = zeros(), uint32(0), uint32(0)
        ptx.wait_for_previous_kernel()
        while unit < units:  # a unit's place is found when it is wanted: next to totals no register is free
            if whole:
                sums, stage, parity = add_segments(sums, base, barriers, within, stage, parity, warp, lane, rows)
                x_tile, block, segment = unit_of(unit, x_tiles)
                finish(sums, beside, out, rows, x_tile, block, segment, first, lane)
            else:
                number = uint32(steps)
                x_tile, block, segment = unit_of(unit, x_tiles)
                if apart:
                    number = min(uint32(length), uint32(uint32(steps) - segment * uint32(length)))
                if in_parts:
                    begun, end = span_of(segment)
                    number = uint32(end - begun)
                if not has_empty or number > uint32(0):
                    sums, stage, parity = run(sums, base, barriers, within, stage, parity, number, lane, rows)
                    finish(sums, beside, out, rows, x_tile, block, segment, first, lane)
            unit = uint32(unit + grid)

    return consume


def make_finish(cut: Cut, plan: PrefillGemmPlan, with_bias: bool, with_columns: bool) -> Any:
    """A device function of a warp that stores a unit's sums.

    They are scaled and stored with the bias, in original columns; a segment's are stored as they are.
    """
    weight_rows, block_tiles = cut.weight_rows, BLOCK_ROWS // TILE_ROWS
    pitch, plain, x_rows, scaled = 4 * weight_rows, plan.apart, plan.rows, cut.weights.row_scales and not plan.apart
    load_numbers, store0, store1 = _make_stores(plan, pitch, is_scaled=scaled, by_codes=cut.weights.by_codes)

    @device_function
    def place_of(beside: Any, run: Any, row: Any) -> Any:
        """The scale, the bias and the original column of one of the eight rows of a run."""
        bias, columns, scales = beside[0], beside[1], beside[2]
        scale, extra, column = float32(1), float32(0), uint32(run * uint32(8))
        if scaled:
            scale = ptx.load_global_f32(scales + int64(uint32(column + row)) * int64(4))
        if not plain and with_bias:
            extra = ptx.load_global_bf16(bias + int64(uint32(column + row)) * int64(2))
        if not plain and with_columns:
            column = uint32(ptx.load_global_i32(columns + int64(run) * int64(4)))
        return scale, extra, int64(uint32(column + row)) * int64(4)

    @device_function
    def finish(
        sums: Any, beside: Any, out: Any, rows: Any, x_tile: Any, block: Any, segment: Any, first: Any, lane: Any
    ) -> None:
        """segment: of a unit whose sums are no totals."""
        corner = uint32(x_tile * uint32(x_rows) + uint32((lane & uint32(3)) * uint32(2)))
        target = out + (int64(segment) * int64(rows) + int64(corner)) * int64(pitch)
        run, row = uint32(uint32(block * uint32(block_tiles) + first) * uint32(2)), uint32(lane >> uint32(2))
        numbers = load_numbers(beside, corner)
        if uint32(run * uint32(8)) < uint32(weight_rows):
            scale, extra, at = place_of(beside, run, row)
            store0(target + at, scale, extra, sums, numbers)
        run = uint32(run + uint32(1))
        if uint32(run * uint32(8)) < uint32(weight_rows):
            scale, extra, at = place_of(beside, run, row)
            store1(target + at, scale, extra, sums, numbers)

    return finish


def _make_stores(plan: PrefillGemmPlan, pitch: int, *, is_scaled: bool, by_codes: bool) -> tuple[Any, Any, Any]:
    """Functions of a thread: the scales of its rows of x, where they are codes, and the stores of its two weight rows.

    The scales stand at the fourth of the addresses next to the product.
    """
    if is_scaled and by_codes:
        load = ptx_hopper.load_row_numbers(plan.rows)

        @device_function
        def load_scales(beside: Any, row: Any) -> Any:
            return load(beside[3] + int64(row) * int64(4))

        return load_scales, *(ptx_hopper.store_scaled_half(plan.rows, half, pitch) for half in (0, 1))
    plain = [ptx_hopper.store_group_half(plan.rows, half, pitch, is_scaled=is_scaled) for half in (0, 1)]

    @device_function
    def load_nothing(_beside: Any, _row: Any) -> Any:
        return None

    def make_store(store: Any) -> Any:
        @device_function
        def store_plainly(address: Any, scale: Any, extra: Any, sums: Any, _numbers: Any) -> None:
            store(address, scale, extra, sums)

        return store_plainly

    return load_nothing, make_store(plain[0]), make_store(plain[1])
