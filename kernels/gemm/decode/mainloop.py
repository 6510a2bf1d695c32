"""In the mainloop of a decode GEMM warps copy a block's tiles of weights, multiply them, and store partial sums.

A warp reads only data that its own lanes copied, so its pipeline needs no barrier of the block. If a block holds all of
its rows, they are there before the mainloop begins.
"""

from typing import Any

from lowlat.kernels.common.pipeline import Pipeline
from lowlat.kernels.formats.fragment import fragment_of
from lowlat.kernels.gemm.decode.group_product import make_group_product
from lowlat.kernels.gemm.decode.plan import PAD, SUM_BYTES, WARPS, DecodeGemmPlan, DecodeGemmShape
from lowlat.kernels.gemm.k_parts import make_part_of_warp
from lowlat.kernels.gemm.tiles import WORD_BYTES
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, uint32

WARP = 32  # lanes

__all__ = [
    "make_fill",
    "make_issue_rows",
    "make_issue_weights",
    "make_multiply",
    "make_multiplying",
    "make_store",
    "make_to_words",
]


def make_fill(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Any:
    """A function of a warp that fills its stages with weights, throttled; it returns the place of the next tile, the
    next step, and the number of full stages."""
    filling = WARPS if shape.parts is not None else min(WARPS, shape.steps)  # a shallow weight has no step for others
    tiles, stages, throttle = plan.groups(shape.width), plan.stages, plan.throttle * WARPS // filling
    stage_bytes, hold_back, stride = plan.stage_bytes, ptx.copies_wait(throttle - 1), _stride(shape, plan)
    steps, by_bytes = shape.steps, _counts_bytes(shape, plan)
    offset_of_words, issue_weights = make_issue_weights(shape, plan, by_bytes=by_bytes)
    steps_of, cut = _make_steps_of(shape), shape.parts is not None
    place_of_tile, tile_bytes = _make_place_of_tile(shape, plan)
    end_tile, again = tiles * tile_bytes, _make_again(shape, plan)

    @device_function
    def fill(mine: Any, weight: Any, warp: Any, lane: Any) -> Any:
        first, end, own = warp, uint32(steps), uint32(0)
        if cut:
            first, end, own = steps_of(warp)
        tile, step, filled = place_of_tile(uint32(cuda.blockIdx.x), lane), first, 0
        offset = offset_of_words(lane)
        for number in range(stages):
            if step < end and tile < uint32(end_tile):
                issue_weights(mine + uint32(number * stage_bytes), weight, tile, own, step, lane, offset)
                filled = number + 1
                step = uint32(step + uint32(stride))
                if step >= end:
                    step, tile = again(step, first), uint32(tile + uint32(cuda.gridDim.x) * uint32(tile_bytes))
            ptx.copies_commit()
            if throttle - 1 <= number < stages - 1:
                hold_back()
        return tile, step, filled

    return fill


def make_multiplying(shape: DecodeGemmShape, plan: DecodeGemmPlan, pipeline: Pipeline) -> Any:
    """A function of a warp, after `make_fill`'s: it computes its sums of all tiles of a block for the epilogue's warps.

    mine, held  addresses of its stages, and of the block's held rows, at the lane's first bytes
    ahead       the result of `make_fill`'s function: the place of the next tile, the next step, and the full stages
    """
    tiles, span, stride, steps = plan.groups(shape.width), plan.span, _stride(shape, plan), shape.steps
    cut, steps_of = shape.parts is not None, _make_steps_of(shape)
    stages, stage_bytes, sum_bytes, rows_bytes = plan.stages, plan.stage_bytes, plan.sum_bytes, plan.rows_bytes
    step_bytes, next_rows = plan.step_bytes, WARPS * rows_bytes if plan.steps_held else plan.step_bytes
    offset_of_words, issue_weights = make_issue_weights(shape, plan, by_bytes=_counts_bytes(shape, plan))
    offsets_of_rows, issue_rows = make_issue_rows(shape, plan)
    multiply, store, weight_tiles, columns = (
        make_multiply(shape, plan),
        make_store(plan),
        plan.weight_tiles,
        plan.columns,
    )
    holds, ragged = plan.steps_held > 0, plan.is_ragged(steps)
    parts_whole = ragged and span > 2  # most turns have all steps
    shares = _shares_words(shape, plan)
    shared = (columns < 8 and not holds) or shares  # lanes read rows or words that others copied
    await_free, give, after = pipeline.await_free, pipeline.give, pipeline.after
    words_of_lane, next_words = make_to_words(shape, plan), shape.weights.words * WORD_BYTES if shares else step_bytes
    tile_bytes, again = _make_place_of_tile(shape, plan)[1], _make_again(shape, plan)
    end_tile, wait, zeros = (
        tiles * tile_bytes,
        ptx.copies_wait(stages - 1),
        ptx.zeros(4 * weight_tiles * plan.row_tiles),
    )

    @device_function
    def multiply_tiles(
        mine: Any, held: Any, totals: Any, barriers: Any, weight: Any, x: Any, count: Any, ahead: Any, thread: Any
    ) -> None:
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        blocks, between = uint32(cuda.gridDim.x), uint32(uint32(cuda.gridDim.x) * uint32(tile_bytes))
        first, end_step, own = warp, uint32(steps), uint32(0)
        if cut:
            first, end_step, own = steps_of(warp)
        ahead_tile, ahead_step, filled = ahead
        in_rows = uint32((lane >> uint32(2)) % uint32(columns)) * uint32(64) + (lane & uint32(3)) * uint32(16)
        to_rows = uint32(in_rows - lane * uint32(16))
        to_words = words_of_lane(lane)
        corner = (lane & uint32(3)) * uint32(2 * PAD) + (lane >> uint32(2))
        step = first
        word_offset, row_offsets = offset_of_words(lane), offsets_of_rows(lane)
        if not holds:
            for number in range(stages):
                if number < filled:
                    issue_rows(mine + uint32(number * stage_bytes), x, step, lane, count, row_offsets)
                    step = uint32(step + uint32(stride))
                    if step >= end_step:
                        step = first
                ptx.copies_commit()
        here, end = uint32(mine), uint32(mine + uint32(stages * stage_bytes))
        tile, area, parity = uint32(cuda.blockIdx.x), uint32(0), uint32(1)
        while tile < uint32(tiles):
            sums = zeros()
            step = first
            while step < end_step:
                wait()
                if shared:
                    ptx.sync_warp()
                rows = uint32(held + in_rows + step * uint32(rows_bytes)) if holds else uint32(here + to_rows)
                if parts_whole and uint32(step + uint32((span - 1) * WARPS)) < end_step:
                    for part in range(span):  # without a condition between them, steps' instructions are interleaved
                        place = uint32(here + uint32(part * step_bytes))
                        words = uint32(uint32(here + to_words) + uint32(part * next_words))
                        sums = multiply(sums, place, uint32(rows + uint32(part * next_rows)), words)
                else:
                    for part in range(span):
                        place = uint32(here + uint32(part * step_bytes))
                        if not ragged or uint32(step + uint32(part * WARPS)) < end_step:
                            words = uint32(uint32(here + to_words) + uint32(part * next_words))
                            sums = multiply(sums, place, uint32(rows + uint32(part * next_rows)), words)
                if shared:
                    ptx.sync_warp()
                if ahead_tile < uint32(end_tile):
                    issue_weights(here, weight, ahead_tile, own, ahead_step, lane, word_offset)
                    if not holds:
                        issue_rows(here, x, ahead_step, lane, count, row_offsets)
                    ahead_step = uint32(ahead_step + uint32(stride))
                    if ahead_step >= end_step:
                        ahead_step, ahead_tile = again(ahead_step, first), uint32(ahead_tile + between)
                ptx.copies_commit()
                here = uint32(here + uint32(stage_bytes))
                if here == end:
                    here = uint32(mine)
                step = uint32(step + uint32(stride))
            for part in range(weight_tiles):
                place = totals + area * uint32(WARPS * sum_bytes) + warp * uint32(sum_bytes) + corner * uint32(4)
                await_free(barriers, area, parity)
                store(part, place, sums)
                give(barriers, area, lane)
                area, parity = after(area, parity)
            tile = uint32(tile + blocks)

    return multiply_tiles


def _make_place_of_tile(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> tuple[Any, int]:
    """A function of a group of tiles and a lane that returns the place of its copies; and the distance of two groups.

    For four-bit weights, with one tile at once, a place is an offset in bytes, the lane's included: a copy's address
    then takes one multiplication and one addition. For others it is the group's number.
    """
    tile_bytes = shape.steps * shape.weights.step_bytes
    if not _counts_bytes(shape, plan):

        @device_function
        def number(tile: Any, _lane: Any) -> Any:
            return tile

        return number, 1

    @device_function
    def place(tile: Any, lane: Any) -> Any:
        return uint32(tile * uint32(tile_bytes) + lane * uint32(16))

    return place, tile_bytes


def _make_again(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Any:
    """A function (step after a warp's last one in a tile, its first one) -> the first step of the next tile."""
    steps = shape.steps
    if _counts_bytes(shape, plan) and steps % _stride(shape, plan) == 0:

        @device_function
        def as_far_back(step: Any, _first: Any) -> Any:
            return uint32(step - uint32(steps))

        return as_far_back

    @device_function
    def as_before(_step: Any, first: Any) -> Any:
        return first

    return as_before


def _shares_words(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> bool:
    """Whether a warp's lanes read words that other lanes copied."""
    return shape.weights.words > 0 and plan.row_tiles == 1


def make_to_words(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Any:
    """A function of a lane: the offset from its codes to the words that it reads."""
    code_bytes, own_bytes = shape.weights.code_bytes, shape.weights.words * WORD_BYTES
    shares = _shares_words(shape, plan)

    @device_function
    def to_words(lane: Any) -> Any:
        rows = uint32(uint32(code_bytes) - lane * uint32(16) + uint32(lane >> uint32(2)) * uint32(4))
        return rows if shares else uint32(rows + uint32(lane & uint32(3)) * uint32(own_bytes))

    return to_words


def _counts_bytes(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> bool:
    """Whether places are offsets in bytes: for four-bit weights with one tile at once, if they fit in 32 bits."""
    few = plan.row_tiles == 1
    most = (plan.groups(shape.width) + plan.num_blocks) * shape.steps * shape.weights.step_bytes
    return few and shape.weights.code_bits == 4 and plan.weight_tiles == plan.sets == 1 and most < 1 << 32


def _stride(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> int:
    """The distance of a warp's steps."""
    return WARPS * plan.span if shape.parts is None else plan.span


def _make_steps_of(shape: DecodeGemmShape) -> Any:
    """A function of a warp: its first step, the step after its last, and its set of tiles."""
    steps, parts = shape.steps, shape.parts
    if parts is None:

        @device_function
        def in_turn(warp: Any) -> Any:
            return warp, uint32(steps), uint32(0)

        return in_turn
    return make_part_of_warp(parts, steps)


def make_store(plan: DecodeGemmPlan) -> Any:
    """A function that stores a lane's sums of a weight tile in an area of partial sums."""
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


def make_issue_weights(shape: DecodeGemmShape, plan: DecodeGemmPlan, *, by_bytes: bool = False) -> tuple[Any, Any]:
    """Two functions of a warp: the offset of a lane's copies of words, and the copies of a stage's weights.

    The second copies a stage's K steps of a group of weight tiles. Each lane copies its own codes, from its place in
    shared memory on, and the words after the codes. With few rows all lanes together copy the words, 16 bytes a lane,
    from the offset that the first function returns; the words of all steps of a stage lie side by side, after the codes
    of the first. With more rows each lane copies its own words, since a barrier takes registers.
    by_bytes  whether tiles are given by offsets in bytes, see `_make_place_of_tile`; False: by numbers
    """
    weight_tiles, shared_bytes, span, stage_step = plan.weight_tiles, plan.tile_bytes, plan.span, plan.step_bytes
    step_bytes, tile_bytes = shape.weights.step_bytes, shape.steps * shape.weights.step_bytes
    apart, code_bytes, words = WARPS * shape.weights.step_bytes, shape.weights.code_bytes, shape.weights.words
    last, quarters, sets = -(-shape.width // 16) - 1, shape.weights.code_bytes // 512, plan.sets
    steps, ragged = shape.steps, plan.is_ragged(shape.steps)
    shares = _shares_words(shape, plan)
    to_words = make_to_words(shape, plan)
    chunks = 2 * max(words, 1)  # of 16 bytes, of the words of a step
    at_once, used = WARP // chunks, WARP // chunks * chunks  # steps whose words a warp copies at once, by so many lanes

    @device_function
    def offset_of_words(lane: Any) -> Any:
        part, chunk = uint32(lane // uint32(chunks)), uint32(lane % uint32(chunks))
        own = lane * uint32(16) if by_bytes else uint32(0)  # that the tile's place has
        return ptx.kept(uint32(part * uint32(apart) + chunk * uint32(16) + uint32(code_bytes) - own))

    @device_function
    def no_offset(_lane: Any) -> Any:
        return uint32(0)

    @device_function
    def issue_step(place: Any, start: Any, lane: Any) -> None:
        source = start + int64(lane) * 16
        for quarter in range(quarters):
            ptx.copy_async_16_once(place + uint32(quarter * 512), source + quarter * 512)
        if not shares:
            target = uint32(place + to_words(lane))
            for word in range(words):
                at = start + code_bytes + word * WORD_BYTES + int64(lane >> uint32(2)) * 4
                ptx.copy_async_4(uint32(target + uint32(word * WORD_BYTES)), at)

    @device_function
    def issue_words(place: Any, start: Any, step: Any, lane: Any, offset: Any) -> None:
        source = start + int64(offset)
        for first in range(0, span, at_once):
            wanted = lane < uint32(min(used, (span - first) * chunks))
            if ragged:
                part = uint32(uint32(lane // uint32(chunks)) + uint32(first))
                wanted = wanted and uint32(step + part * uint32(WARPS)) < uint32(steps)
            target = uint32(place + uint32(code_bytes + first * chunks * 16))
            ptx.copy_async_16_once_if(target, source + int64(first * apart), uint32(wanted))

    @device_function
    def issue_steps(target: Any, start: Any, step: Any, lane: Any) -> None:
        issue_step(target, start, lane)
        if span > 1 and (not ragged or step + uint32(WARPS) < uint32(steps)):
            issue_step(uint32(target + uint32(stage_step)), start + int64(apart), lane)
        if span > 2 and (not ragged or step + uint32(2 * WARPS) < uint32(steps)):
            issue_step(uint32(target + uint32(2 * stage_step)), start + int64(2 * apart), lane)
        if span > 2 and (not ragged or step + uint32(3 * WARPS) < uint32(steps)):
            issue_step(uint32(target + uint32(3 * stage_step)), start + int64(3 * apart), lane)

    def issue(place: Any, weight: Any, tile: Any, own: Any, step: Any, lane: Any, offset: Any) -> None:
        for part in range(weight_tiles):
            # the last group may have fewer tiles: it copies the last one again, and these sums are not read
            number = uint32(tile * uint32(weight_tiles) + uint32(part))
            if sets > 1:
                number = uint32(number * uint32(sets) + own)
            number = min(number, uint32(last))
            start = weight + int64(number) * int64(tile_bytes) + int64(step) * int64(step_bytes)
            target = uint32(place + uint32(part * shared_bytes))
            issue_steps(target, start, step, lane)
            if shares:
                issue_words(target, start, step, lane, offset)

    def issue_from(place: Any, weight: Any, tile: Any, _own: Any, step: Any, lane: Any, offset: Any) -> None:
        start = weight + int64(uint32(tile + step * uint32(step_bytes)))
        issue_words(place, start, step, lane, offset)  # first: of a condition that ends a block, a branch is made
        issue_steps(place, start, step, uint32(0))

    issuing = issue_from if by_bytes else issue
    return offset_of_words if shares else no_offset, device_function(issuing)


def make_issue_rows(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> tuple[Any, Any]:
    """Two functions of a warp: a lane's offsets, from the rows' stride in bytes, and the copies of a stage's rows.

    Rows that do not exist are not copied: undefined values then go to columns of the output that are never read.
    """
    if plan.columns < 8 and shape.weights.code_bits == 4:
        return _make_issue_few_rows(shape, plan)
    depth, row_tiles, offset = shape.depth, plan.row_tiles, plan.weight_tiles * plan.tile_bytes
    rows_bytes, half_bytes, span, step_bytes = plan.rows_bytes, plan.rows_bytes // 2, plan.span, plan.step_bytes
    steps, ragged = shape.steps, plan.is_ragged(shape.steps)

    @device_function
    def no_offsets(_lane: Any) -> Any:
        return uint32(0), uint32(0)

    @device_function
    def issue_step(place: Any, x: Any, column: Any, lane: Any, count: Any) -> None:
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

    def issue(place: Any, x: Any, step: Any, lane: Any, count: Any, _offsets: Any) -> None:
        column = int64(step) * 64 + int64(lane & uint32(3)) * 8
        issue_step(place, x, column, lane, count)
        if span > 1 and (not ragged or step + uint32(WARPS) < uint32(steps)):
            issue_step(uint32(place + uint32(step_bytes)), x, column + WARPS * 64, lane, count)
        if span > 2 and (not ragged or step + uint32(2 * WARPS) < uint32(steps)):
            issue_step(uint32(place + uint32(2 * step_bytes)), x, column + 2 * WARPS * 64, lane, count)
        if span > 2 and (not ragged or step + uint32(3 * WARPS) < uint32(steps)):
            issue_step(uint32(place + uint32(3 * step_bytes)), x, column + 3 * WARPS * 64, lane, count)

    return no_offsets, device_function(issue)


def _make_issue_few_rows(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> tuple[Any, Any]:
    """The same for one, two or four rows: every lane copies 16 bytes of some row and step, since with few bytes of
    weights the number of copy instructions matters."""
    depth, columns, offset = shape.depth, plan.columns, plan.weight_tiles * plan.tile_bytes
    span, step_bytes, steps, ragged = plan.span, plan.step_bytes, shape.steps, plan.is_ragged(shape.steps)
    chunks = 8 * columns  # of a step: four of each row's first half, then those of the second halves
    at_once, apart = WARP // chunks, WARPS * 128

    @device_function
    def offsets_of(lane: Any) -> Any:
        part, chunk = uint32(lane // uint32(chunks)), uint32(lane % uint32(chunks))
        row, half = uint32(uint32(chunk >> uint32(2)) % uint32(columns)), uint32(chunk // uint32(4 * columns))
        target = uint32(part * uint32(step_bytes) + chunk * uint32(16) + uint32(offset) - lane * uint32(16))
        within = uint32(half * uint32(64) + uint32(chunk & uint32(3)) * uint32(16))
        return ptx.kept(target), ptx.kept(uint32(row * uint32(2 * depth) + part * uint32(apart) + within))

    def issue(place: Any, x: Any, step: Any, lane: Any, count: Any, offsets: Any) -> None:
        target, source = uint32(place + offsets[0]), x + int64(uint32(step * uint32(128) + offsets[1]))
        for first in range(0, span, at_once):
            wanted = lane < uint32(min(WARP, (span - first) * chunks))
            if columns > 1:
                wanted = wanted and int64(uint32(lane >> uint32(2)) % uint32(columns)) < count
            at = uint32(step + uint32(uint32(lane // uint32(chunks)) + uint32(first)) * uint32(WARPS))
            if ragged:
                wanted = wanted and at < uint32(steps)
            to, origin = uint32(target + uint32(first * step_bytes)), source + int64(first * apart)
            if depth % 64 == 0:
                ptx.copy_async_16_if(to, origin, uint32(wanted))
            elif wanted:
                half = uint32(uint32(lane % uint32(chunks)) // uint32(4 * columns))
                column = uint32(at * uint32(64) + half * uint32(32) + uint32(lane & uint32(3)) * uint32(8))
                fits = column < uint32(depth)
                ptx.copy_async_16_or_zero(to, origin if fits else x, uint32(16) if fits else uint32(0))

    return offsets_of, device_function(issue)


def make_multiply(shape: DecodeGemmShape, plan: DecodeGemmPlan) -> Any:
    """A function that adds one K step to the accumulators of all weight and row tiles."""
    if shape.weights.groups:
        return make_group_product(shape, plan)
    weight_tiles, row_tiles = plan.weight_tiles, plan.row_tiles
    load_rows, half_bytes = ptx.load_shared_tiles(row_tiles, plan.rows_bytes), plan.rows_bytes // 2
    total = weight_tiles * row_tiles
    step_bytes, load_half = plan.tile_bytes, fragment_of(shape.weights).load_half
    rows_at = 0 if plan.steps_held else weight_tiles * step_bytes
    # the intrinsics of the first to fourth weight tile; those past the last are never called
    places = [min(part, weight_tiles - 1) * row_tiles for part in range(4)]
    low0, low1, low2, low3 = (ptx.mma_bf16_tiles(total, place, row_tiles, 0) for place in places)
    high0, high1, high2, high3 = (ptx.mma_bf16_tiles(total, place, row_tiles, 2) for place in places)

    def multiply(sums: Any, here: Any, rows: Any, behind: Any) -> Any:
        for half in range(2):
            words = load_rows(rows + uint32(rows_at + half * half_bytes))
            a0, a1, a2, a3, b0, b1, b2, b3 = load_half(here, half, behind)
            sums = low0(sums, a0, b0, a1, b1, words)
            sums = high0(sums, a2, b2, a3, b3, words)
            if weight_tiles > 1:
                a0, a1, a2, a3, b0, b1, b2, b3 = load_half(
                    uint32(here + uint32(step_bytes)), half, uint32(behind + uint32(step_bytes))
                )
                sums = low1(sums, a0, b0, a1, b1, words)
                sums = high1(sums, a2, b2, a3, b3, words)
            if weight_tiles > 2:
                a0, a1, a2, a3, b0, b1, b2, b3 = load_half(
                    uint32(here + uint32(2 * step_bytes)), half, uint32(behind + uint32(2 * step_bytes))
                )
                sums = low2(sums, a0, b0, a1, b1, words)
                sums = high2(sums, a2, b2, a3, b3, words)
                a0, a1, a2, a3, b0, b1, b2, b3 = load_half(
                    uint32(here + uint32(3 * step_bytes)), half, uint32(behind + uint32(3 * step_bytes))
                )
                sums = low3(sums, a0, b0, a1, b1, words)
                sums = high3(sums, a2, b2, a3, b3, words)
        return sums

    return device_function(multiply)
