"""Thin matrix products: 1 to 64 rows by a packed bf16 weight, float32 accumulation, and what follows them.

A persistent grid walks tiles of 16 weight rows, one, two or four at a time. The warps of a block share a tile's k
steps in turn (warp w takes steps w, w + WARPS, ..), each through its own pipeline of asynchronous copies which runs on
across tiles; every lane copies exactly the bytes that it will read, so the pipeline needs no barrier. The warps' sums
are added in order at the end of a tile: the order of accumulation depends on the weight's shape alone, and a row has
the same bits whatever the number of rows. Weights come first: no kernel writes them, so their copies start before the
kernel before this one has ended. The rows' own k steps travel beside the weights'.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels import ptx
from lowlat.kernels.activation import silu_times
from lowlat.kernels.kernel import H200, Card, Kernel, KernelCall
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int64, types, uint32
from lowlat.kernels.packing import PackedMatrix
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["MAX_ROWS", "MatmulPlan", "examples", "plan_matmul", "thin_matmul"]

WARPS = 8
THREADS = WARPS * 32
STEP_BYTES = 2048  # 16 weight rows by 64 columns
ROWS_BYTES = 1024  # 8 rows by 64 columns
MAX_ROWS = 64
PAD = 20  # floats from one row of partial sums to the next: no bank conflicts
SUM_BYTES = 8 * PAD * 4  # 8 rows of partial sums
FLOAT32, BFLOAT16, ADD, SILU = "float32", "bfloat16", "add", "silu"


@dataclass(frozen=True)
class MatmulPlan:
    """How a product is cut: none of it changes any bit of the result.

    row_tiles     tiles of 8 rows: 1, 2, 4 or 8
    weight_tiles  tiles of 16 weight rows that a warp multiplies at once: 1, 2 or 4
    stages        k steps under way in each warp
    buffers       areas of partial sums of one tile: with two, a tile's end needs one barrier instead of two
    num_blocks    blocks of the grid
    """

    row_tiles: int
    weight_tiles: int
    stages: int
    buffers: int
    num_blocks: int

    @property
    def stage_bytes(self) -> int:
        """One warp's copy of one k step."""
        return self.weight_tiles * STEP_BYTES + self.row_tiles * ROWS_BYTES

    @property
    def sum_bytes(self) -> int:
        """One warp's partial sums of one weight tile."""
        return self.row_tiles * SUM_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return WARPS * (self.stages * self.stage_bytes + self.buffers * self.sum_bytes)


