"""The main loop of a grouped GEMM by warpgroups: all warps multiply, and copy what they multiply next.

A warp copies and decodes a tile of weights of its own; the first warp copies the rows of pairs for all. Copies run on
across the tiles of a block. A tile's pairs are multiplied by an instruction for about as many, so each size has a loop.

Warpgroups take turns: products of weights in registers keep their warps from going on until the last has begun, so one
multiplies while the others decode. Without turns all multiply together and then decode together (H200: a step took
660 cycles more than its products).
"""

from collections.abc import Callable
from typing import Any

from lowlat.kernels.common.handover import BARRIER_BYTES, Handover
from lowlat.kernels.gemm.prefill.plan import STEP_ROW_BYTES
from lowlat.kernels.moe.plan import ExpertShape
from lowlat.kernels.moe.prefill.pair_arrangement import start_of
from lowlat.kernels.moe.prefill.warpgroup_plan import GROUPS, MOST_PAIRS, SIZES, WARPS, WarpgroupPlan
from lowlat.kernels.toolchain import ptx, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import device_function, int64, uint32

__all__ = ["make_multiply", "make_tile_of"]

SUMS = MOST_PAIRS // 2  # a thread


@device_function
def _turn_of(warp: Any) -> Any:
    """The barrier of a warp's warpgroup, of those in a ring; made anew each time, as no register is free for it."""
    group = uint32(ptx.varying(warp) >> uint32(2))
    return uint32(1) if group == uint32(GROUPS) else uint32(group + uint32(1))


