"""The products of a mixture of experts: every expert that a step chose is read once for all pairs that chose it.

A persistent grid shares out the tiles of all units (an expert and up to eight of its pairs) in runs of equal length.
The warps of a block share a tile's k steps in turn, each through its own pipeline of asynchronous copies, which runs on
across tiles and units; every lane copies exactly the bytes that it will read. The inputs of a unit stay in shared
memory. The warps' sums are added in order at a tile's end: the order of accumulation depends on the weight's shape
alone, and a pair has the same bits whoever shares its expert, in whatever column of a unit it stands.

An expert that more than eight pairs chose is several units. Their tiles are read at about the same time: the memory
delivers them once and the L2 the other times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowlat.kernels import ptx
from lowlat.kernels.experts_copy import make_copy_step, make_load_inputs, make_start
from lowlat.kernels.experts_list import make_list_units, make_members_of
from lowlat.kernels.experts_multiply import make_multiply
from lowlat.kernels.experts_plan import CODE_BYTES, DOWN, PAD, ExpertPlan, ExpertShape
from lowlat.kernels.kernel import Kernel
from lowlat.kernels.numba_cuda import cuda, device_function, float32, types, uint32

__all__ = ["Ending", "make_product", "make_total"]


@dataclass(frozen=True)
class Ending:
    """What becomes of a product, as device functions.

    width   values of a pair that a tile's end gives: 8 or 16
    begin   of a tile: load what its end needs, two uint32 that nothing waits for, for the thread of a pair's value
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
        f"{plan.columns}x{plan.capacity}x{plan.warps}x{plan.stages}x{plan.blocks}x{plan.min_blocks}"
    )
    signature = (*(types.int64,) * 7, types.float32, types.float32)
    return Kernel(
        name, _kernel(shape, plan, ending), signature, plan.threads, plan.min_blocks, plan.shared_bytes(shape)
    )


