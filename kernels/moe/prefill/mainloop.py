"""This module has the mainloop of a grouped GEMM: 32 weight rows a warp times a tile of pairs, columns in one order.

The block shares the inputs of a step. The 16-byte pieces of each pair's 128 bytes are permuted, so that lanes have no
bank conflicts. A warp's weights are used by its own lanes only. The weights' format decodes them to exact bf16 in
registers. So every pair's sums are those of plain weights, with any other pairs and in tiles of any size.
"""

from typing import Any

from lowlat.kernels.moe.plan import GATE_UP, ExpertShape
from lowlat.kernels.moe.prefill.plan import PAIR_BYTES, STEP_ROW_BYTES, SUM_PITCH, WARP_TILES, GroupedPlan
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, uint32

__all__ = ["make_begin", "make_multiply_tile", "make_store_sums"]

ROW_PIECES = STEP_ROW_BYTES // 16


def _make_multiply_half(plan: GroupedPlan) -> Any:
    """A function: add 32 columns of two weight tiles to a warp's sums, as far as pairs are live.

    It takes the sums, two rows' words of each tile (the row in the upper half, that in the lower one), the address of
    the lane's inputs and how many pairs there are.
    """
    return _make_multiply_from(plan, 0)


def _make_multiply_from(plan: GroupedPlan, first: int) -> Any:
    """From a tile of pairs on."""
    tiles, skip = plan.pair_tiles, plan.skip
    total = WARP_TILES * tiles
    load_rows = ptx.load_shared_tiles(skip, 8 * STEP_ROW_BYTES)
    low0, high0 = (ptx.mma_bf16_tiles(total, first, skip, word) for word in (0, 2))
    low1, high1 = (ptx.mma_bf16_tiles(total, tiles + first, skip, word) for word in (0, 2))
    is_last = first + skip >= tiles
    multiply_rest: Any = None if is_last else _make_multiply_from(plan, first + skip)

    @device_function
    def multiply(sums: Any, a: Any, b: Any, c: Any, d: Any, rows: Any, live: Any) -> Any:
        if live > uint32(8 * first):
            words = load_rows(uint32(rows + uint32(8 * first * STEP_ROW_BYTES)))
            sums = low0(sums, a[0], b[0], a[1], b[1], words)
            sums = low1(sums, c[0], d[0], c[1], d[1], words)
            sums = high0(sums, a[2], b[2], a[3], b[3], words)
            sums = high1(sums, c[2], d[2], c[3], d[3], words)
            if not is_last:
                sums = multiply_rest(sums, a, b, c, d, rows, live)
        return sums

    return multiply


def _scale_pitch(shape: ExpertShape) -> int:
    """Bytes from a tile's scales to the next one's; without scales there are addresses all the same, never read."""
    return shape.scale_bytes or 32


def make_begin(shape: ExpertShape, plan: GroupedPlan) -> Any:
    """A function: where a lane's words and scales of its warp's two weight tiles begin, and of them the first tile.

    Tiles that there are not are the last one instead, and nobody stores their sums. Addresses are made so that the
    assembler keeps them: it would make each again in every step.
    """
    tiles, steps, step_bytes, warps = shape.tiles, shape.tile_steps, shape.step_bytes, plan.warps
    pitch = _scale_pitch(shape)
    scale_pieces = pitch // 16
    paired = tiles % WARP_TILES == 0

    @device_function
    def begin(weight: Any, scales: Any, expert: Any, row_block: Any, warp: Any, lane: Any) -> Any:
        first = uint32(uint32(row_block * uint32(warps) + warp) * uint32(WARP_TILES))
        own = uint32(expert * uint32(tiles) + min(first, uint32(tiles - WARP_TILES if paired else tiles - 1)))
        second = uint32(own + uint32(1))
        if not paired:
            second = uint32(expert * uint32(tiles) + min(uint32(first + uint32(1)), uint32(tiles - 1)))
        along = int64(uint32(lane * uint32(16)))
        words = ptx.varying_long(weight + int64(own) * int64(steps * step_bytes) + along)
        second_words = words + int64(steps * step_bytes)
        if not paired:
            second_words = ptx.varying_long(weight + int64(second) * int64(steps * step_bytes) + along)
        powers = scales + int64(own if lane < uint32(scale_pieces) else second) * int64(steps * pitch)
        powers = ptx.varying_long(powers + int64(uint32(uint32(lane % uint32(scale_pieces)) * uint32(16))))
        return words, second_words, powers, first

    return begin