def make_tile_of(shape: ExpertShape, plan: WarpgroupPlan) -> Any:
    """A function of a unit: its block of weight rows, its expert, its first pair and how many; none past the last."""
    row_blocks = plan.row_blocks(shape)

    @device_function
    def tile_of(tiles: Any, num_tiles: Any, unit: Any) -> Any:
        tile = uint32(unit // uint32(row_blocks))
        expert, first, live = uint32(0), uint32(0), uint32(0)
        if tile < num_tiles:
            expert, first, live, _ = ptx.load_global_128(tiles + int64(tile) * int64(16))
        return uint32(unit - tile * uint32(row_blocks)), expert, first, live

    return tile_of


def _make_copies(shape: ExpertShape, plan: WarpgroupPlan, handover: Handover) -> Any:
    """Functions of a warp: where a unit's copies begin; and the copy of the next step, whatever unit it is of.

    What is copied next is a tuple: the unit, the step, the stage and the parity of its phase, where the lane's words
    and scales and the block's rows begin, and a step's bytes of rows, 0 past the last unit.
    """
    tiles, steps, stage_bytes = shape.tiles, shape.steps, plan.stage_bytes
    word_bytes, scale_bytes = shape.step_bytes, shape.scale_bytes
    tile_of, await_free, after = make_tile_of(shape, plan), handover.await_free, handover.after
    pieces, scale_lanes = word_bytes // 512, scale_bytes // 16

    @device_function
    def begin_unit(given: Any, unit: Any, warp: Any, lane: Any) -> Any:
        weight, scales, x, list_, num_tiles, _, _ = given
        row_block, expert, first, live = tile_of(list_, num_tiles, unit)
        own = min(uint32(row_block * uint32(WARPS) + warp), uint32(tiles - 1))
        tile, along = int64(uint32(expert * uint32(tiles) + own)), int64(uint32(lane * uint32(16)))
        words = ptx.varying_long(weight + tile * int64(steps * word_bytes) + along)
        powers = ptx.varying_long(scales + tile * int64(steps * scale_bytes) + along)
        source = x + int64(start_of(expert, first)) * int64(STEP_ROW_BYTES)
        rows = uint32(uint32(live + uint32(7)) & uint32(0xFFFFFFF8))
        return words, powers, source, uint32(rows * uint32(STEP_ROW_BYTES))

    @device_function
    def send_weights(place: Any, words: Any, powers: Any, step: Any, lane: Any) -> None:
        at = int64(step) * int64(word_bytes)
        for part in range(pieces):
            ptx.copy_async_16(uint32(place + uint32(part * 512)), words + at + int64(part * 512))
        if lane < uint32(scale_lanes):
            ptx.copy_async_16(uint32(place + uint32(word_bytes)), powers + int64(step) * int64(scale_bytes))

    @device_function
    def send_next(place: Any, given: Any, following: Any, own_slot: Any, warp: Any, lane: Any) -> Any:
        """own_slot: where in a stage the warp's weights go."""
        base, barriers = place
        unit, step, stage, parity, words, powers, source, count = following
        if count > uint32(0):
            here = uint32(base + stage * uint32(stage_bytes))
            if warp == uint32(0):
                await_free(barriers, stage, parity)
                if lane == uint32(0):
                    full = uint32(barriers + stage * uint32(BARRIER_BYTES))
                    ptx_hopper.barrier_expect(full, count)
                    ptx_hopper.copy_bulk(here, source + int64(step) * given[5], count, full)
            send_weights(uint32(here + own_slot + lane * uint32(16)), words, powers, step, lane)
            stage, parity = after(stage, parity)
            step = uint32(step + uint32(1))
            if step == uint32(steps):
                unit, step = uint32(unit + given[6]), uint32(0)
                words, powers, source, count = begin_unit(given, unit, warp, lane)
        ptx.copies_commit()
        return unit, step, stage, parity, words, powers, source, count

    return begin_unit, send_next


def _make_run(shape: ExpertShape, plan: WarpgroupPlan, handover: Handover, send_next: Any, pairs: int) -> Any:
    """A function of a warpgroup: the sums of a unit of up to so many pairs.

    A step's weights are decoded, and a step's copies begun, while the tensor cores have the step before.
    """
    stage_bytes, steps = plan.stage_bytes, shape.steps
    await_full, release, after = handover.await_full, handover.release, handover.after
    load, multiply = shape.format.prefill_step(), ptx_hopper.multiply_group(pairs, SUMS)
    replace, await_sums = ptx_hopper.replace_words(16), ptx_hopper.await_group(pairs, SUMS)
    wait_for_copies = ptx.copies_wait(plan.ahead - 1)

    @device_function
    def run(sums: Any, place: Any, given: Any, own: Any, now: Any, following: Any, warp: Any, lane: Any) -> Any:
        """own: where in a stage the warp's weights are; now: the stage and its phase's parity."""
        base, barriers = place
        stage, parity = now
        here, done = uint32(base + stage * uint32(stage_bytes)), uint32(0)
        wait_for_copies()
        await_full(barriers, stage, parity)
        words = load(uint32(here + own), lane)
        while done < uint32(steps):
            ptx_hopper.await_turn(_turn_of(warp))
            sums = multiply(sums, words, here, done)
            ptx_hopper.give_turn(_turn_of(uint32(warp + uint32(4))))
            following = send_next(place, given, following, own, warp, lane)
            later, later_parity = after(stage, parity)
            done, others = uint32(done + uint32(1)), words
            if done < uint32(steps):
                wait_for_copies()
                await_full(barriers, later, later_parity)  # behind which a warp's lanes see each other's copies
                here = uint32(base + later * uint32(stage_bytes))
                others = load(uint32(here + own), lane)
            sums = await_sums(sums, words)
            release(barriers, stage, lane)
            words = replace(words, others, uint32(1))
            stage, parity = later, later_parity
        return sums, (stage, parity), following

    return run


def _make_run_of(shape: ExpertShape, plan: WarpgroupPlan, handover: Handover, send_next: Any, number: int) -> Any:
    """A function of a warpgroup: the sums of a unit, by the first size from this one on that holds its pairs."""
    pairs = SIZES[number]
    run = _make_run(shape, plan, handover, send_next, pairs)
    if number == len(SIZES) - 1:

        @device_function
        def run_last(
            sums: Any, place: Any, given: Any, own: Any, now: Any, following: Any, live: Any, warp: Any, lane: Any
        ) -> Any:
            return run(sums, place, given, own, now, following, warp, lane)

        return run_last
    run_larger = _make_run_of(shape, plan, handover, send_next, number + 1)

    @device_function
    def run_of(
        sums: Any, place: Any, given: Any, own: Any, now: Any, following: Any, live: Any, warp: Any, lane: Any
    ) -> Any:
        if live <= uint32(pairs):
            sums, now, following = run(sums, place, given, own, now, following, warp, lane)
        else:
            sums, now, following = run_larger(sums, place, given, own, now, following, live, warp, lane)
        return sums, now, following

    return run_of


def make_multiply(shape: ExpertShape, plan: WarpgroupPlan, handover: Handover, finish: Callable[..., Any]) -> Any:
    """A function of a warp: copy and multiply all steps of a block's units, and hand each unit's sums to `finish`.

    given: weights, scales, rows of pairs, tiles, how many of these, bytes of a step of all rows, and blocks.
    """
    begin_unit, send_next = _make_copies(shape, plan, handover)
    pair_bytes, slot_bytes = plan.pair_bytes, plan.step_bytes
    tile_of, zeros, ahead = make_tile_of(shape, plan), ptx.zeros(SUMS), plan.ahead
    run_of = _make_run_of(shape, plan, handover, send_next, 0)

    @device_function
    def multiply_all(place: Any, given: Any, beside: Any, out: Any, unit: Any, warp: Any, lane: Any) -> None:
        own = ptx.varying(uint32(uint32(pair_bytes) + warp * uint32(slot_bytes)))
        if warp >= uint32(WARPS - 4):
            ptx_hopper.give_turn(uint32(1))
        begun = begin_unit(given, unit, warp, lane)
        following = (unit, uint32(0), uint32(0), uint32(1), begun[0], begun[1], begun[2], begun[3])
        for _ in range(ahead):
            following = send_next(place, given, following, own, warp, lane)
        sums, now = zeros(), (uint32(0), uint32(0))
        row_block, expert, first, live = tile_of(given[3], given[4], unit)
        while live > uint32(0):
            sums, now, following = run_of(sums, place, given, own, now, following, live, warp, lane)
            tile = uint32(row_block * uint32(WARPS) + warp)
            finish(sums, beside, out, expert, tile, start_of(expert, first), live, lane)
            unit = uint32(unit + given[6])
            row_block, expert, first, live = tile_of(given[3], given[4], unit)

    return multiply_all
