"""The products of a mixture of experts: every expert that a step chose is read once for all pairs that chose it.

A persistent grid shares out the tiles of all units (an expert and up to eight of its pairs) in runs. A block walks its
run a tile at a time. Its warps share a tile's steps: each has a fixed run of them, whose inputs it holds while a unit
lasts, and feeds itself through its own pipeline of copies, which runs on across tiles and units; so no warp waits for
another. A few more add up their sums of a tile in order while they multiply the next ones. The order of
accumulation depends on the weight's shape alone, and a pair has the same bits whoever shares its expert, in whatever
column of a unit it stands.

An expert that more than eight pairs chose is several units. Their tiles are read at about the same time: the memory
delivers them once and the L2 the other times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowlat.kernels import ptx
from lowlat.kernels.experts_choice import make_choose, make_publish
from lowlat.kernels.experts_copy import make_fetch, make_load_inputs
from lowlat.kernels.experts_list import make_expert_of, make_list_units, make_members_of
from lowlat.kernels.experts_multiply import make_multiply
from lowlat.kernels.experts_plan import DOWN, PAD, ExpertPlan, ExpertShape
from lowlat.kernels.handover import Handover, make_handover
from lowlat.kernels.kernel import Kernel
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["Ending", "make_product", "make_total"]


@dataclass(frozen=True)
class Ending:
    """What becomes of a product, as device functions.

    begin   of a tile: load what a pair's value needs at its end, two uint32 that nothing waits for
    finish  a pair's value of a tile
    clear   at a block's end: what dead pairs get
    """

    begin: Any
    finish: Any
    clear: Any


def make_product(shape: ExpertShape, plan: ExpertPlan, ending: Ending, num_experts: int) -> Kernel:
    """The kernel of a product, its name without what an ending closes over beside the shape and the plan.

    num_experts  of which every block chooses by logits; 0: ids and shares are given
    """
    quantised = "mxfp4" if shape.quantised else "bf16"
    name = (
        f"experts_{shape.kind}_{shape.rows}x{shape.columns}x{shape.ranks}_{quantised}_"
        f"{plan.columns}x{plan.capacity}x{plan.warps}x{plan.finishing}x{plan.part}x{plan.stages}"
        f"{'' if plan.patient else '_awake'}{f'_chosenE{num_experts}' if num_experts else ''}"
    )
    signature = (*(types.int64,) * 10, types.float32, types.float32)
    function, shared_bytes = _kernel(shape, plan, ending, num_experts), plan.shared_bytes(shape)
    return Kernel(name, function, signature, plan.threads, 1, shared_bytes, most_blocks=1)


@device_function
def _skip(_lists: Any, _first: Any, _second: Any, _count: Any, _thread: Any) -> None:
    return


def _kernel(shape: ExpertShape, plan: ExpertPlan, ending: Ending, num_experts: int) -> Callable[..., None]:
    tiles, warps = shape.tiles, plan.warps
    sums_at = warps * plan.ring_bytes(shape)
    lists_at = sums_at + plan.stages * plan.area_bytes
    barriers_at = lists_at + plan.list_bytes
    handover = make_handover(plan.stages, warps, plan.finishing, patient=plan.patient)
    multiply, finish = _make_multiplying(shape, plan, handover), _make_finishing(shape, plan, ending, handover)
    chosen_here, ids_are_old = num_experts > 0, shape.kind == DOWN
    choose = make_choose(plan, shape.ranks, num_experts) if chosen_here else _skip
    publish = make_publish(plan) if chosen_here and not ids_are_old else _skip
    list_units = make_list_units(plan, chosen_here=chosen_here)
    begin_handover, clear = handover.begin, ending.clear

    def experts_product(
        weight: Any, scales: Any, x: Any, logits: Any, row_live: Any, ids: Any, shares: Any, bias: Any, out: Any,
        count: Any, limit: Any, alpha: Any,
    ) -> None:  # fmt: skip
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread = uint32(cuda.threadIdx.x)
        lists, areas = uint32(base + uint32(lists_at)), uint32(base + uint32(sums_at))
        barriers = uint32(base + uint32(barriers_at))
        if thread == uint32(0):
            begin_handover(barriers)
        if not ids_are_old:
            ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        choose(lists, logits, row_live, count, thread)
        units = list_units(lists, ids, count, thread)
        block, blocks = uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        total = uint32(units * uint32(tiles))
        each = uint32(total // blocks)
        longer = uint32(total - each * blocks)  # blocks with a tile more than the others: the first
        first = uint32(block * each + min(block, longer))
        unit = uint32(first // uint32(tiles))
        left = uint32(each + (uint32(1) if block < longer else uint32(0)))
        run = unit, uint32(first - unit * uint32(tiles)), left
        if thread < uint32(warps * 32):
            multiply(base, areas, barriers, lists, weight, scales, x, run, thread)
        else:
            if ids_are_old:
                ptx.wait_for_previous_kernel()
            finish(areas, barriers, lists, (bias, shares), out, run, thread, limit, alpha)
        clear(lists, out, count, thread)
        publish(lists, ids, shares, count, thread)

    return experts_product


def _make_fetch_next(shape: ExpertShape, plan: ExpertPlan) -> tuple[Any, Any]:
    """Two functions of a warp: where its copies begin in a run, and let the next part travel, if there is one.

    Where copies are: the number of the warp's first step of a tile, tiles left of the unit, the unit, tiles of the run
    behind it, and the steps of the tile that are behind.
    """
    tiles, steps, part, own = shape.tiles, shape.steps, plan.part, plan.steps_a_warp(shape)
    expert_of, fetch, held = make_expert_of(plan), make_fetch(shape, plan), part == own

    @device_function
    def begin(lists: Any, run: Any, first: Any) -> Any:
        unit, inner, left = run
        count, number = min(left, uint32(uint32(tiles) - inner)), uint32(0)
        if left > uint32(0):
            number = uint32(uint32(expert_of(lists, unit) * uint32(tiles) + inner) * uint32(steps) + first)
        return number, count, unit, uint32(left - count), uint32(0)

    @device_function
    def fetch_next(place: Any, lists: Any, words: Any, scales: Any, ahead: Any, first: Any, lane: Any) -> Any:
        number, count, unit, left, done = ahead
        if count > uint32(0):
            fetch(place, words, scales, uint32(number + done), _left_of(first, done, steps, own), lane)
            if not held:
                done = uint32(done + uint32(part))
            if held or done >= uint32(own):
                number, count, done = uint32(number + uint32(steps)), uint32(count - uint32(1)), uint32(0)
                if count == uint32(0):
                    unit = uint32(unit + uint32(1))
                    number, count, unit, left, done = begin(lists, (unit, uint32(0), left), first)
        ptx.copies_commit()
        return number, count, unit, left, done

    return begin, fetch_next


@device_function
def _left_of(first: Any, done: Any, steps: Any, own: Any) -> Any:
    """Steps that a warp has left of a tile: it has `own` from `first` on, or those that there are."""
    begin = uint32(first + done)
    there = uint32(uint32(steps) - begin) if begin < uint32(steps) else uint32(0)
    return min(there, uint32(uint32(own) - done))


def _make_multiplying(shape: ExpertShape, plan: ExpertPlan, handover: Handover) -> Any:
    """A function of the warps that multiply: a warp's steps of all tiles of a run, their sums left to who finishes."""
    tiles, steps, part, own, stages = shape.tiles, shape.steps, plan.part, plan.steps_a_warp(shape), plan.stages
    ring_bytes, stage_bytes, words_bytes = plan.ring_bytes(shape), plan.stage_bytes(shape), part * shape.step_bytes
    sum_bytes, area_bytes, ids_are_old = plan.sum_bytes, plan.area_bytes, shape.kind == DOWN
    held = part == own  # inputs stay while a unit lasts
    (begin, fetch_next), after = _make_fetch_next(shape, plan), handover.after
    load_inputs, multiply = make_load_inputs(shape, plan), make_multiply(shape, plan)
    store_sums, await_free, give = _make_store_sums(plan), handover.await_free, handover.give
    wait_for_copies, wait_for_all = ptx.copies_wait(stages - 1), ptx.copies_wait(0)

    @device_function
    def multiply_run(
        base: Any, areas: Any, barriers: Any, lists: Any, weight: Any, scales: Any, x: Any, run: Any, thread: Any
    ) -> None:
        lane, warp, none = uint32(thread & uint32(31)), uint32(thread >> uint32(5)), uint32(0)
        first, along = uint32(warp * uint32(own)), uint32(lane * uint32(16))
        mine = uint32(base + warp * uint32(ring_bytes) + along)
        words, powers = weight + int64(along), scales + int64(along)
        to_scales = uint32((lane >> uint32(2)) * uint32(4) + uint32(words_bytes) - along)
        ahead = begin(lists, run, first)
        for stage in range(stages):
            place = uint32(mine + uint32(stage * stage_bytes))
            ahead = fetch_next(place, lists, words, powers, ahead, first, lane)
        if ids_are_old:
            ptx.wait_for_previous_kernel()
        place = uint32((lane & uint32(3)) * uint32(2 * PAD * 4) + (lane >> uint32(2)) * uint32(4))
        sums_at = uint32(areas + warp * uint32(sum_bytes) + place)
        unit, inner, left = run
        stage, phase, area, parity = none, uint32(1), none, uint32(1)
        while left > none:
            count = min(left, uint32(uint32(tiles) - inner))
            left, inner = uint32(left - count), none
            if held:
                inputs = load_inputs(lists, x, unit, first, lane)
            while count > none:
                zero, done = float32(0), none
                sums = (zero, zero, zero, zero)
                while done < uint32(own):
                    if not held:
                        inputs = load_inputs(lists, x, unit, uint32(first + done), lane)
                    here = uint32(mine + stage * uint32(stage_bytes))
                    wait_for_copies()
                    ptx.sync_warp()
                    rest = _left_of(first, done, steps, own)
                    sums = multiply(sums, here, uint32(here + to_scales), inputs, rest)
                    ptx.sync_warp()
                    ahead = fetch_next(here, lists, words, powers, ahead, first, lane)
                    if held:
                        area, parity = stage, phase
                    stage, phase = after(stage, phase)
                    done = uint32(done + uint32(part))
                await_free(barriers, area, parity)
                store_sums(uint32(sums_at + area * uint32(area_bytes)), lane, sums)
                give(barriers, area, lane)
                if not held:
                    area, parity = after(area, parity)
                count = uint32(count - uint32(1))
            unit = uint32(unit + uint32(1))
        wait_for_all()

    return multiply_run


