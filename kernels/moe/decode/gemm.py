"""This module has the GEMMs of an MoE layer over few rows; each chosen expert is read once for all of its pairs.

A unit is an expert with up to eight of its pairs. A persistent grid divides the tiles of all units into runs, and a
block walks its run a tile at a time. The block's mainloop warps share a tile's steps. Each has a fixed run of steps,
and holds their inputs as long as the unit lasts. It fills its own pipeline of copies, which continues across tiles and
units, so no mainloop warp waits for another. A few epilogue warps add up the sums of a tile in order, while the others
multiply the next tiles. The order of accumulation depends on the weight's shape alone. A pair has the same bits
whichever pairs share its expert, and in any column of a unit. If K is summed in parts, each part belongs to one warp
and has its own outputs.

An expert with more than eight pairs is several units. Their tiles are read at about the same time, so that memory
delivers them once and the L2 again.
"""

from dataclasses import dataclass
from typing import Any

from lowlat.kernels.common.pipeline import Pipeline
from lowlat.kernels.gemm.k_parts import make_part_of_warp
from lowlat.kernels.moe.decode.copies import make_fetch, make_load_inputs
from lowlat.kernels.moe.decode.expert_list import make_expert_of, make_members_of
from lowlat.kernels.moe.decode.mainloop import make_multiply
from lowlat.kernels.moe.plan import PAD, ExpertPlan, ExpertShape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32

__all__ = [
    "Epilogue",
    "make_finishing",
    "make_multiplying",
    "make_prefetching",
    "make_total",
    "nothing_prefetched",
    "run_of",
]


@dataclass(frozen=True)
class Epilogue:
    """The epilogue of a GEMM, as device functions.

    begin   loads ahead the operands of a pair's value of a tile, as four uint32; it gets the addresses of biases and
            scales of rows, 0 if there are none
    finish  finishes and stores a pair's value of a tile
    clear   stores zeros for dead pairs; the epilogue's threads call it
    """

    begin: Any
    finish: Any
    clear: Any