@dataclass(frozen=True)
class _Shape:
    width: int  # N of the weight
    depth: int  # K
    epilogue: str
    bias: bool
    live: bool

    @property
    def steps(self) -> int:
        return -(-self.depth // 64)


# (row tiles, weight tiles) -> stages, areas of sums; README.md beside this file tells what was tried
_PLANS = {
    (1, 1): (6, 2),
    (1, 2): (4, 2),
    (2, 1): (4, 2),
    (2, 2): (3, 2),
    (2, 4): (2, 1),
    (4, 1): (3, 1),
    (4, 2): (2, 2),
    (4, 4): (2, 1),
    (8, 1): (2, 1),
    (8, 2): (1, 2),
    (8, 4): (1, 1),
}


def plan_matmul(rows: int, width: int, card: Card) -> MatmulPlan:
    """The plan for M rows by [N, K]: one block a multiprocessor, as many tiles at once as keep most of them busy.

    Raises ShapeError for a card whose blocks have too little shared memory.
    """
    row_tiles = next(tiles for tiles in (1, 2, 4, 8) if 8 * tiles >= rows)
    known = sorted((_cost(row_tiles, tiles, width, card), tiles) for rows_, tiles in _PLANS if rows_ == row_tiles)
    for _, weight_tiles in known:
        most, buffers = _PLANS[row_tiles, weight_tiles]
        num_blocks = min(-(-width // (16 * weight_tiles)), card.num_multiprocessors)
        for stages in range(most, 0, -1):
            plan = MatmulPlan(row_tiles, weight_tiles, stages, buffers if stages == most else 1, num_blocks)
            if plan.shared_bytes <= card.shared_bytes:
                return plan
    raise ShapeError(f"{rows} rows do not fit the {card.shared_bytes} bytes of shared memory that a block may have")


def _cost(row_tiles: int, weight_tiles: int, width: int, card: Card) -> float:
    """Time beside a stream of the weights alone, as measured on an H200: rows that are read again for every group of
    tiles cost near half of what weights do, and multiprocessors without a group in the last turn are lost."""
    groups = -(-width // (16 * weight_tiles))
    busy = groups / (-(-groups // card.num_multiprocessors) * card.num_multiprocessors)
    return (1 + 0.45 * row_tiles * ROWS_BYTES / (weight_tiles * STEP_BYTES)) / busy


def thin_matmul(
    *,
    x: torch.Tensor,
    weight: PackedMatrix,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    silu: bool = False,
    card: Card = H200,
    plan: MatmulPlan | None = None,
) -> list[KernelCall]:
    """x @ weight.T and what follows, in one launch for each 64 rows.

    x            [M, K]  bf16
    weight       [N, K]  packed; with silu in the order of `gate_up_order`
    bias         [N]     bf16, in the weight's order
    row_live     [M]     uint8; with silu, dead rows give zeros
    residual     [M, N]  bf16: out is the rounded sum of it and the product
    out          [M, N]  float32 or bf16; with silu [M, N / 2] bf16: silu(gate) * up
    card         what it runs on
    plan         how to cut it; None: `plan_matmul`'s
    Time: the weight's bytes over the memory's bandwidth. Captured: yes.
    Raises ShapeError for shapes that do not fit.
    """
    count, depth = x.shape
    check_shape("x", x, count, weight.columns)
    check_shape("out", out, count, weight.rows // 2 if silu else weight.rows)
    if depth % 8:
        raise ShapeError(f"a product's depth must be a multiple of 8, got {depth}")
    epilogue = SILU if silu else ADD if residual is not None else FLOAT32 if out.dtype == torch.float32 else BFLOAT16
    calls = []
    for start in range(0, count, MAX_ROWS):
        part = slice(start, min(start + MAX_ROWS, count))
        rows = part.stop - start
        shape = _Shape(weight.rows, depth, epilogue, bias is not None, silu and row_live is not None)
        chosen = plan or plan_matmul(rows, weight.rows, card)
        optional = (
            None if row_live is None else row_live.reshape(-1)[part],
            bias,
            None if residual is None else residual[part],
        )
        arguments = (weight.tiles, x[part], *(0 if tensor is None else tensor for tensor in optional), out[part], rows)
        calls.append(KernelCall(_make(shape, chosen), (chosen.num_blocks, 1, 1), arguments))
    return calls


@cache
def _make(shape: _Shape, plan: MatmulPlan) -> Kernel:
    flags = "".join(letter for letter, on in (("b", shape.bias), ("l", shape.live)) if on)
    name = (
        f"thin_matmul_{shape.epilogue}_{shape.width}x{shape.depth}_{flags}_"
        f"{plan.row_tiles}x{plan.weight_tiles}x{plan.stages}x{plan.buffers}"
    )
    min_blocks = 2 if 2 * plan.shared_bytes <= 220 * 1024 else 1
    return Kernel(name, _kernel(shape, plan), (types.int64,) * 7, THREADS, min_blocks, plan.shared_bytes)


def _kernel(shape: _Shape, plan: MatmulPlan) -> Callable[..., None]:
    tiles, steps = -(-shape.width // (16 * plan.weight_tiles)), shape.steps
    stages, stage_bytes, sum_bytes = plan.stages, plan.stage_bytes, plan.sum_bytes
    sums_at, two_buffers, num_sums = WARPS * stages * stage_bytes, plan.buffers == 2, plan.weight_tiles * plan.row_tiles
    issue_weights, issue_rows = _issue_weights(shape, plan), _issue_rows(shape, plan)
    multiply, finish_tile, row_tiles = _multiply(plan), _finish_tile(shape, plan), plan.row_tiles
    places = [min(part, plan.weight_tiles - 1) * row_tiles for part in range(4)]
    offsets = (0, PAD * 4, 32, PAD * 4 + 32)
    store0, store1, store2, store3 = (
        ptx.store_shared_tiles(num_sums, place, row_tiles, offsets, SUM_BYTES) for place in places
    )
    weight_tiles = plan.weight_tiles
    wait, zeros = ptx.copies_wait(stages - 1), ptx.zeros(4 * num_sums)

    def thin_matmul(weight: Any, x: Any, row_live: Any, bias: Any, residual: Any, out: Any, count: Any) -> None:
        base = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        lane, warp = uint32(cuda.threadIdx.x) & uint32(31), uint32(cuda.threadIdx.x) >> uint32(5)
        mine = base + warp * uint32(stages * stage_bytes) + lane * uint32(16)
        corner = (lane & uint32(3)) * uint32(2 * PAD) + (lane >> uint32(2))
        totals = base + uint32(sums_at)
        ptx.let_next_kernel_start()
        first, blocks = int64(warp), int64(cuda.gridDim.x)
        ahead_tile, ahead_step = int64(cuda.blockIdx.x), first
        for number in range(stages):  # weights do not depend on the kernel before: fetch ahead of it
            if ahead_step < steps and ahead_tile < tiles:
                issue_weights(mine + uint32(number * stage_bytes), weight, ahead_tile, ahead_step, lane)
                ahead_step += WARPS
                if ahead_step >= steps:
                    ahead_step, ahead_tile = first, ahead_tile + blocks
        ptx.wait_for_previous_kernel()
        step = first
        for number in range(stages):
            if step < steps:
                issue_rows(mine + uint32(number * stage_bytes), x, step, lane, count)
                step = step + WARPS if step + WARPS < steps else first
            ptx.copies_commit()
        here, end = mine, mine + uint32(stages * stage_bytes)
        tile, parity = int64(cuda.blockIdx.x), uint32(0)
        while tile < tiles:
            sums = zeros()
            step = first
            while step < steps:
                wait()
                sums = multiply(sums, here)
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
                area = totals + parity * uint32(WARPS * sum_bytes)
                place = area + warp * uint32(sum_bytes) + corner * uint32(4)
                if part == 0:
                    store0(place, sums)
                elif part == 1:
                    store1(place, sums)
                elif part == 2:
                    store2(place, sums)
                else:
                    store3(place, sums)
                cuda.syncthreads()
                finish_tile(area, tile * weight_tiles + part, row_live, bias, residual, out, count)
                if two_buffers:
                    parity = uint32(1) - parity
                else:
                    cuda.syncthreads()
            tile += blocks

    return thin_matmul


def _issue_weights(shape: _Shape, plan: MatmulPlan) -> Any:
    """Copy a lane's own bytes of one k step of a group of weight tiles to its place in shared memory."""
    weight_tiles, tile_bytes = plan.weight_tiles, shape.steps * STEP_BYTES
    last = -(-shape.width // 16) - 1

    def issue(place: Any, weight: Any, tile: Any, step: Any, lane: Any) -> None:
        for part in range(weight_tiles):
            # the last group may lack tiles: it takes the last one again, and nobody reads those sums
            number = min(tile * weight_tiles + part, int64(last))
            source = weight + number * tile_bytes + step * STEP_BYTES + int64(lane) * 16
            for quarter in range(4):
                ptx.copy_async_16(place + uint32(part * STEP_BYTES + quarter * 512), source + quarter * 512)

    return device_function(issue)


def _issue_rows(shape: _Shape, plan: MatmulPlan) -> Any:
    """Copy a lane's own bytes of the rows' k step.

    Lanes of rows that do not exist copy nothing and feed rubbish to columns of the product that nobody reads.
    """
    depth, row_tiles, offset = shape.depth, plan.row_tiles, plan.weight_tiles * STEP_BYTES

    def issue(place: Any, x: Any, step: Any, lane: Any, count: Any) -> None:
        column = step * 64 + int64(lane & uint32(3)) * 8
        for tile in range(row_tiles):
            row = tile * 8 + int64(lane >> uint32(2))
            if row < count:
                source = x + (row * depth + column) * 2
                target = place + uint32(offset + tile * ROWS_BYTES)
                if depth % 64 == 0:
                    ptx.copy_async_16(target, source)
                    ptx.copy_async_16(target + uint32(512), source + 64)
                else:
                    low, high = column < depth, column + 32 < depth
                    ptx.copy_async_16_or_zero(target, source if low else x, uint32(16) if low else uint32(0))
                    place_high = target + uint32(512)
                    ptx.copy_async_16_or_zero(place_high, source + 64 if high else x, uint32(16) if high else uint32(0))

    return device_function(issue)


def _multiply(plan: MatmulPlan) -> Any:
    """Add one k step to the accumulators of all weight and row tiles."""
    weight_tiles, row_tiles = plan.weight_tiles, plan.row_tiles
    load_rows = ptx.load_shared_tiles(row_tiles, ROWS_BYTES)
    total, rows_at = weight_tiles * row_tiles, weight_tiles * STEP_BYTES
    # the intrinsics of the first to fourth weight tile; those past the last are never called
    places = [min(part, weight_tiles - 1) * row_tiles for part in range(4)]
    low0, low1, low2, low3 = (ptx.mma_bf16_tiles(total, place, row_tiles, 0) for place in places)
    high0, high1, high2, high3 = (ptx.mma_bf16_tiles(total, place, row_tiles, 2) for place in places)

    def multiply(sums: Any, here: Any) -> Any:
        for half in range(2):
            words = load_rows(here + uint32(rows_at + half * 512))
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


def _finish_tile(shape: _Shape, plan: MatmulPlan) -> Any:
    """Add the warps' sums in order, then bias, residual or activation, and store what exists."""
    width, epilogue = shape.width, shape.epilogue
    padded_rows, sum_bytes = 8 * plan.row_tiles, plan.sum_bytes
    has_bias, live, silu, add = shape.bias, shape.live, epilogue == SILU, epilogue == ADD
    wide = epilogue == FLOAT32
    columns = 8 if silu else 16
    outputs, out_width = padded_rows * columns, width // 2 if silu else width

    def total_of(area: Any, row: Any, column: Any) -> Any:
        place = area + (row * uint32(PAD) + column) * uint32(4)
        total = ptx.load_shared_f32(place)
        for warp in range(1, WARPS):
            total = ptx.add_rn(total, ptx.load_shared_f32(place + uint32(warp * sum_bytes)))
        return total

    total_of = device_function(total_of)

    def finish_tile(area: Any, tile: Any, row_live: Any, bias: Any, residual: Any, out: Any, count: Any) -> None:
        for index in range(uint32(cuda.threadIdx.x), uint32(outputs), uint32(THREADS)):
            column = index % uint32(columns)
            row = index // uint32(columns)
            first = tile * 16
            place = first + int64(column)
            if int64(row) < count and place < width:
                at = int64(row) * out_width + first // (16 // columns) + int64(column)
                value = total_of(area, row, column)
                if has_bias:
                    value = ptx.add_rn(value, ptx.load_global_bf16(bias + place * 2))
                if silu:
                    up = total_of(area, row, column + uint32(8))
                    if has_bias:
                        up = ptx.add_rn(up, ptx.load_global_bf16(bias + place * 2 + 16))
                    value = silu_times(value, up)
                    if live and ptx.load_global_u8(row_live + int64(row)) == uint32(0):
                        value = float32(0)
                if add:
                    value = ptx.add_rn(value, ptx.load_global_bf16(residual + at * 2))
                if wide:
                    ptx.store_global_f32(out + at * 4, value)
                else:
                    ptx.store_global_u16(out + at * 2, ptx.bf16_bits(value))

    return device_function(finish_tile)


def examples() -> list[Kernel]:
    """Representative specialisations: products of Llama-3.1-8B, few and many rows, all epilogues, odd shapes."""
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
        shape = _Shape(width, depth, epilogue, bias=width == 97, live=epilogue == SILU)
        made.append(_make(shape, plan_matmul(rows, width, H200)))
    return made