def _kernel(shape: ExpertShape, plan: ExpertPlan, ending: Ending) -> Callable[..., None]:
    tiles, steps, warps, columns = shape.tiles, shape.steps, plan.warps, plan.columns
    stages, stage_bytes, sum_bytes, width = plan.stages, plan.stage_bytes(shape), plan.sum_bytes, ending.width
    inputs_at = warps * stages * stage_bytes
    sums_at = inputs_at + plan.input_bytes(shape)
    lists_at = sums_at + 2 * warps * sum_bytes
    span, threads = -(-columns * width // 32) * 32, plan.threads  # threads of a tile's end: other ones each time
    turns, rest = steps // warps, steps % warps
    list_units, members_of, start = make_list_units(plan), make_members_of(plan), make_start(shape, plan)
    copy_step, load_inputs = make_copy_step(shape, plan), make_load_inputs(shape, plan)
    turn, store_sums, place_of_sums = _make_turn(shape, plan), _make_store_sums(plan), _place_of_sums
    begin, finish, clear = ending.begin, ending.finish, ending.clear
    ids_are_old = shape.kind == DOWN

    def experts_product(
        weight: Any, scales: Any, x: Any, ids: Any, bias: Any, out: Any, count: Any, limit: Any, alpha: Any
    ) -> None:
        base = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        thread = uint32(cuda.threadIdx.x)
        lane, warp, lists = uint32(thread & uint32(31)), uint32(thread >> uint32(5)), uint32(base + uint32(lists_at))
        if not ids_are_old:
            ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        units = list_units(lists, ids, count, thread)
        block, blocks = uint32(cuda.blockIdx.x), uint32(cuda.gridDim.x)
        tile = uint32(uint32(block * uint32(units * uint32(tiles))) // blocks)
        last = uint32(uint32(uint32(block + uint32(1)) * uint32(units * uint32(tiles))) // blocks)
        mine = uint32(base + warp * uint32(stages * stage_bytes) + lane * uint32(16))
        end = uint32(mine + uint32(stages * stage_bytes))
        to_scales = uint32(uint32(CODE_BYTES) - lane * uint32(12))  # from a lane's words to its scales
        cursor, fixed = start(lists, weight, scales, tile, last, thread)
        here = mine
        while here != end:
            cursor = copy_step(lists, here, to_scales, cursor, fixed)
            ptx.copies_commit()
            here = uint32(here + uint32(stage_bytes))
        if ids_are_old:
            ptx.wait_for_previous_kernel()
        inputs, here = uint32(base + uint32(inputs_at)), mine
        mine_inputs = uint32(inputs + warp * uint32(columns * 128) + (lane & uint32(3)) * uint32(16))
        mine_inputs = uint32(mine_inputs + ((lane >> uint32(2)) % uint32(columns)) * uint32(64))
        area = uint32(base + uint32(sums_at))
        mine_sums = uint32(area + warp * uint32(sum_bytes) + place_of_sums(lane))
        other_area = uint32(warps * sum_bytes)  # from the one area of sums to the other
        unit = uint32(tile // uint32(tiles))
        inner = uint32(tile - unit * uint32(tiles))
        members, worker, fresh = uint32(0), thread, True
        while tile < last:
            if fresh:
                members = members_of(lists, unit)
                load_inputs(lists, inputs, x, unit, thread)
                cuda.syncthreads()
            value, place = uint32(worker % uint32(width)), uint32(worker // uint32(width))
            first, second = uint32(0), uint32(0)
            if place < members:
                first, second = begin(lists, bias, unit, inner, value)
            c0, c1, c2, c3 = float32(0), float32(0), float32(0), float32(0)
            at = mine_inputs
            for _ in range(turns):
                (c0, c1, c2, c3), cursor = turn(c0, c1, c2, c3, lists, here, to_scales, at, cursor, fixed)
                here = uint32(here + uint32(stage_bytes))
                here, at = mine if here == end else here, uint32(at + uint32(warps * columns * 128))
            if warp < uint32(rest):
                (c0, c1, c2, c3), cursor = turn(c0, c1, c2, c3, lists, here, to_scales, at, cursor, fixed)
                here = uint32(here + uint32(stage_bytes))
                here = mine if here == end else here
            store_sums(mine_sums, lane, c0, c1, c2, c3)
            cuda.syncthreads()
            if place < members:
                finish(lists, area, out, unit, inner, place, value, first, second, limit, alpha)
            area, mine_sums = uint32(area + other_area), uint32(mine_sums + other_area)
            other_area = uint32(uint32(0) - other_area)
            worker = uint32(uint32(worker + uint32(span)) % uint32(threads))
            tile, inner = uint32(tile + uint32(1)), uint32(inner + uint32(1))
            fresh = inner == uint32(tiles)
            if fresh:
                inner, unit = uint32(0), uint32(unit + uint32(1))
        clear(lists, out, count, thread)

    return experts_product


def _make_turn(shape: ExpertShape, plan: ExpertPlan) -> Any:
    """A function: wait for a step, add it to a warp's sums, and copy the one at the cursor to its place."""
    wait, multiply, copy_step = (
        ptx.copies_wait(plan.stages - 1),
        make_multiply(shape, plan),
        make_copy_step(shape, plan),
    )

    @device_function
    def turn(
        c0: Any, c1: Any, c2: Any, c3: Any, lists: Any, here: Any, to_scales: Any, at: Any, cursor: Any, fixed: Any
    ) -> Any:
        wait()
        sums = multiply(c0, c1, c2, c3, here, to_scales, at)
        cursor = copy_step(lists, here, to_scales, cursor, fixed)
        ptx.copies_commit()
        return sums, cursor

    return turn


@device_function
def _place_of_sums(lane: Any) -> Any:
    """Where in a warp's area a lane's first sum belongs: [pair][16 rows]."""
    return uint32((lane & uint32(3)) * uint32(2 * PAD * 4) + (lane >> uint32(2)) * uint32(4))


def _make_store_sums(plan: ExpertPlan) -> Any:
    """A function: a lane's sums of a tile to their places, of the columns that pairs may have."""
    columns = plan.columns

    @device_function
    def store_sums(place: Any, lane: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> None:
        if (lane & uint32(3)) * uint32(2) < uint32(columns):
            ptx.store_shared_f32(place, c0)
            ptx.store_shared_f32(place + uint32(32), c2)
            if columns > 1:
                ptx.store_shared_f32(place + uint32(PAD * 4), c1)
                ptx.store_shared_f32(place + uint32(PAD * 4 + 32), c3)

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
