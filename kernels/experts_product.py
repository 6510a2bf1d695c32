"""The products of a mixture of experts: every expert that a step chose is read once for all pairs that chose it.

A persistent grid shares out the tiles of all units (an expert and up to eight of its pairs) in runs of equal length. A
block walks its run one or two tiles at a time, by three kinds of warps. One fetches: stage after stage of weights, on
across tiles and units. Many multiply: they share a tile's k steps in turn, with a unit's inputs in shared memory. One
finishes: it adds the others' sums of a tile in order while they multiply the next one. They wait for each other only by
what a stage or an area of sums holds. The order of accumulation depends on the weight's shape alone, and a pair has the
same bits whoever shares its expert, in whatever column of a unit it stands.

An expert that more than eight pairs chose is several units. Their tiles are read at about the same time: the memory
delivers them once and the L2 the other times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowlat.kernels import ptx
from lowlat.kernels.experts_copy import make_fetch, make_load_inputs
from lowlat.kernels.experts_list import make_expert_of, make_list_units, make_members_of
from lowlat.kernels.experts_multiply import make_load, make_multiply
from lowlat.kernels.experts_plan import AREAS, BARRIER_BYTES, DOWN, PAD, SCALE_BYTES, ExpertPlan, ExpertShape
from lowlat.kernels.kernel import Kernel
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["Ending", "make_product", "make_total"]

FREE = 8  # from the barrier of what is there to that of what is free
MULTIPLYING = 1  # the barrier of the warps that multiply


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
        f"{plan.columns}x{plan.capacity}x{plan.warps}x{plan.tiles}x{plan.stages}x{plan.blocks}"
        f"{'' if plan.bulk else '_by_lanes'}"
    )
    signature = (*(types.int64,) * 7, types.float32, types.float32)
    return Kernel(name, _kernel(shape, plan, ending), signature, plan.threads, plan.blocks, plan.shared_bytes(shape))


def _kernel(shape: ExpertShape, plan: ExpertPlan, ending: Ending) -> Callable[..., None]:
    tiles, warps = shape.tiles, plan.warps
    inputs_at = plan.stages * plan.stage_bytes(shape)
    sums_at = inputs_at + plan.input_bytes(shape)
    lists_at = sums_at + AREAS * plan.area_bytes
    barriers_at = lists_at + plan.list_bytes
    list_units, begin_barriers = make_list_units(plan), _make_begin_barriers(plan)
    fetch, multiply, finish = (
        _make_fetching(shape, plan),
        _make_multiplying(shape, plan),
        _make_finishing(shape, plan, ending),
    )
    clear, ids_are_old = ending.clear, shape.kind == DOWN

    def experts_product(
        weight: Any, scales: Any, x: Any, ids: Any, bias: Any, out: Any, count: Any, limit: Any, alpha: Any
    ) -> None:
        base = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        thread = uint32(cuda.threadIdx.x)
        warp, lists = uint32(thread >> uint32(5)), uint32(base + uint32(lists_at))
        barriers = uint32(base + uint32(barriers_at))
        if thread == uint32(0):
            begin_barriers(barriers)
        if not ids_are_old:
            ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        units = list_units(lists, ids, count, thread)
        block, blocks = uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        first = uint32(uint32(block * uint32(units * uint32(tiles))) // blocks)
        last = uint32(uint32(uint32(block + uint32(1)) * uint32(units * uint32(tiles))) // blocks)
        unit = uint32(first // uint32(tiles))
        run = unit, uint32(first - unit * uint32(tiles)), uint32(last - first)
        if warp == uint32(warps):
            fetch(base, barriers, lists, weight, scales, run, thread)
        if ids_are_old:
            ptx.wait_for_previous_kernel()
        if warp < uint32(warps):
            multiply(base, barriers, lists, x, run, thread)
        elif warp > uint32(warps):
            finish(uint32(base + uint32(sums_at)), barriers, lists, bias, out, run, thread, limit, alpha)
        clear(lists, out, count, thread)

    return experts_product


def _make_begin_barriers(plan: ExpertPlan) -> Any:
    """A function of one thread: all barriers, of the stages and then of the areas of sums."""
    stages, warps, bulk, fetching = plan.stages, plan.warps, plan.bulk, 1 if plan.bulk else 32

    @device_function
    def begin_barriers(barriers: Any) -> None:
        for stage in range(stages):
            at = uint32(barriers + uint32(stage * BARRIER_BYTES))
            ptx.barrier_init(at, uint32(fetching))
            ptx.barrier_init(uint32(at + uint32(FREE)), uint32(warps))
        for area in range(AREAS):
            at = uint32(barriers + uint32((stages + area) * BARRIER_BYTES))
            ptx.barrier_init(at, uint32(warps))
            ptx.barrier_init(uint32(at + uint32(FREE)), uint32(1))
        if bulk:
            ptx.fence_bulk()

    return begin_barriers


def _make_wait(plan: ExpertPlan) -> Any:
    """A function of a warp: wait until the phase of a parity is over at a barrier."""
    is_over = ptx.barrier_is_over_soon if plan.bulk else ptx.barrier_is_over

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


def _make_next(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """Two functions of the place in a run (unit, tile in it, tiles left): how many tiles are walked there, of one unit;
    and the place after them."""
    tiles, pairs = shape.tiles, plan.tiles == 2

    @device_function
    def together_at(run: Any) -> Any:
        _, inner, left = run
        if pairs and left > uint32(1) and inner < uint32(tiles - 1):
            return uint32(2)
        return uint32(1)

    @device_function
    def after(run: Any, together: Any) -> Any:
        unit, inner, left = run
        inner, left = uint32(inner + together), uint32(left - together)
        if inner == uint32(tiles):
            inner, unit = uint32(0), uint32(unit + uint32(1))
        return unit, inner, left

    return together_at, after


def _make_fetching(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function of the warp that fetches: all stages of a run, each as soon as its place is free."""
    tiles, steps, warps, stages, stage_bytes = (
        shape.tiles,
        shape.steps,
        plan.warps,
        plan.stages,
        plan.stage_bytes(shape),
    )
    expert_of, fetch, wait, (together_at, after) = (
        make_expert_of(plan), make_fetch(shape, plan), _make_wait(plan), _make_next(shape, plan),
    )  # fmt: skip

    @device_function
    def fetch_run(base: Any, barriers: Any, lists: Any, weight: Any, scales: Any, run: Any, thread: Any) -> None:
        lane, stage, parity = uint32(thread & uint32(31)), uint32(0), uint32(1)
        while run[2] > uint32(0):
            together = together_at(run)
            expert = int64(expert_of(lists, run[0]))
            number = (expert * int64(tiles) + int64(run[1])) * int64(steps)
            done = uint32(0)
            while done < uint32(steps):
                count = uint32(min(uint32(warps), uint32(uint32(steps) - done)))
                barrier = uint32(barriers + stage * uint32(BARRIER_BYTES))
                wait(uint32(barrier + uint32(FREE)), parity)
                place = uint32(base + stage * uint32(stage_bytes))
                fetch(place, barrier, weight, scales, number + int64(done), count, together, lane)
                done, stage = uint32(done + uint32(warps)), uint32(stage + uint32(1))
                if stage == uint32(stages):
                    stage, parity = uint32(0), uint32(parity ^ uint32(1))
            run = after(run, together)

    return fetch_run