@device_function
def run_of(units: Any, tiles: Any, block: Any, blocks: Any) -> Any:
    """Return a block's run of the tiles of all units: its first unit, the first tile in it, and the number of tiles."""
    total = uint32(units * uint32(tiles))
    each = uint32(total // blocks)
    longer = uint32(total - each * blocks)  # the first blocks have a tile more than the others
    first = uint32(block * each + min(block, longer))
    unit = uint32(first // uint32(tiles))
    left = uint32(each + (uint32(1) if block < longer else uint32(0)))
    return unit, uint32(first - unit * uint32(tiles)), left


def _make_steps_of(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A device function that returns a warp's first step of a tile, the step after its last, and its set of tiles."""
    steps, own, parts = shape.steps, plan.steps_a_warp(shape), shape.parts
    if parts is None:

        @device_function
        def in_runs(warp: Any) -> Any:
            return uint32(warp * uint32(own)), uint32(steps), uint32(0)

        return in_runs
    return make_part_of_warp(parts, steps)


def make_prefetching(shape: ExpertShape, plan: ExpertPlan) -> tuple[Any, Any, Any]:
    """Make three device functions of a warp.

    The first returns its lanes' sources, as `make_fetch` makes it. The second returns the position at which its copies
    begin in a run. The third prefetches the next part, if there is one.

    A position is: the number of the warp's first step of a tile, the tiles left of the unit, the unit, the tiles of the
    run after it, and the remaining steps of the tile.
    """
    tiles, steps, part, own = shape.tiles // plan.sets, shape.steps, plan.part, plan.steps_a_warp(shape)
    expert_of, (sources, fetch), held = make_expert_of(plan), make_fetch(shape, plan), part == own
    cut, apart, steps_of = shape.parts is not None, steps * plan.sets, _make_steps_of(shape, plan)

    @device_function
    def begin(lists: Any, run: Any, warp: Any) -> Any:
        unit, inner, left = run
        count, number = min(left, uint32(uint32(tiles) - inner)), uint32(0)
        if left > uint32(0):
            tile = uint32(expert_of(lists, unit) * uint32(tiles) + inner)
            number = uint32(tile * uint32(apart) + warp * uint32(own))
            if cut:
                first, _, place = steps_of(warp)
                number = uint32(tile * uint32(apart) + place * uint32(steps) + first)
        return number, count, unit, uint32(left - count), uint32(0)

    @device_function
    def prefetch(place: Any, lists: Any, source: Any, ahead: Any, warp: Any, lane: Any) -> Any:
        number, count, unit, left, done = ahead
        if count > uint32(0):
            rest = _left_of(uint32(warp * uint32(own)), done, steps, own)
            if cut:
                first, end, _ = steps_of(warp)
                rest = _left_of(first, done, end, own)
            fetch(place, source, uint32(number + done), rest, lane)
            if not held:
                done = uint32(done + uint32(part))
            if held or done >= uint32(own):
                number, count, done = uint32(number + uint32(apart)), uint32(count - uint32(1)), uint32(0)
                if count == uint32(0):
                    unit = ptx.varying(uint32(unit + uint32(1)))
                    number, count, unit, left, done = begin(lists, (unit, uint32(0), left), warp)
        return number, count, unit, left, done

    return sources, begin, prefetch


@device_function
def _left_of(first: Any, done: Any, steps: Any, own: Any) -> Any:
    """Return the steps that a warp has left of a tile: it has `own` steps from `first` on, or fewer at the end."""
    begin = uint32(first + done)
    there = uint32(uint32(steps) - begin) if begin < uint32(steps) else uint32(0)
    return min(there, uint32(uint32(own) - done))


@device_function
def nothing_prefetched(_place: Any, _lists: Any, _source: Any, ahead: Any, _warp: Any, _lane: Any) -> Any:
    """Prefetch nothing: after the last GEMM, or if the next GEMM fills its pipeline itself."""
    return ahead


def make_multiplying(
    shape: ExpertShape,
    plan: ExpertPlan,
    pipeline: Pipeline,
    stage_bytes: int,
    prefetch_behind: Any,
    *,
    awaited: bool = False,
) -> tuple[Any, Any]:
    """Make two device functions of mainloop warps: one fills a warp's pipeline, one multiplies its steps of a run.

    Sums are passed to the epilogue warps. When the run has no more parts to prefetch, parts of the next GEMM are
    prefetched instead, so that its first parts are ready when it begins. It begins with the stage after the last one of
    this GEMM.

    stage_bytes      bytes from a stage to the next
    prefetch_behind  the next GEMM's function from `make_prefetching`; or `nothing_prefetched`
    awaited          other blocks write the inputs during the launch, see `sentinels`
    """
    tiles, steps, part, stages = shape.tiles // plan.sets, shape.steps, plan.part, plan.stages
    own, cut, steps_of = plan.steps_a_warp(shape), shape.parts is not None, _make_steps_of(shape, plan)
    words_bytes, sum_bytes, area_bytes = part * shape.step_bytes, plan.sum_bytes, plan.area_bytes
    together, tile_bytes = plan.together, plan.tile_sum_bytes
    held, place_of = part == own, _make_place_of(stages * stage_bytes)  # held: inputs stay while a unit lasts
    next_part = _make_next_part(shape, plan, prefetch_behind)
    load_inputs, multiply = make_load_inputs(shape, plan, awaited=awaited), make_multiply(shape, plan)
    store_sums, await_free, give, after = _make_store_sums(plan), pipeline.await_free, pipeline.give, pipeline.after
    wait_for_copies = ptx.copies_wait(stages - 1)

    @device_function
    def fill(base: Any, lists: Any, sources: Any, ahead: Any, behind: Any, warp: Any, lane: Any) -> Any:
        mine = place_of(base, warp, lane)
        for stage in range(stages):
            place = uint32(mine + uint32(stage * stage_bytes))
            ahead, behind = next_part(place, lists, sources, ahead, behind, warp, lane)
        return ahead, behind

    @device_function
    def multiply_tile(
        mine: Any, to_scales: Any, lists: Any, sources: Any, x: Any, inputs: Any, unit: Any, first: Any, end: Any,
        ahead: Any, behind: Any, stage: Any, warp: Any, lane: Any,
    ) -> Any:  # fmt: skip
        zero, done = float32(0), uint32(0)
        sums = (zero, zero, zero, zero)
        while done < uint32(own):
            values = inputs
            if not held:
                values = load_inputs(lists, x, unit, uint32(first + done), lane)
            here = uint32(mine + stage * uint32(stage_bytes))
            wait_for_copies()
            ptx.sync_warp()
            rest = _left_of(first, done, end, own)
            sums = multiply(sums, here, uint32(here + to_scales), values, rest)
            ptx.sync_warp()
            ahead, behind = next_part(here, lists, sources, ahead, behind, warp, lane)
            stage = uint32(stage + uint32(1))
            if stage == uint32(stages):
                stage = uint32(0)
            done = uint32(done + uint32(part))
        return sums, ahead, behind, stage

    @device_function
    def multiply_run(
        base: Any, areas: Any, barriers: Any, lists: Any, sources: Any, x: Any, run: Any, ahead: Any, behind: Any,
        stage: Any, warp: Any, lane: Any,
    ) -> Any:  # fmt: skip
        none, mine, first, end = uint32(0), place_of(base, warp, lane), uint32(warp * uint32(own)), uint32(steps)
        if cut:
            first, end, _ = steps_of(warp)
        to_scales = uint32((lane >> uint32(2)) * uint32(4) + uint32(words_bytes) - lane * uint32(16))
        place = uint32((lane & uint32(3)) * uint32(2 * PAD * 4) + (lane >> uint32(2)) * uint32(4))
        sums_at = uint32(areas + warp * uint32(sum_bytes) + place)
        if together > 1:  # else the compiler would compute them again for each tile
            (words, scales, stage_scales), source_behind = sources
            sources = (ptx.kept_long(words), ptx.kept_long(scales), ptx.kept(stage_scales)), source_behind
            to_scales, sums_at = ptx.kept(to_scales), ptx.kept(sums_at)
        unit, inner, left = run
        area, parity = none, uint32(1)
        while left > none:
            count = min(left, uint32(uint32(tiles) - inner))
            left, inner = uint32(left - count), none
            inputs = none
            if held:
                inputs = load_inputs(lists, x, unit, first, lane)
            while count > none:
                sums, ahead, behind, stage = multiply_tile(
                    mine, to_scales, lists, sources, x, inputs, unit, first, end, ahead, behind, stage, warp, lane
                )
                await_free(barriers, area, parity)
                at = uint32(sums_at + area * uint32(area_bytes))
                store_sums(at, lane, sums)
                count = uint32(count - uint32(1))
                if together > 1 and count > none:
                    sums, ahead, behind, stage = multiply_tile(
                        mine, to_scales, lists, sources, x, inputs, unit, first, end, ahead, behind, stage, warp, lane
                    )
                    store_sums(uint32(at + uint32(tile_bytes)), lane, sums)
                    count = uint32(count - uint32(1))
                give(barriers, area, lane)
                area, parity = after(area, parity)
            unit = uint32(unit + uint32(1))
        return behind, stage

    return fill, multiply_run


def _make_place_of(ring_bytes: int) -> Any:
    """A device function that returns the address of a lane's bytes in a warp's first stage."""

    @device_function
    def place_of(base: Any, warp: Any, lane: Any) -> Any:
        return uint32(base + warp * uint32(ring_bytes) + lane * uint32(16))

    return place_of


def _make_next_part(shape: ExpertShape, plan: ExpertPlan, prefetch_behind: Any) -> Any:
    """A device function of a warp that prefetches the next part, or if none is left, the next one of the next GEMM."""
    _, _, prefetch = make_prefetching(shape, plan)

    @device_function
    def next_part(place: Any, lists: Any, sources: Any, ahead: Any, behind: Any, warp: Any, lane: Any) -> Any:
        source, source_behind = sources
        if ahead[1] > uint32(0):
            ahead = prefetch(place, lists, source, ahead, warp, lane)
        else:
            behind = prefetch_behind(place, lists, source_behind, behind, warp, lane)
        ptx.copies_commit()
        return ahead, behind

    return next_part


def make_finishing(
    shape: ExpertShape, plan: ExpertPlan, epilogue: Epilogue, pipeline: Pipeline, first_thread: int
) -> Any:
    """A device function of epilogue warps that adds up the mainloop's sums, and finishes each pair's values.

    An area has the sums of `together` tiles of a unit, or of only its last one.
    """
    sets, values, area_bytes, tile_bytes = plan.sets, shape.values, plan.area_bytes, plan.tile_sum_bytes
    tiles, set_bytes, together = shape.tiles // sets, plan.warps // sets * plan.sum_bytes, plan.together
    members_of, begin, finish = make_members_of(plan), epilogue.begin, epilogue.finish
    await_full, release, after = pipeline.await_full, pipeline.release, pipeline.after
    lanes = plan.finishing * 32
    rounds = -(-plan.columns * values // lanes)

    @device_function
    def begin_first(lists: Any, beside: Any, unit: Any, tile: Any, members: Any, index: Any) -> Any:
        """Load the operands of a thread's first value of a tile, before its sums are ready."""
        value, place = uint32(index % uint32(values)), uint32(index // uint32(values))
        held = (uint32(0), uint32(0), uint32(0), uint32(0))
        if place < members:
            held = begin(lists, beside, unit, tile, place, value)
        return held

    @device_function
    def finish_tile(
        lists: Any, source: Any, beside: Any, out: Any, unit: Any, inner: Any, members: Any, index: Any, held: Any,
        limit: Any, alpha: Any,
    ) -> None:  # fmt: skip
        for own in range(sets):
            tile, here = uint32(inner * uint32(sets) + uint32(own)), uint32(source + uint32(own * set_bytes))
            for turn in range(rounds):
                number = uint32(index + uint32(turn * lanes))
                value, place = uint32(number % uint32(values)), uint32(number // uint32(values))
                if place < members:
                    if own > 0 or turn > 0:
                        held = begin(lists, beside, unit, tile, place, value)
                    finish(lists, here, out, unit, tile, place, value, held, limit, alpha)

    @device_function
    def finish_run(
        areas: Any, barriers: Any, lists: Any, beside: Any, out: Any, run: Any, thread: Any, limit: Any, alpha: Any
    ) -> None:
        index = uint32(thread - uint32(first_thread))
        unit, inner, left = run
        area, parity = uint32(0), uint32(0)
        while left > uint32(0):
            members, source = members_of(lists, unit), uint32(areas + area * uint32(area_bytes))
            count = uint32(1)
            if together > 1:
                count = min(left, min(uint32(together), uint32(uint32(tiles) - inner)))
            first = begin_first(lists, beside, unit, uint32(inner * uint32(sets)), members, index)
            second = first
            if together > 1 and count > uint32(1):
                second = begin_first(lists, beside, unit, uint32((inner + uint32(1)) * uint32(sets)), members, index)
            await_full(barriers, area, parity)
            finish_tile(lists, source, beside, out, unit, inner, members, index, first, limit, alpha)
            if together > 1 and count > uint32(1):
                source, inner = uint32(source + uint32(tile_bytes)), uint32(inner + uint32(1))
                finish_tile(lists, source, beside, out, unit, inner, members, index, second, limit, alpha)
            release(barriers, area, uint32(index & uint32(31)))
            area, parity = after(area, parity)
            inner, left = uint32(inner + uint32(1)), uint32(left - count)
            if inner == uint32(tiles):
                inner, unit = uint32(0), uint32(unit + uint32(1))

    return finish_run


def _make_store_sums(plan: ExpertPlan) -> Any:
    """A device function that stores a lane's sums of a tile to [pair][16 rows], for columns that may have pairs."""
    columns = plan.columns

    @device_function
    def store_sums(place: Any, lane: Any, sums: Any) -> None:
        if (lane & uint32(3)) * uint32(2) < uint32(columns):
            ptx.store_shared_f32(place, sums[0])
            ptx.store_shared_f32(place + uint32(32), sums[2])
            if columns > 1:
                ptx.store_shared_f32(place + uint32(PAD * 4), sums[1])
                ptx.store_shared_f32(place + uint32(PAD * 4 + 32), sums[3])

    return store_sums


def make_total(plan: ExpertPlan) -> Any:
    """A device function that adds up the warps' sums of a pair's row of a tile, in order."""
    sum_bytes, warps = plan.sum_bytes, plan.warps

    @device_function
    def total_of(area: Any, place: Any, row: Any) -> Any:
        at = area + (place * uint32(PAD) + row) * uint32(4)
        total = ptx.load_shared_f32(at)
        for warp in range(1, warps):
            total = ptx.add_rn(total, ptx.load_shared_f32(at + uint32(warp * sum_bytes)))
        return total

    return total_of