def _make_finishing(shape: ExpertShape, plan: ExpertPlan, ending: Ending, handover: Handover) -> Any:
    """A function of the warps that finish: add up the others' sums, and hand each pair's values to the ending."""
    tiles, values, warps, area_bytes = shape.tiles, shape.values, plan.warps, plan.area_bytes
    members_of, begin, finish = make_members_of(plan), ending.begin, ending.finish
    await_full, release, after = handover.await_full, handover.release, handover.after
    lanes = plan.finishing * 32
    rounds = -(-plan.columns * values // lanes)

    @device_function
    def finish_run(
        areas: Any, barriers: Any, lists: Any, beside: Any, out: Any, run: Any, thread: Any, limit: Any, alpha: Any
    ) -> None:
        index = uint32(thread - uint32(warps * 32))
        unit, inner, left = run
        area, parity = uint32(0), uint32(0)
        while left > uint32(0):
            members, source = members_of(lists, unit), uint32(areas + area * uint32(area_bytes))
            for turn in range(rounds):
                number = uint32(index + uint32(turn * lanes))
                value, place = uint32(number % uint32(values)), uint32(number // uint32(values))
                first, second = uint32(0), uint32(0)
                if place < members:
                    first, second = begin(lists, beside, unit, inner, place, value)
                if turn == 0:
                    await_full(barriers, area, parity)
                if place < members:
                    finish(lists, source, out, unit, inner, place, value, first, second, limit, alpha)
            release(barriers, area, uint32(index & uint32(31)))
            area, parity = after(area, parity)
            inner, left = uint32(inner + uint32(1)), uint32(left - uint32(1))
            if inner == uint32(tiles):
                inner, unit = uint32(0), uint32(unit + uint32(1))

    return finish_run


def _make_store_sums(plan: ExpertPlan) -> Any:
    """A function: a lane's sums of a tile to their places, [pair][16 rows], of the columns that pairs may have."""
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
    """A function: the warps' sums of a pair's row of a tile, added in order."""
    sum_bytes, warps = plan.sum_bytes, plan.warps

    @device_function
    def total_of(area: Any, place: Any, row: Any) -> Any:
        at = area + (place * uint32(PAD) + row) * uint32(4)
        total = ptx.load_shared_f32(at)
        for warp in range(1, warps):
            total = ptx.add_rn(total, ptx.load_shared_f32(at + uint32(warp * sum_bytes)))
        return total

    return total_of