def _make_multiplying(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function of the warps that multiply: a warp's steps of all tiles of a run, their sums left to who finishes."""
    steps, warps, columns, stages, both = shape.steps, plan.warps, plan.columns, plan.stages, plan.tiles == 2
    stage_ratio, area_bytes = plan.stage_bytes(shape) // BARRIER_BYTES, plan.area_bytes
    turns, turn_bytes, input_bytes = -(-steps // warps), warps * columns * 128, plan.input_bytes(shape)
    inputs_at = stages * plan.stage_bytes(shape)
    sums_at, tile_sums = inputs_at + input_bytes, plan.warps * plan.sum_bytes
    tile_bytes, scales_at = plan.warps * shape.step_bytes, plan.tiles * plan.warps * shape.step_bytes
    step_bytes, sum_bytes, even, all_of_them = shape.step_bytes, plan.sum_bytes, steps % warps == 0, plan.warps * 32
    ring_end = area_barriers = stages * BARRIER_BYTES
    load_inputs, load, multiply = make_load_inputs(shape, plan), make_load(plan), make_multiply(shape)
    wait, (together_at, after), store_sums = _make_wait(plan), _make_next(shape, plan), _make_store_sums(plan)
    sync = ptx.sync_threads(MULTIPLYING, all_of_them)
    other_tile = tile_bytes if both else 0
    other_scales = warps * SCALE_BYTES if both else 0

    @device_function
    def multiply_run(base: Any, barriers: Any, lists: Any, x: Any, run: Any, thread: Any) -> None:
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        inputs = uint32(base + uint32(inputs_at))
        mine_inputs = uint32(inputs + warp * uint32(columns * 128) + (lane & uint32(3)) * uint32(16))
        mine_inputs = uint32(mine_inputs + ((lane >> uint32(2)) % uint32(columns)) * uint32(64))
        inputs_end, no_more = uint32(mine_inputs + uint32(turns * turn_bytes)), uint32(inputs + uint32(input_bytes))
        mine = uint32(base + warp * uint32(step_bytes) + lane * uint32(16))
        mine_scales = uint32(base + uint32(scales_at) + warp * uint32(SCALE_BYTES) + (lane >> uint32(2)) * uint32(4))
        to_scales = uint32(mine_scales - mine)
        to_mine = uint32(mine - barriers * uint32(stage_ratio))  # from a barrier, so many times, to its stage
        place = uint32((lane & uint32(3)) * uint32(2 * PAD * 4) + (lane >> uint32(2)) * uint32(4))
        sums = uint32(base + uint32(sums_at) + warp * uint32(sum_bytes) + place)
        barrier, parity = barriers, uint32(0)
        area, area_parity, fresh = uint32(0), uint32(1), True
        while run[2] > uint32(0):
            if fresh:
                sync()
                load_inputs(lists, inputs, x, run[0], thread)
                sync()
            zero, at = float32(0), mine_inputs
            top, low = (zero, zero, zero, zero), (zero, zero, zero, zero)
            while at != inputs_end:
                wait(barrier, parity)
                if even or at < no_more:
                    here, values = uint32(to_mine + barrier * uint32(stage_ratio)), load(at)
                    scales = uint32(here + to_scales)
                    top = multiply(top, here, scales, values)
                    if both:  # nothing's sums where a tile is walked alone: nobody adds them up
                        other, others = uint32(here + uint32(other_tile)), uint32(scales + uint32(other_scales))
                        low = multiply(low, other, others, values)
                _arrive(uint32(barrier + uint32(FREE)), lane)
                at = uint32(at + uint32(turn_bytes))
                barrier = uint32(barrier + uint32(BARRIER_BYTES))
                if barrier == uint32(barriers + uint32(ring_end)):
                    barrier, parity = barriers, uint32(parity ^ uint32(1))
            ready = uint32(barriers + uint32(area_barriers) + area * uint32(BARRIER_BYTES))
            wait(uint32(ready + uint32(FREE)), area_parity)
            mine_sums = uint32(sums + area * uint32(area_bytes))
            store_sums(mine_sums, lane, top)
            if both:
                store_sums(uint32(mine_sums + uint32(tile_sums)), lane, low)
            _arrive(ready, lane)
            area_parity, area = uint32(area_parity ^ area), uint32(area ^ uint32(1))
            run = after(run, together_at(run))
            fresh = run[1] == uint32(0)

    return multiply_run


def _make_finishing(shape: ExpertShape, plan: ExpertPlan, ending: Ending) -> Any:
    """A function of the warp that finishes: add up the others' sums, and hand each pair's values to the ending."""
    stages, width, columns, area_bytes = plan.stages, ending.width, plan.columns, plan.area_bytes
    tile_sums, values = plan.warps * plan.sum_bytes, plan.tiles * plan.columns * ending.width
    rounds, area_barriers = -(-values // 32), stages * BARRIER_BYTES
    members_of, wait, (together_at, after) = make_members_of(plan), _make_wait(plan), _make_next(shape, plan)
    begin, finish = ending.begin, ending.finish

    @device_function
    def finish_run(
        sums: Any, barriers: Any, lists: Any, bias: Any, out: Any, run: Any, thread: Any, limit: Any, alpha: Any
    ) -> None:
        lane, area, parity = uint32(thread & uint32(31)), uint32(0), uint32(0)
        while run[2] > uint32(0):
            together, members = together_at(run), members_of(lists, run[0])
            ready = uint32(barriers + uint32(area_barriers) + area * uint32(BARRIER_BYTES))
            for turn in range(rounds):
                index = uint32(lane + uint32(32 * turn))
                value, rest = uint32(index % uint32(width)), uint32(index // uint32(width))
                place, tile = uint32(rest % uint32(columns)), uint32(rest // uint32(columns))
                first, second = uint32(0), uint32(0)
                inner, wanted = uint32(run[1] + tile), place < members and tile < together
                if wanted:
                    first, second = begin(lists, bias, run[0], inner, value)
                if turn == 0:
                    wait(ready, parity)
                if wanted:
                    source = uint32(sums + area * uint32(area_bytes) + tile * uint32(tile_sums))
                    finish(lists, source, out, run[0], inner, place, value, first, second, limit, alpha)
            _arrive(uint32(ready + uint32(FREE)), lane)
            parity, area = uint32(parity ^ area), uint32(area ^ uint32(1))
            run = after(run, together)

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
