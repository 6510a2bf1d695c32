"""This module multiplies a prompt's rows by a narrow weight, such as gates of delta nets or a router.

A narrow weight has too few rows for the tiles of the other prefill GEMM, and is not packed: steps read it as it is. A
block has a tile of rows and columns and one part of K, by `mma.sync`, so that any GPU from 8.0 on runs it. A second
launch adds the parts.

**One order of sums.** K is divided into parts, and parts into steps of 64 columns, by K alone. One warp has the first
32 columns of each step and another the last 32; each adds its products from the first step to the last. Both sums are
added, then the parts in order, then the bias. So a row's bits depend on the row and the weight's row alone, not on the
number of rows, on tiles, or on the number of columns of a rank.

The block shares the inputs of a step, 128 bytes a row, whose 16-byte pieces are permuted so that lanes have no bank
conflicts. A lane's four words are 8 consecutive columns of either matrix. So the instruction's columns are a
permutation of the step's, the same for both matrices.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.gemm.k_parts import add_four, load_four
from lowlat.kernels.gemm.limits import DEPTH
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall, Workspace, WorkspaceShape
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["NarrowPlan", "examples", "narrow_gemm", "narrow_workspace", "num_parts", "plan_narrow"]

THREADS = 256  # warps of two halves of a step, two halves of the rows, and two of the columns
STEP, STEP_BYTES = 64, 128  # columns of K; bytes of a row
PIECES = STEP_BYTES // 16
ROWS_A_TURN = THREADS // PIECES  # that a block's threads copy at once
TILES = (64, 32)  # rows of a block
MOST_COLUMNS, GRAIN = 128, 16  # of a block: with more registers spill where two blocks share an SM
MOST_PARTS, PART_STEPS = 4, 8  # parts of K, each of so many steps at the least where there are several
MOST_STAGES = 8
GROUP = 3  # tiles of 8 columns whose words a lane holds at once
PAD = 8  # numbers after a row of sums in shared memory: no more than two lanes meet at a bank


def num_parts(depth: int) -> int:
    """The parts of K, by K alone."""
    return max(1, min(MOST_PARTS, -(-depth // STEP) // PART_STEPS))


@dataclass(frozen=True)
class NarrowPlan:
    """How a narrow product is cut; no bit depends on it.

    rows     of a block: 64 or 32
    columns  of a block, a multiple of 16: rows of the weight
    stages   of steps that are on their way or being multiplied
    """

    rows: int
    columns: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Stages, in whose place both halves' sums lie in the end."""
        return max(self.stages * (self.rows + self.columns) * STEP_BYTES, 2 * self.rows * (self.columns + PAD) * 4)


