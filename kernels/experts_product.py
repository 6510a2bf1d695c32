"""The products of a mixture of experts: every expert that a step chose is read once for all pairs that chose it.

A persistent grid shares out the tiles of all units (an expert and up to eight of its pairs) in runs. A block walks its
run a tile at a time. Its warps share a tile's steps: each has a fixed run of them, whose inputs it holds while a unit
lasts, and feeds itself through its own pipeline of copies, which runs on across tiles and units; so no warp waits for
another. One more warp adds up their sums of a tile in order while they multiply the next ones. The order of
accumulation depends on the weight's shape alone, and a pair has the same bits whoever shares its expert, in whatever
column of a unit it stands.

An expert that more than eight pairs chose is several units. Their tiles are read at about the same time: the memory
delivers them once and the L2 the other times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowlat.kernels import ptx
from lowlat.kernels.experts_copy import make_fetch, make_load_inputs
from lowlat.kernels.experts_list import make_expert_of, make_list_units, make_members_of
from lowlat.kernels.experts_multiply import make_multiply
from lowlat.kernels.experts_plan import BARRIER_BYTES, DOWN, PAD, ExpertPlan, ExpertShape
from lowlat.kernels.kernel import Kernel
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["Ending", "make_product", "make_total"]

FREE = 8  # from the barrier of an area that is full to that of one that is free


@dataclass(frozen=True)
class Ending:
    """What becomes of a product, as device functions.

    width   values of a pair that a tile's end gives: 8 or 16
    begin   of a tile: load what its end needs, two uint32 that nothing waits for, for the lane of a pair's value
    finish  a pair's value of a tile
    clear   at a block's end: what dead pairs get
    """

    width: int
    begin: Any
    finish: Any
    clear: Any


def make_product(shape: ExpertShape, plan: ExpertPlan, ending: Ending) -> Kernel:
    """The kernel of a product, its name without what an ending closes over beside the shape and the plan."""
    quantised = "mxfp4" if shape.quantised else "bf16"
    name = (
        f"experts_{shape.kind}_{shape.rows}x{shape.columns}x{shape.ranks}_{quantised}_"
        f"{plan.columns}x{plan.capacity}x{plan.warps}x{plan.part}x{plan.stages}x{plan.blocks}"
        f"{'' if plan.patient else '_awake'}"
    )
    signature = (*(types.int64,) * 7, types.float32, types.float32)
    return Kernel(name, _kernel(shape, plan, ending), signature, plan.threads, plan.blocks, plan.shared_bytes(shape))


def _kernel(shape: ExpertShape, plan: ExpertPlan, ending: Ending) -> Callable[..., None]:
    tiles, warps, num_areas = shape.tiles, plan.warps, plan.stages
    sums_at = warps * plan.ring_bytes(shape)
    lists_at = sums_at + num_areas * plan.area_bytes
    barriers_at = lists_at + plan.list_bytes
    list_units, multiply, finish = (
        make_list_units(plan),
        _make_multiplying(shape, plan),
        _make_finishing(shape, plan, ending),
    )
    clear, ids_are_old = ending.clear, shape.kind == DOWN

    def experts_product(
        weight: Any, scales: Any, x: Any, ids: Any, bias: Any, out: Any, count: Any, limit: Any, alpha: Any
    ) -> None:
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread = uint32(cuda.threadIdx.x)
        lists, areas = uint32(base + uint32(lists_at)), uint32(base + uint32(sums_at))
        barriers = uint32(base + uint32(barriers_at))
        if thread == uint32(0):
            for area in range(num_areas):
                at = uint32(barriers + uint32(area * BARRIER_BYTES))
                ptx.barrier_init(at, uint32(warps))
                ptx.barrier_init(uint32(at + uint32(FREE)), uint32(1))
        if not ids_are_old:
            ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        units = list_units(lists, ids, count, thread)
        block, blocks = uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        total = uint32(units * uint32(tiles))
        each = uint32(total // blocks)
        longer = uint32(total - each * blocks)  # the first blocks take a tile more: they meet shorter runs' blocks
        first = uint32(block * each + min(block, longer))
        unit = uint32(first // uint32(tiles))
        left = uint32(each + (uint32(1) if block < longer else uint32(0)))
        run = unit, uint32(first - unit * uint32(tiles)), left
        if thread < uint32(warps * 32):
            multiply(base, areas, barriers, lists, weight, scales, x, run, thread)
        else:
            if ids_are_old:
                ptx.wait_for_previous_kernel()
            finish(areas, barriers, lists, bias, out, run, thread, limit, alpha)
        clear(lists, out, count, thread)

    return experts_product


def _make_wait(plan: ExpertPlan) -> Any:
    """A function of a warp: wait until the phase of a parity is over at a barrier."""
    is_over = ptx.barrier_is_over_soon if plan.patient else ptx.barrier_is_over

    @device_function
    def wait(barrier: Any, parity: Any) -> None:
        while is_over(barrier, parity) == uint32(0):
            pass
        ptx.sync_warp()

    return wait


@device_function
def _arrive(barrier: Any, lane: Any) -> None:
    """For all lanes of a warp, and what they did before."""
    ptx.sync_warp()
    if lane == uint32(0):
        ptx.barrier_arrive(barrier)


def _make_next_turn(plan: ExpertPlan) -> Any:
    """A function: the next of as many places as there are stages, and the parity of its phase."""
    places = plan.stages

    @device_function
    def next_turn(place: Any, parity: Any) -> Any:
        place = uint32(place + uint32(1))
        if place == uint32(places):
            place, parity = uint32(0), uint32(parity ^ uint32(1))
        return place, parity

    return next_turn


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


def _make_multiplying(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function of the warps that multiply: a warp's steps of all tiles of a run, their sums left to who finishes."""
    tiles, steps, part, own, stages = shape.tiles, shape.steps, plan.part, plan.steps_a_warp(shape), plan.stages
    ring_bytes, stage_bytes, words_bytes = plan.ring_bytes(shape), plan.stage_bytes(shape), part * shape.step_bytes
    sum_bytes, area_bytes, ids_are_old = plan.sum_bytes, plan.area_bytes, shape.kind == DOWN
    held = part == own  # inputs stay while a unit lasts
    (begin, fetch_next), next_turn, wait = _make_fetch_next(shape, plan), _make_next_turn(plan), _make_wait(plan)
    load_inputs, multiply, store_sums = (
        make_load_inputs(shape, plan),
        make_multiply(shape, plan),
        _make_store_sums(plan),
    )
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
                    stage, phase = next_turn(stage, phase)
                    done = uint32(done + uint32(part))
                full = uint32(barriers + area * uint32(BARRIER_BYTES))
                wait(uint32(full + uint32(FREE)), parity)
                store_sums(uint32(sums_at + area * uint32(area_bytes)), lane, sums)
                _arrive(full, lane)
                if not held:
                    area, parity = next_turn(area, parity)
                count = uint32(count - uint32(1))
            unit = uint32(unit + uint32(1))
        wait_for_all()

    return multiply_run