def _make_places(shape: ExpertShape, plan: GroupedPlan) -> Any:
    """A device function that returns a thread's offsets in a stage: of its first input piece, its words, its scales."""
    words_at, scales_at = plan.words_at(), plan.scales_at(shape)
    step_bytes, pitch = shape.step_bytes, _scale_pitch(shape)

    @device_function
    def places(thread: Any) -> Any:
        row, piece = uint32(thread // uint32(ROW_PIECES)), uint32(thread % uint32(ROW_PIECES))
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        swizzled = uint32(piece ^ uint32(uint32(row & uint32(1)) << uint32(2)))
        return (
            ptx.varying(uint32(row * uint32(STEP_ROW_BYTES) + swizzled * uint32(16))),
            ptx.varying(uint32(uint32(words_at) + warp * uint32(WARP_TILES * step_bytes) + lane * uint32(16))),
            ptx.varying(uint32(uint32(scales_at) + warp * uint32(WARP_TILES * pitch) + lane * uint32(16))),
        )

    return places


def _make_issue(shape: ExpertShape, plan: GroupedPlan) -> Any:
    """A device function that copies one step's inputs and weights to a stage, asynchronously."""
    turns, rows_a_turn = -(-plan.pairs * ROW_PIECES // plan.threads), plan.threads // ROW_PIECES
    depth, step_bytes, pitch = shape.columns, shape.step_bytes, _scale_pitch(shape)
    has_scales, pieces, whole = shape.format.has_scales, step_bytes // 512, depth % 64 == 0

    @device_function
    def issue(stage: Any, step: Any, x: Any, inputs: Any, weights: Any, places: Any, live: Any, thread: Any) -> None:
        row = uint32(thread // uint32(ROW_PIECES))
        column = uint32(step * uint32(64) + uint32(thread % uint32(ROW_PIECES)) * uint32(8))
        place, mine = uint32(stage + places[0]), uint32(stage + places[1])
        x = x + int64(step) * int64(STEP_ROW_BYTES)
        for turn in range(turns):
            if uint32(row + uint32(turn * rows_a_turn)) < live:
                target = uint32(place + uint32(turn * rows_a_turn * STEP_ROW_BYTES))
                source = x + int64(inputs[turn]) * int64(16)
                if whole or column < uint32(depth):
                    ptx.copy_async_16(target, source)
                else:
                    ptx.copy_async_16_or_zero(target, x, uint32(0))
        words, second_words, powers, _ = weights
        at = int64(step) * int64(step_bytes)
        for part in range(pieces):
            ptx.copy_async_16_once(uint32(mine + uint32(part * 512)), words + at + int64(part * 512))
        for part in range(pieces):
            there = uint32(mine + uint32(step_bytes + part * 512))
            ptx.copy_async_16_once(there, second_words + at + int64(part * 512))
        if has_scales:
            wanted = uint32(1) if uint32(thread & uint32(31)) < uint32(WARP_TILES * pitch // 16) else uint32(0)
            source = powers + int64(step) * int64(pitch)
            ptx.copy_async_16_once_if(uint32(stage + places[2]), source, wanted)

    return issue


def _make_find_inputs(shape: ExpertShape, plan: GroupedPlan) -> Any:
    """A device function that finds, by the list of pairs, the places of a thread's input pieces, in pieces."""
    turns, rows_a_turn = -(-plan.pairs * ROW_PIECES // plan.threads), plan.threads // ROW_PIECES
    row_pieces, top_k = (shape.pitch or shape.columns) // 8, shape.top_k if shape.kind == GATE_UP else 1

    @device_function
    def find_inputs(inputs: Any, pairs: Any, live: Any, thread: Any) -> None:
        row, piece = uint32(thread // uint32(ROW_PIECES)), uint32(thread % uint32(ROW_PIECES))
        for turn in range(turns):
            number, pair = uint32(row + uint32(turn * rows_a_turn)), uint32(0)
            if number < live:
                pair = ptx.load_shared_u32(uint32(pairs + number * uint32(PAIR_BYTES)))
            inputs[turn] = ptx.varying(uint32(uint32(pair // uint32(top_k)) * uint32(row_pieces) + piece))

    return find_inputs


def make_multiply_tile(shape: ExpertShape, plan: GroupedPlan) -> Any:
    """A function of a block: each warp's sums of its weight rows and the tile's pairs; nothing is under way after it.

    It takes the addresses of shared memory and of the list of pairs there, of the inputs, what `make_begin` gives,
    whether the warp has weight rows, how many pairs there are, and the thread.
    """
    steps, stages, stage_bytes = shape.steps, plan.stages, plan.stage_bytes(shape)
    scales_at, pitch = plan.scales_at(shape), _scale_pitch(shape)
    turns, ahead = -(-plan.pairs * ROW_PIECES // plan.threads), plan.stages - 1
    find_inputs, issue = _make_find_inputs(shape, plan), _make_issue(shape, plan)
    multiply, make_places = shape.format.prefill_fragment(_make_multiply_half(plan)), _make_places(shape, plan)
    zeros, wait, wait_for_all = ptx.zeros(8 * plan.pair_tiles), ptx.copies_wait(stages - 2), ptx.copies_wait(0)

    @device_function
    def multiply_tile(base: Any, pairs: Any, x: Any, weights: Any, has_rows: Any, live: Any, thread: Any) -> Any:
        inputs, places = cuda.local.array(turns, uint32), make_places(thread)
        find_inputs(inputs, pairs, live, thread)
        for number in range(ahead):
            if number < steps:
                stage = uint32(base + uint32(number * stage_bytes))
                issue(stage, uint32(number), x, inputs, weights, places, live, thread)
            ptx.copies_commit()
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        group = uint32(lane >> uint32(2))
        piece = uint32(uint32(lane & uint32(3)) ^ uint32(uint32(group & uint32(1)) << uint32(2)))
        to_rows = ptx.varying(uint32(group * uint32(STEP_ROW_BYTES) + piece * uint32(16)))
        to_later = ptx.varying(uint32(to_rows ^ uint32(64)))
        to_scales = uint32(uint32(scales_at) + warp * uint32(WARP_TILES * pitch) + group * uint32(4))
        to_scales = ptx.varying(to_scales)
        sums, step = zeros(), uint32(0)
        here, free = base, uint32(base + uint32(ahead * stage_bytes))
        end = uint32(base + uint32(stages * stage_bytes))
        while step < uint32(steps):
            wait()
            cuda.syncthreads()  # all copies of this step are there, and everybody is done with the step before
            if uint32(step + uint32(ahead)) < uint32(steps):
                issue(free, uint32(step + uint32(ahead)), x, inputs, weights, places, live, thread)
            ptx.copies_commit()
            if has_rows:
                rows, later_rows = uint32(here + to_rows), uint32(here + to_later)
                sums = multiply(sums, uint32(here + places[1]), uint32(here + to_scales), rows, later_rows, live)
            free = here
            here = uint32(here + uint32(stage_bytes))
            if here == end:
                here = base
            step = uint32(step + uint32(1))
        wait_for_all()
        cuda.syncthreads()
        return sums

    return multiply_tile


def make_store_sums(plan: GroupedPlan) -> Any:
    """A function: a lane's sums to its warp's area, [pair][32 rows], a pair's rows `SUM_PITCH` bytes after the last's.

    It takes the area's address, the lane and the sums.
    """
    tiles = plan.pair_tiles
    total, offsets = WARP_TILES * tiles, (0, SUM_PITCH, 32, SUM_PITCH + 32)
    store0, store1 = (ptx.store_shared_tiles(total, first, tiles, offsets, 8 * SUM_PITCH) for first in (0, tiles))

    @device_function
    def store_sums(area: Any, lane: Any, sums: Any) -> None:
        corner = uint32((lane & uint32(3)) * uint32(2 * SUM_PITCH) + (lane >> uint32(2)) * uint32(4))
        place = uint32(area + corner)
        store0(place, sums)
        store1(uint32(place + uint32(64)), sums)

    return store_sums
