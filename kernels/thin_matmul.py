"""Thin matrix products: 1 to 64 rows by a packed bf16 weight, float32 accumulation, and what follows them.

A persistent grid walks tiles of 16 weight rows, one, two or four at a time. The warps of a block share a tile's k
steps in turn (warp w takes steps w, w + WARPS, ..), each through its own pipeline of asynchronous copies which runs on
across tiles; a warp reads what its own lanes copied, so the pipeline needs no barrier of the block. Other warps add a
tile's sums in order and finish it, with what that needs loaded ahead, while the first go on: the order of accumulation
depends on the weight's shape alone, and a row has the same bits whatever the number of rows. Weights come first: no
kernel writes them, so a block fills itself before the kernel before this one has ended, in paces that leave room for
what that one reads. The rows' own k steps travel beside the weights'.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.handover import Handover, make_handover
from lowlat.kernels.kernel import H200, Argument, Card, Kernel, KernelCall
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int64, types, uint32
from lowlat.kernels.packing import PackedMatrix
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.thin_matmul_ending import Ending, make_ending, make_rotated_ending
from lowlat.kernels.thin_matmul_plan import (
    ADD,
    BFLOAT16,
    FLOAT32,
    MAX_ROWS,
    PAD,
    ROTATE,
    SILU,
    STEP_BYTES,
    SUM_BYTES,
    WARPS,
    HeadsShape,
    MatmulPlan,
    MatmulShape,
    plan_matmul,
    rows_at_once,
)

NUM_ROTATION = 10  # arguments of a kernel that only ROTATE uses

__all__ = ["MAX_ROWS", "MatmulPlan", "Rotation", "examples", "plan_matmul", "thin_matmul"]


@dataclass(frozen=True)
class Rotation:
    """Rotation of a product's queries and keys, and the write of keys and values to the cache.

    positions            [M]              int32, below C
    cos, sin             [C, D / 2]       float32
    row_live             [M]              uint8: dead rows write no keys and values
    k_cache, v_cache     [P, G, block, D] bf16, updated; None: queries alone
    block_table, slots, write_lens, offsets  as `kv_write` of the reference has them
    """

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    row_live: torch.Tensor | None = None
    k_cache: torch.Tensor | None = None
    v_cache: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    write_lens: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


def thin_matmul(
    *,
    x: torch.Tensor,
    weight: PackedMatrix,
    out: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu: bool = False,
    rotation: Rotation | None = None,
    head_dim: int = 0,
    card: Card = H200,
    plan: MatmulPlan | None = None,
) -> list[KernelCall]:
    """x @ weight.T and what follows, in one launch for each 64 rows, or `rows_at_once` of the card.

    x            [M, K]  bf16
    weight       [N, K]  packed; with silu in the order of `gate_up_order`
    bias         [N]     bf16, in the weight's order
    row_live     [M]     uint8; with silu, dead rows give zeros
    residual     [M, N]  bf16: out is the rounded sum of it and the product
    out          [M, N]  float32 or bf16; with silu [M, N / 2] bf16: silu(gate) * up; with rotation the queries
                         [M, H, D] bf16, or None where there are none
    rotation     the product is of queries, keys and values of `head_dim`, in the order of `rope_order`
    card         what it runs on
    plan         how to cut it; None: `plan_matmul`'s
    Time: the weight's bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit.
    """
    count, depth = x.shape
    check_shape("x", x, count, weight.columns)
    if depth % 8:
        raise ShapeError(f"a product's depth must be a multiple of 8, got {depth}")
    if rotation is not None:
        shape = MatmulShape(
            weight.rows, depth, ROTATE, bias is not None, False, _heads(weight, rotation, out, head_dim)
        )
        row_live = rotation.row_live
    elif out is None:
        raise ShapeError("a product without rotation needs `out`")
    else:
        check_shape("out", out, count, weight.rows // 2 if silu else weight.rows)
        wide = FLOAT32 if out.dtype == torch.float32 else BFLOAT16
        epilogue = SILU if silu else ADD if residual is not None else wide
        shape = MatmulShape(weight.rows, depth, epilogue, bias is not None, silu and row_live is not None)
    calls = []
    most = MAX_ROWS if plan else rows_at_once(card)
    for start in range(0, count, most):
        part = slice(start, min(start + most, count))
        rows = part.stop - start
        chosen = plan or plan_matmul(rows, weight.rows, card)
        live = None if row_live is None else row_live.reshape(-1)[part]
        optional = (live, bias, None if residual is None else residual[part], None if out is None else out[part])
        arguments: tuple[Argument, ...] = (weight.tiles, x[part], *(0 if each is None else each for each in optional))
        turned = (0,) * NUM_ROTATION if rotation is None else _rotation_arguments(rotation, part)
        calls.append(KernelCall(_make(shape, chosen), (chosen.num_blocks, 1, 1), (*arguments, rows, *turned)))
    return calls


def _heads(weight: PackedMatrix, rotation: Rotation, out: torch.Tensor | None, head_dim: int) -> HeadsShape:
    queries = 0 if out is None else out.shape[1]
    if rotation.k_cache is None or rotation.block_table is None or rotation.offsets is None:
        groups, block, width, rows = 0, 0, 0, 1
    else:
        groups, block = rotation.k_cache.shape[1:3]
        width, rows = rotation.block_table.shape[1], rotation.offsets.shape[0]
    if weight.rows != (queries + 2 * groups) * head_dim:
        raise ShapeError(
            f"a weight of {weight.rows} rows does not hold {queries} queries and {groups} keys and values of {head_dim}"
        )
    return HeadsShape(queries, groups, head_dim, rows, block, width)


def _rotation_arguments(rotation: Rotation, part: slice) -> tuple[Argument, ...]:
    tables = (rotation.positions.reshape(-1)[part], rotation.cos, rotation.sin)
    caches = (rotation.k_cache, rotation.v_cache, rotation.block_table)
    rows = (rotation.slots, rotation.write_lens, rotation.offsets)
    return (*tables, *(0 if each is None else each for each in (*caches, *rows)), part.start)


@cache
def _make(shape: MatmulShape, plan: MatmulPlan) -> Kernel:
    flags = "".join(letter for letter, on in (("b", shape.bias), ("l", shape.live)) if on)
    heads = "" if shape.heads is None else "_" + "x".join(map(str, astuple(shape.heads)))
    name = (
        f"thin_matmul_{shape.epilogue}{heads}_{shape.width}x{shape.depth}_{flags}_"
        f"{plan.row_tiles}x{plan.columns}x{plan.weight_tiles}x{plan.stages}x{plan.areas}"
        f"{'' if plan.patient else '_awake'}"
    )
    signature = (types.int64,) * (7 + NUM_ROTATION)
    return Kernel(name, _kernel(shape, plan), signature, plan.threads, plan.sharing, plan.shared_bytes)


def _kernel(shape: MatmulShape, plan: MatmulPlan) -> Callable[..., None]:
    tiles, steps = -(-shape.width // (16 * plan.weight_tiles)), shape.steps
    stages, stage_bytes, sum_bytes = plan.stages, plan.stage_bytes, plan.sum_bytes
    sums_at = WARPS * stages * stage_bytes
    barriers_at = sums_at + plan.areas * WARPS * sum_bytes
    issue_weights, issue_rows = _issue_weights(shape, plan), _issue_rows(shape, plan)
    multiply, store, weight_tiles, columns = _multiply(plan), _store(plan), plan.weight_tiles, plan.columns
    shared = columns < 8  # lanes read rows that others copied
    fill = _fill(shape, plan, issue_weights)
    handover = make_handover(plan.areas, WARPS, plan.finishing, patient=plan.patient)
    begin_handover, await_free, give, after = handover.begin, handover.await_free, handover.give, handover.after
    ending = (make_rotated_ending if shape.epilogue == ROTATE else make_ending)(shape, plan)
    finish = _finish(tiles, plan, ending, handover)
    wait, zeros = ptx.copies_wait(stages - 1), ptx.zeros(4 * weight_tiles * plan.row_tiles)

    def thin_matmul(
        weight: Any, x: Any, row_live: Any, bias: Any, residual: Any, out: Any, count: Any, positions: Any,
        cosines: Any, sines: Any, k_cache: Any, v_cache: Any, table: Any, slots: Any, write_lens: Any, offsets: Any,
        first_row: Any,
    ) -> None:  # fmt: skip
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread = uint32(cuda.threadIdx.x)
        lane, warp = thread & uint32(31), thread >> uint32(5)
        mine = base + warp * uint32(stages * stage_bytes) + lane * uint32(16)
        to_rows = uint32((lane >> uint32(2)) % uint32(columns)) * uint32(64) + (lane & uint32(3)) * uint32(16)
        to_rows = uint32(to_rows - lane * uint32(16))
        corner = (lane & uint32(3)) * uint32(2 * PAD) + (lane >> uint32(2))
        totals, barriers = base + uint32(sums_at), base + uint32(barriers_at)
        if thread == uint32(0):
            begin_handover(barriers)
        ptx.let_next_kernel_start()
        first, blocks = int64(warp), int64(cuda.gridDim.x)
        ahead_tile, ahead_step, filled = int64(cuda.blockIdx.x), first, 0
        if warp < uint32(WARPS):  # weights do not depend on the kernel before
            ahead_tile, ahead_step, filled = fill(mine, weight, first, lane)
        cuda.syncthreads()
        ptx.wait_for_previous_kernel()
        if warp >= uint32(WARPS):
            rotation = (positions, cosines, sines, k_cache, v_cache, table, slots, write_lens, offsets, first_row)
            finish(totals, barriers, thread, row_live, bias, residual, out, count, rotation)
            return
        step = first
        for number in range(stages):
            if number < filled:
                issue_rows(mine + uint32(number * stage_bytes), x, step, lane, count)
                step = step + WARPS if step + WARPS < steps else first
            ptx.copies_commit()
        here, end = mine, mine + uint32(stages * stage_bytes)
        tile, area, parity = int64(cuda.blockIdx.x), uint32(0), uint32(1)
        while tile < tiles:
            sums = zeros()
            step = first
            while step < steps:
                wait()
                if shared:
                    ptx.sync_warp()
                sums = multiply(sums, here, uint32(here + to_rows))
                if shared:
                    ptx.sync_warp()
                if ahead_tile < tiles:
                    issue_weights(here, weight, ahead_tile, ahead_step, lane)
                    issue_rows(here, x, ahead_step, lane, count)
                    ahead_step += WARPS
                    if ahead_step >= steps:
                        ahead_step, ahead_tile = first, ahead_tile + blocks
                ptx.copies_commit()
                here += uint32(stage_bytes)
                if here == end:
                    here = mine
                step += WARPS
            for part in range(weight_tiles):
                place = totals + area * uint32(WARPS * sum_bytes) + warp * uint32(sum_bytes) + corner * uint32(4)
                await_free(barriers, area, parity)
                store(part, place, sums)
                give(barriers, area, lane)
                area, parity = after(area, parity)
            tile += blocks

    return thin_matmul


def _fill(shape: MatmulShape, plan: MatmulPlan, issue_weights: Any) -> Any:
    """A function of a warp: fill its stages with weights, in paces; the tile and step behind, and how many are full."""
    tiles, steps, stages, pace = -(-shape.width // (16 * plan.weight_tiles)), shape.steps, plan.stages, plan.pace
    stage_bytes, hold_back = plan.stage_bytes, ptx.copies_wait(plan.pace - 1)

    @device_function
    def fill(mine: Any, weight: Any, first: Any, lane: Any) -> Any:
        tile, step, filled = int64(cuda.blockIdx.x), first, 0
        for number in range(stages):
            if step < steps and tile < tiles:
                issue_weights(mine + uint32(number * stage_bytes), weight, tile, step, lane)
                filled = number + 1
                step += WARPS
                if step >= steps:
                    step, tile = first, tile + int64(cuda.gridDim.x)
            ptx.copies_commit()
            if pace - 1 <= number < stages - 1:
                hold_back()
        return tile, step, filled

    return fill


def _store(plan: MatmulPlan) -> Any:
    """A function: a lane's sums of one of the weight tiles to their places in an area."""
    row_tiles, num_sums = plan.row_tiles, plan.weight_tiles * plan.row_tiles
    places = [min(part, plan.weight_tiles - 1) * row_tiles for part in range(4)]
    offsets = (0, PAD * 4, 32, PAD * 4 + 32)
    store0, store1, store2, store3 = (
        ptx.store_shared_tiles(num_sums, place, row_tiles, offsets, SUM_BYTES) for place in places
    )

    @device_function
    def store(part: Any, place: Any, sums: Any) -> None:
        if part == 0:
            store0(place, sums)
        elif part == 1:
            store1(place, sums)
        elif part == 2:
            store2(place, sums)
        else:
            store3(place, sums)

    return store