def _make_finishing(shape: ExpertShape, plan: ExpertPlan, ending: Ending) -> Any:
    """A function of the warp that finishes: add up the others' sums, and hand each pair's values to the ending."""
    tiles, width, columns, area_bytes = shape.tiles, ending.width, plan.columns, plan.area_bytes
    rounds, begin, finish = -(-columns * width // 32), ending.begin, ending.finish
    members_of, wait, next_turn = make_members_of(plan), _make_wait(plan), _make_next_turn(plan)

    @device_function
    def finish_run(
        areas: Any, barriers: Any, lists: Any, bias: Any, out: Any, run: Any, thread: Any, limit: Any, alpha: Any
    ) -> None:
        lane, area, parity = uint32(thread & uint32(31)), uint32(0), uint32(0)
        unit, inner, left = run
        while left > uint32(0):
            members, full = members_of(lists, unit), uint32(barriers + area * uint32(BARRIER_BYTES))
            for turn in range(rounds):
                index = uint32(lane + uint32(32 * turn))
                value, place = uint32(index % uint32(width)), uint32(index // uint32(width))
                first, second = uint32(0), uint32(0)
                if place < members:
                    first, second = begin(lists, bias, unit, inner, value)
                if turn == 0:
                    wait(full, parity)
                if place < members:
                    source = uint32(areas + area * uint32(area_bytes))
                    finish(lists, source, out, unit, inner, place, value, first, second, limit, alpha)
            _arrive(uint32(full + uint32(FREE)), lane)
            area, parity = next_turn(area, parity)
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