def plan_narrow(rows: int, width: int, depth: int, gpu: Gpu) -> NarrowPlan:
    """The plan of M rows and a weight [N, K]: the one whose fullest SM reads the least; of equals the largest tile."""
    grains = -(-width // GRAIN)
    tiles = [
        (height, -(-grains // count) * GRAIN)
        for height in TILES
        for count in range(-(-grains * GRAIN // MOST_COLUMNS), grains + 1)
    ]

    def bytes_of_an_sm(tile: tuple[int, int]) -> int:
        blocks = -(-rows // tile[0]) * -(-width // tile[1]) * num_parts(depth)
        return -(-blocks // gpu.num_multiprocessors) * sum(tile)

    height, columns = min(tiles, key=bytes_of_an_sm)
    fits = gpu.most_bytes(2) // ((height + columns) * STEP_BYTES)  # of two blocks an SM
    return NarrowPlan(height, columns, max(3, min(MOST_STAGES, fits)))


def narrow_workspace(rows: int, width: int, depth: int) -> WorkspaceShape:
    """The workspace of M rows and a weight [N, K]: sums of parts [P, M, N rounded up to 4] float32."""
    return "prefill.narrow", (num_parts(depth), rows, -(-width // 4) * 4), torch.float32


def narrow_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    workspace: Workspace,
    gpu: Gpu = H200,
    plan: NarrowPlan | None = None,
) -> list[KernelCall]:
    """x @ weight.T + bias in float32, of any number of rows, in two launches.

    x          [M, K]   bf16
    weight     [N, K]   bf16, row-major
    bias       [N]      bf16, or None
    out        [M, N]   float32  out
    workspace  is asked for `narrow_workspace`
    plan       None: as `plan_narrow` has it
    Time: 2 M N K (1 / columns of a block + 1 / rows of a block) bytes over the L2's bandwidth, and two launches.
    Captured: yes. Raises ShapeError for shapes or dtypes that do not fit, and K that is no multiple of 8.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    DEPTH.check("narrow_gemm: K", depth)
    check_shape("weight", weight, width, depth)
    check_shape("out", out, rows, width)
    check_dtype(torch.bfloat16, x=x, weight=weight, bias=bias)
    check_dtype(torch.float32, out=out)
    if bias is not None:
        check_shape("bias", bias, width)
    plan = plan or plan_narrow(rows, width, depth, gpu)
    partials = workspace(*narrow_workspace(rows, width, depth))
    parts, _, pitch = partials.shape
    column_blocks = -(-width // plan.columns)
    product = KernelCall(
        _make(plan, depth % STEP == 0),
        (-(-rows // plan.rows), column_blocks * parts, 1),
        (x, weight, partials, rows, width, depth, column_blocks, parts),
    )
    blocks = -(-rows * (pitch // 4) // THREADS)
    arguments = (partials, 0 if bias is None else bias, out, rows, width)
    return [product, KernelCall(_make_sum(parts, bias is not None, width % 4 == 0), (blocks, 1, 1), arguments)]


def _make_copy(at: int, rows: int, whole: bool) -> Any:
    """A function: copy a step's columns of up to `rows` rows to `at` in a stage, asynchronously.

    It takes the stage, the step, the address of the thread's piece of the first row, the bytes between rows, how many
    rows there are, the thread's place in a stage, the columns of K, and the thread.
    """
    turns = -(-rows // ROWS_A_TURN)

    @device_function
    def copy(stage: Any, step: Any, source: Any, pitch: Any, live: Any, place: Any, depth: Any, thread: Any) -> None:
        row = uint32(thread // uint32(PIECES))
        column = uint32(step * uint32(STEP) + uint32(thread % uint32(PIECES)) * uint32(8))
        source = source + int64(step) * int64(STEP_BYTES)
        for turn in range(turns):
            if uint32(row + uint32(turn * ROWS_A_TURN)) < live:
                target = uint32(stage + place + uint32(at + turn * ROWS_A_TURN * STEP_BYTES))
                if whole or column < depth:
                    ptx.copy_async_16(target, source + int64(turn * ROWS_A_TURN) * pitch)
                else:
                    ptx.copy_async_16_or_zero(target, source, uint32(0))

    return copy


def _make_multiply(plan: NarrowPlan, first: int = 0) -> Any:
    """A function of a warp: add half a step of its rows and columns, from a tile of 8 columns on, to its sums.

    It takes the sums, the words of its rows, and the address of the lane's columns.
    """
    row_tiles, column_tiles = plan.rows // 32, plan.columns // 16
    total, count = row_tiles * column_tiles, min(GROUP, column_tiles - first)
    load = ptx.load_shared_tiles(count, 8 * STEP_BYTES)
    low0, high0 = (ptx.mma_bf16_tiles(total, first, count, word) for word in (0, 2))
    two, is_last = row_tiles == 2, first + count == column_tiles
    low1: Any = ptx.mma_bf16_tiles(total, column_tiles + first, count, 0) if two else None
    high1: Any = ptx.mma_bf16_tiles(total, column_tiles + first, count, 2) if two else None
    multiply_rest: Any = None if is_last else _make_multiply(plan, first + count)

    @device_function
    def multiply(sums: Any, a: Any, columns: Any) -> Any:
        words = load(uint32(columns + uint32(8 * first * STEP_BYTES)))
        sums = low0(sums, a[0], a[4], a[1], a[5], words)
        if two:
            sums = low1(sums, a[8], a[12], a[9], a[13], words)
        sums = high0(sums, a[2], a[6], a[3], a[7], words)
        if two:
            sums = high1(sums, a[10], a[14], a[11], a[15], words)
        if not is_last:
            sums = multiply_rest(sums, a, columns)
        return sums

    return multiply


def _make_store_sums(plan: NarrowPlan) -> Any:
    """A device function that stores a lane's sums to its half's area, [rows][columns], from its first place on."""
    row_tiles, column_tiles = plan.rows // 32, plan.columns // 16
    pitch, total, two = 4 * (plan.columns + PAD), row_tiles * column_tiles, row_tiles == 2
    offsets = (0, 4, 8 * pitch, 8 * pitch + 4)
    store0 = ptx.store_shared_tiles(total, 0, column_tiles, offsets, 32)
    store1: Any = ptx.store_shared_tiles(total, column_tiles, column_tiles, offsets, 32) if two else None

    @device_function
    def store(place: Any, sums: Any) -> None:
        store0(place, sums)
        if two:
            store1(uint32(place + uint32(16 * pitch)), sums)

    return store


@cache
def _make(plan: NarrowPlan, whole: bool) -> Kernel:
    """Grid (tiles of rows, parts of K times tiles of columns). whole: K is whole steps."""
    rows_high, columns_wide, stages, ahead = plan.rows, plan.columns, plan.stages, plan.stages - 1
    row_tiles, column_tiles = rows_high // 32, columns_wide // 16
    stage_bytes, pitch = (rows_high + columns_wide) * STEP_BYTES, 4 * (columns_wide + PAD)
    chunks, weights_at = columns_wide // 4, rows_high * STEP_BYTES
    copy_rows, copy_weights = (
        _make_copy(at, count, whole) for at, count in ((0, rows_high), (weights_at, columns_wide))
    )
    multiply, store_sums = _make_multiply(plan), _make_store_sums(plan)
    load_rows = ptx.load_shared_tiles(2 * row_tiles, 8 * STEP_BYTES)
    zeros, wait, wait_for_all = ptx.zeros(4 * row_tiles * column_tiles), ptx.copies_wait(stages - 2), ptx.copies_wait(0)

    @device_function
    def added(first: Any, second: Any) -> Any:
        """Four of one half's sums and of the other's, as bits."""
        return (
            ptx.bits_of_float(ptx.add_rn(ptx.float_of_bits(first[0]), ptx.float_of_bits(second[0]))),
            ptx.bits_of_float(ptx.add_rn(ptx.float_of_bits(first[1]), ptx.float_of_bits(second[1]))),
            ptx.bits_of_float(ptx.add_rn(ptx.float_of_bits(first[2]), ptx.float_of_bits(second[2]))),
            ptx.bits_of_float(ptx.add_rn(ptx.float_of_bits(first[3]), ptx.float_of_bits(second[3]))),
        )

    def narrow(
        x: Any, weight: Any, partials: Any, rows: Any, width: Any, depth: Any, column_blocks: Any, parts: Any
    ) -> None:
        base = ptx.varying(ptx.shared_address(cuda.shared.array(shape=0, dtype=float32)))
        thread, other = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.y)
        rows, width, depth = uint32(rows), uint32(width), uint32(depth)
        part = uint32(other // uint32(column_blocks))
        row0 = uint32(uint32(cuda.blockIdx.x) * uint32(rows_high))
        column0 = uint32(uint32(other - part * uint32(column_blocks)) * uint32(columns_wide))
        steps = uint32(uint32(depth + uint32(STEP - 1)) // uint32(STEP))
        step = uint32(uint32(steps * part) // uint32(parts))
        last = uint32(uint32(steps * uint32(part + uint32(1))) // uint32(parts))
        live_rows, live_columns = uint32(rows - row0), uint32(width - column0)
        live_rows, live_columns = min(live_rows, uint32(rows_high)), min(live_columns, uint32(columns_wide))

        row, piece = uint32(thread // uint32(PIECES)), uint32(thread % uint32(PIECES))
        swizzled = uint32(piece ^ uint32(uint32(row & uint32(1)) << uint32(2)))
        place = ptx.varying(uint32(row * uint32(STEP_BYTES) + swizzled * uint32(16)))
        between = int64(depth) * int64(2)
        x = ptx.varying_long(x + int64(uint32(row0 + row)) * between + int64(piece) * int64(16))
        weight = ptx.varying_long(weight + int64(uint32(column0 + row)) * between + int64(piece) * int64(16))

        for number in range(ahead):  # weights do not wait for the kernel before
            if uint32(step + uint32(number)) < last:
                stage, at = uint32(base + uint32(number * stage_bytes)), uint32(step + uint32(number))
                copy_weights(stage, at, weight, between, live_columns, place, depth, thread)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        for number in range(ahead):
            if uint32(step + uint32(number)) < last:
                stage, at = uint32(base + uint32(number * stage_bytes)), uint32(step + uint32(number))
                copy_rows(stage, at, x, between, live_rows, place, depth, thread)
            ptx.copies_commit()

        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        half, low, right = uint32(warp & uint32(1)), uint32(uint32(warp >> uint32(1)) & uint32(1)), warp >> uint32(2)
        group, turn = uint32(lane >> uint32(2)), uint32(lane & uint32(3))
        piece = uint32(uint32(half * uint32(4) + turn) ^ uint32(uint32(group & uint32(1)) << uint32(2)))
        along = uint32(group * uint32(STEP_BYTES) + piece * uint32(16))
        to_rows = ptx.varying(uint32(low * uint32(16 * row_tiles * STEP_BYTES) + along))
        to_columns = ptx.varying(uint32(uint32(weights_at) + right * uint32(8 * column_tiles * STEP_BYTES) + along))

        sums, here, free = zeros(), base, uint32(base + uint32(ahead * stage_bytes))
        end = uint32(base + uint32(stages * stage_bytes))
        while step < last:
            wait()
            cuda.syncthreads()  # all copies of this step are there, and everybody is done with the step before
            following = uint32(step + uint32(ahead))
            if following < last:
                copy_weights(free, following, weight, between, live_columns, place, depth, thread)
                copy_rows(free, following, x, between, live_rows, place, depth, thread)
            ptx.copies_commit()
            sums = multiply(sums, load_rows(uint32(here + to_rows)), uint32(here + to_columns))
            free = here
            here = uint32(here + uint32(stage_bytes))
            if here == end:
                here = base
            step = uint32(step + uint32(1))
        wait_for_all()
        cuda.syncthreads()

        corner = uint32(low * uint32(16 * row_tiles) + group) * uint32(pitch)
        corner = uint32(corner + uint32(right * uint32(8 * column_tiles) + turn * uint32(2)) * uint32(4))
        store_sums(uint32(base + half * uint32(rows_high * pitch) + corner), sums)
        cuda.syncthreads()
        padded = uint32(uint32(width + uint32(3)) & uint32(0xFFFFFFFC))
        number = thread
        while number < uint32(rows_high * chunks):
            row = uint32(number // uint32(chunks))
            column = uint32(uint32(number - row * uint32(chunks)) * uint32(4))
            if row < live_rows and uint32(column0 + column) < padded:
                at = uint32(base + row * uint32(pitch) + column * uint32(4))
                a, b, c, d = added(ptx.load_shared_128(at), ptx.load_shared_128(uint32(at + uint32(rows_high * pitch))))
                there = int64(part) * int64(rows) + int64(uint32(row0 + row))
                there = there * int64(padded) + int64(uint32(column0 + column))
                ptx.store_global_128(partials + there * int64(4), a, b, c, d)
            number = uint32(number + uint32(THREADS))

    name = f"narrow_gemm_{rows_high}x{columns_wide}x{stages}{'' if whole else '_ragged'}"
    signature = (*(types.int64,) * 3, *(types.int32,) * 5)
    return Kernel(name, narrow, signature, THREADS, 2, plan.shared_bytes)


@cache
def _make_sum(parts: int, biased: bool, aligned: bool) -> Kernel:
    """A thread adds the parts of four columns of a row. aligned: rows of out are multiples of 16 bytes."""

    @device_function
    def biases(bias: Any, column: Any, width: Any) -> Any:
        """Of four columns, the last one's again after the last."""
        end = uint32(width - uint32(1))
        return (
            ptx.load_global_bf16(bias + int64(column) * int64(2)),
            ptx.load_global_bf16(bias + int64(min(uint32(column + uint32(1)), end)) * int64(2)),
            ptx.load_global_bf16(bias + int64(min(uint32(column + uint32(2)), end)) * int64(2)),
            ptx.load_global_bf16(bias + int64(min(uint32(column + uint32(3)), end)) * int64(2)),
        )

    def narrow_sum(partials: Any, bias: Any, out: Any, rows: Any, width: Any) -> None:
        number = uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        rows, width = uint32(rows), uint32(width)
        chunks = uint32(uint32(width + uint32(3)) >> uint32(2))
        row = uint32(number // chunks)
        column = uint32(uint32(number - row * chunks) * uint32(4))
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        if row < rows:
            at = partials + int64(number) * int64(16)
            sums = load_four(at)
            for part in range(1, parts):
                sums = add_four(sums, load_four(at + int64(part) * int64(rows) * int64(chunks) * int64(16)))
            if biased:
                sums = add_four(sums, biases(bias, column, width))
            target = out + (int64(row) * int64(width) + int64(column)) * int64(4)
            a, b, c, d = sums
            if aligned:
                ptx.store_global_128(
                    target, ptx.bits_of_float(a), ptx.bits_of_float(b), ptx.bits_of_float(c), ptx.bits_of_float(d)
                )
            else:
                ptx.store_global_f32(target, a)
                if uint32(column + uint32(1)) < width:
                    ptx.store_global_f32(target + int64(4), b)
                if uint32(column + uint32(2)) < width:
                    ptx.store_global_f32(target + int64(8), c)
                if uint32(column + uint32(3)) < width:
                    ptx.store_global_f32(target + int64(12), d)

    name = f"narrow_sum_{parts}{'_bias' if biased else ''}{'' if aligned else '_odd'}"
    return Kernel(name, narrow_sum, (*(types.int64,) * 3, *(types.int32,) * 2), THREADS)


def examples(gpu: Gpu = H200) -> list[Kernel]:
    """Specialisations, as a GPU has them: 27B's gates of many rows and of few, a router of 256 experts; sums."""
    cases = ((2048, 96, 5120), (128, 96, 5120), (2048, 256, 2048))
    made = [_make(plan_narrow(*case, gpu), True) for case in cases]
    return [*made, _make(NarrowPlan(32, 48, 3), False), _make_sum(4, False, True), _make_sum(4, True, False)]