def _finish(tiles: int, plan: MatmulPlan, ending: Ending, handover: Handover) -> Any:
    """A function of the warps that finish: all tiles of a block, as the others hand them over."""
    weight_tiles, area_bytes, finishing = plan.weight_tiles, WARPS * plan.sum_bytes, plan.finishing * 32
    rounds = -(-plan.row_tiles * plan.columns * ending.values // finishing)
    await_full, release, after = handover.await_full, handover.release, handover.after
    locate, begin, nothing, end = ending.locate, ending.begin, ending.nothing, ending.finish

    @device_function
    def finish(
        totals: Any, barriers: Any, thread: Any, row_live: Any, bias: Any, residual: Any, out: Any, count: Any,
        rotation: Any,
    ) -> None:  # fmt: skip
        thread = uint32(thread - uint32(WARPS * 32))
        tile, area, parity = int64(cuda.blockIdx.x), uint32(0), uint32(0)
        while tile < tiles:
            for part in range(weight_tiles):
                number, source = tile * weight_tiles + part, totals + area * uint32(area_bytes)
                for turn in range(rounds):
                    row, column, wanted = locate(number, uint32(thread + uint32(turn * finishing)), count)
                    loaded = nothing()
                    if wanted:
                        loaded = begin(number, row, column, row_live, bias, residual, out, rotation)
                    if turn == 0:
                        await_full(barriers, area, parity)
                    if wanted:
                        end(source, number, row, column, loaded, out)
                release(barriers, area, uint32(thread & uint32(31)))
                area, parity = after(area, parity)
            tile += int64(cuda.gridDim.x)

    return finish


def _issue_weights(shape: MatmulShape, plan: MatmulPlan) -> Any:
    """Copy a lane's own bytes of one k step of a group of weight tiles to its place in shared memory."""
    weight_tiles, tile_bytes = plan.weight_tiles, shape.steps * STEP_BYTES
    last = -(-shape.width // 16) - 1

    def issue(place: Any, weight: Any, tile: Any, step: Any, lane: Any) -> None:
        for part in range(weight_tiles):
            # the last group may lack tiles: it takes the last one again, and nobody reads those sums
            number = min(tile * weight_tiles + part, int64(last))
            source = weight + number * tile_bytes + step * STEP_BYTES + int64(lane) * 16
            for quarter in range(4):
                ptx.copy_async_16_once(place + uint32(part * STEP_BYTES + quarter * 512), source + quarter * 512)

    return device_function(issue)


def _issue_rows(shape: MatmulShape, plan: MatmulPlan) -> Any:
    """Copy a lane's bytes of the rows' k step.

    Lanes of rows that do not exist copy nothing and feed rubbish to columns of the product that nobody reads.
    """
    depth, row_tiles, offset = shape.depth, plan.row_tiles, plan.weight_tiles * STEP_BYTES
    rows_bytes, half_bytes = plan.rows_bytes, plan.rows_bytes // 2

    def issue(place: Any, x: Any, step: Any, lane: Any, count: Any) -> None:
        column = step * 64 + int64(lane & uint32(3)) * 8
        for tile in range(row_tiles):
            row = tile * 8 + int64(lane >> uint32(2))
            if row < count:
                source = x + (row * depth + column) * 2
                target = place + uint32(offset + tile * rows_bytes)
                if depth % 64 == 0:
                    ptx.copy_async_16(target, source)
                    ptx.copy_async_16(target + uint32(half_bytes), source + 64)
                else:
                    low, high = column < depth, column + 32 < depth
                    ptx.copy_async_16_or_zero(target, source if low else x, uint32(16) if low else uint32(0))
                    place_high = target + uint32(half_bytes)
                    ptx.copy_async_16_or_zero(place_high, source + 64 if high else x, uint32(16) if high else uint32(0))

    return device_function(issue)


def _multiply(plan: MatmulPlan) -> Any:
    """Add one k step to the accumulators of all weight and row tiles."""
    weight_tiles, row_tiles = plan.weight_tiles, plan.row_tiles
    load_rows, half_bytes = ptx.load_shared_tiles(row_tiles, plan.rows_bytes), plan.rows_bytes // 2
    total, rows_at = weight_tiles * row_tiles, weight_tiles * STEP_BYTES
    # the intrinsics of the first to fourth weight tile; those past the last are never called
    places = [min(part, weight_tiles - 1) * row_tiles for part in range(4)]
    low0, low1, low2, low3 = (ptx.mma_bf16_tiles(total, place, row_tiles, 0) for place in places)
    high0, high1, high2, high3 = (ptx.mma_bf16_tiles(total, place, row_tiles, 2) for place in places)

    def multiply(sums: Any, here: Any, rows: Any) -> Any:
        for half in range(2):
            words = load_rows(rows + uint32(rows_at + half * half_bytes))
            weights = here + uint32(half * 512)
            a0, a1, a2, a3 = ptx.load_shared_128(weights)
            b0, b1, b2, b3 = ptx.load_shared_128(weights + uint32(1024))
            sums = low0(sums, a0, b0, a1, b1, words)
            sums = high0(sums, a2, b2, a3, b3, words)
            if weight_tiles > 1:
                a0, a1, a2, a3 = ptx.load_shared_128(weights + uint32(STEP_BYTES))
                b0, b1, b2, b3 = ptx.load_shared_128(weights + uint32(STEP_BYTES + 1024))
                sums = low1(sums, a0, b0, a1, b1, words)
                sums = high1(sums, a2, b2, a3, b3, words)
            if weight_tiles > 2:
                a0, a1, a2, a3 = ptx.load_shared_128(weights + uint32(2 * STEP_BYTES))
                b0, b1, b2, b3 = ptx.load_shared_128(weights + uint32(2 * STEP_BYTES + 1024))
                sums = low2(sums, a0, b0, a1, b1, words)
                sums = high2(sums, a2, b2, a3, b3, words)
                a0, a1, a2, a3 = ptx.load_shared_128(weights + uint32(3 * STEP_BYTES))
                b0, b1, b2, b3 = ptx.load_shared_128(weights + uint32(3 * STEP_BYTES + 1024))
                sums = low3(sums, a0, b0, a1, b1, words)
                sums = high3(sums, a2, b2, a3, b3, words)
        return sums

    return device_function(multiply)


def examples(card: Card = H200) -> list[Kernel]:
    """Representative specialisations, as a card has them: products of Llama-3.1-8B, all epilogues, odd shapes."""
    made = []
    for rows, width, depth, epilogue in (
        (1, 6144, 4096, FLOAT32),
        (4, 28672, 4096, SILU),
        (8, 4096, 14336, ADD),
        (16, 28672, 4096, SILU),
        (32, 4096, 14336, ADD),
        (64, 4096, 14336, ADD),
        (3, 97, 200, BFLOAT16),
    ):
        shape = MatmulShape(width, depth, epilogue, bias=width == 97, live=epilogue == SILU)
        made.append(_make(shape, plan_matmul(min(rows, rows_at_once(card)), width, card)))
    rotated = MatmulShape(6144, 4096, ROTATE, False, False, HeadsShape(32, 8, 128, 4, 32, 289))
    return [*made, _make(rotated, plan_matmul(4, 6144, card))]
