"""This module has a warpgroup's share of flash attention: queries in shared memory, products, softmax, and results.

A tile's scores become weights in the same registers. The weights of the previous tile are multiplied by its values, and
the sums before it are scaled when both are ready, so that tiles are added in order.
"""

from typing import Any

from lowlat.kernels.common.pipeline import BARRIER_BYTES, Pipeline
from lowlat.kernels.gemm.prefill.activation_layout import STEP
from lowlat.kernels.toolchain import ptx, ptx_attention, ptx_hopper
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, uint32

__all__ = ["GROUP_ROWS", "make_copy", "make_finish", "make_multiply", "make_place"]

GROUP_ROWS = 64  # of a warpgroup
GROUP_THREADS = 128
ROW_BYTES, PIECE_BYTES = 128, 16
FIRST_BARRIER = 1  # of warpgroups; 0 is the block's
FULL_WARP = 0xFFFFFFFF
NOTHING = float("-inf")
LARGEST = 1e37
LOG2_E = 1.4426950408889634


def make_place(heads: int, dim: int, together: bool = False) -> Any:
    """A device function of a warpgroup that copies its 64 rows of queries to shared memory, zeros after the last.

    They are in halves of 64 columns: rows of 128 bytes, swizzled.
    together  two warpgroups read what both copied
    """
    pieces = dim * 2 // PIECE_BYTES  # of a row
    turns, half_bytes, pitch = GROUP_ROWS * pieces // GROUP_THREADS, GROUP_ROWS * ROW_BYTES, heads * dim * 2
    wait = ptx.copies_wait(0)

    @device_function
    def place_queries(target: Any, q: Any, head: Any, own: Any, rows: Any, group: Any, within: Any) -> None:
        for turn in range(turns):
            number = uint32(within + uint32(turn * GROUP_THREADS))
            row, piece = uint32(number // uint32(pieces)), uint32(number % uint32(pieces))
            index = own + int64(row)
            size = uint32(16) if index < rows else uint32(0)
            index = min(index, rows - int64(1))
            at = index * int64(pitch) + int64(uint32(head * uint32(2 * dim) + piece * uint32(PIECE_BYTES)))
            half, chosen = uint32(piece >> uint32(3)), uint32(uint32(piece ^ row) & uint32(7))
            place = uint32(half * uint32(half_bytes) + row * uint32(ROW_BYTES) + chosen * uint32(PIECE_BYTES))
            ptx.copy_async_16_or_zero(uint32(target + place), q + at, size)
        ptx.copies_commit()
        wait()
        ptx_attention.fence_copies()
        if together:
            ptx_attention.sync_two_groups(uint32(FIRST_BARRIER))
        else:
            ptx_attention.sync_group(uint32(group + uint32(FIRST_BARRIER)))

    return place_queries


@device_function
def _of_four(value: Any) -> Any:
    """Return the largest value of the four lanes that share a row."""
    value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, 1))
    return max(value, cuda.shfl_xor_sync(FULL_WARP, value, 2))


@device_function
def _all_four(value: Any) -> Any:
    """Return the sum over the four lanes that share a row."""
    value = ptx.add_rn(value, cuda.shfl_xor_sync(FULL_WARP, value, 1))
    return ptx.add_rn(value, cuda.shfl_xor_sync(FULL_WARP, value, 2))


@device_function
def _offset(peak: Any, scale: Any) -> Any:
    """Return the offset of scaled scores, minus their peak; 0 if a row has seen nothing."""
    return float32(0) if peak == float32(NOTHING) else ptx.mul_rn(-peak, scale)


def _make_weigh(keys: int, softcap: float | None) -> Any:
    """A device function that turns scores into weights; it returns them, peaks, sums, and factors of earlier sums.

    With a softcap, capped scores are scaled by log2(e); the scale then belongs to the scores before.
    """
    count, capped, limit = keys // 2, softcap is not None, softcap or 1.0
    cap = ptx_attention.cap_rows(count, limit)
    hide, largest = ptx_attention.hide(count), ptx_attention.largest_of_rows(count)
    weigh, add = ptx_attention.weigh_rows(count), ptx_attention.add_rows(count)

    @device_function
    def weigh_tile(scores: Any, peaks: Any, totals: Any, spots: Any, tile: Any, scale: Any, lane: Any) -> Any:
        low, position, window, first = spots
        if capped:
            scores = cap(scores, ptx.mul_rn(scale, float32(2.0 / limit)))
            scale = float32(LOG2_E)
        begin = int64(tile) * int64(keys)
        lowest = low + int64(GROUP_ROWS) - window if window > int64(0) else int64(0)
        if begin + int64(keys - 1) > low or begin < max(lowest, first):
            column = int64(uint32(lane & uint32(3)) * uint32(2))
            last = position - begin - column
            bound, bound_low = first, first
            if window > int64(0):
                bound = max(position - window + int64(1), first)
                bound_low = max(position - window + int64(9), first)
            bound, bound_low = bound - begin - column, bound_low - begin - column
            scores = hide(scores, int32(last), int32(bound), int32(last + int64(8)), int32(bound_low))
        top, bottom = largest(scores, peaks[0], peaks[1])
        top, bottom = _of_four(top), _of_four(bottom)
        offset, offset_low = _offset(top, scale), _offset(bottom, scale)
        factor = ptx.exp2_approx_ftz(ptx.fma_rn(peaks[0], scale, offset))
        factor_low = ptx.exp2_approx_ftz(ptx.fma_rn(peaks[1], scale, offset_low))
        weights = weigh(scores, scale, offset, offset_low)
        more, more_low = add(weights)
        totals = ptx.fma_rn(totals[0], factor, more), ptx.fma_rn(totals[1], factor_low, more_low)
        return weights, (top, bottom), totals, (factor, factor_low)

    return weigh_tile


def _make_send(tile_bytes: int, pipeline: Pipeline) -> Any:
    """A device function of the copying warp that copies a tile to a stage, once all have multiplied its content."""
    await_free = pipeline.await_free

    @device_function
    def send(place: Any, barriers: Any, source: Any, number: Any, stage: Any, parity: Any, lane: Any) -> None:
        """number: of tiles, of which a later one stands before; parity: of the stage when it is full."""
        await_free(barriers, stage, uint32(parity ^ uint32(1)))
        if lane == uint32(0):
            full = uint32(barriers + stage * uint32(BARRIER_BYTES))
            source = source - int64(number) * int64(tile_bytes)
            ptx_hopper.barrier_expect(full, uint32(tile_bytes))
            ptx_hopper.copy_bulk(uint32(place + stage * uint32(tile_bytes)), source, uint32(tile_bytes), full)
        ptx.sync_warp()

    return send


def make_copy(tile_bytes: int, pipeline: Pipeline, area: int) -> Any:
    """A device function of a warp that copies all tiles as stages become free: keys before the last tile's values."""
    stages, send, after = area // tile_bytes, _make_send(tile_bytes, pipeline), pipeline.after

    @device_function
    def copy_tiles(places: Any, barriers: Any, sources: Any, count: Any, lane: Any) -> None:
        second = uint32(barriers + uint32(stages * BARRIER_BYTES))
        stage, parity, values_stage, values_parity = uint32(0), uint32(0), uint32(0), uint32(0)
        number = uint32(0)
        while number < count:
            send(places, barriers, sources[0], number, stage, parity, lane)
            if number > uint32(0):
                before = uint32(number - uint32(1))
                send(uint32(places + uint32(area)), second, sources[1], before, values_stage, values_parity, lane)
                values_stage, values_parity = after(values_stage, values_parity)
            stage, parity = after(stage, parity)
            number = uint32(number + uint32(1))
        last = uint32(count - uint32(1))
        send(uint32(places + uint32(area)), second, sources[1], last, values_stage, values_parity, lane)

    return copy_tiles


def make_multiply(
    dim: int, keys: int, pipeline: Pipeline, area: int, parts: int = 1, softcap: float | None = None
) -> Any:
    """A device function of a warpgroup that multiplies all tiles, as a copying warp fills stages with them.

    It returns the sums of weighted values, the peaks of scores, and a lane's sums of weights.

    keys     of a tile
    area     bytes from the stages of keys to those of values
    parts    of the dimensions, of which the warpgroup has the sums of one
    softcap  c: scores become c tanh(s / c); None: they stay
    spots: the position of the group's first row, of the lane's upper row, the window and the first position.
    """
    sums_dim = dim // parts
    tile_bytes, stages = keys * dim * 2, area // (keys * dim * 2)
    await_full, release, after = pipeline.await_full, pipeline.release, pipeline.after
    begin_scores, begin_values = ptx_attention.multiply_scores(dim, keys), ptx_attention.multiply_values(sums_dim, keys)
    await_all, await_first = ptx_attention.await_scores(keys, 0), ptx_attention.await_scores(keys, 1)
    await_sums = ptx_attention.await_products(sums_dim, keys)
    zeros, pack, scale_sums = (
        ptx.zeros(sums_dim // 2),
        ptx_attention.pack_rows(keys // 2),
        ptx_attention.scale_rows(sums_dim // 2),
    )
    weigh_tile = _make_weigh(keys, softcap)
    split, part_bytes = parts > 1, keys * sums_dim * 2

    @device_function
    def values_at(places: Any, stage: Any, part: Any) -> Any:
        at = uint32(places + uint32(area) + stage * uint32(tile_bytes))
        return uint32(at + part * uint32(part_bytes)) if split else at

    @device_function
    def multiply(
        queries: Any, places: Any, barriers: Any, spots: Any, tile: Any, count: Any, scale: Any, lane: Any, part: Any
    ) -> Any:  # fmt: skip
        second = uint32(barriers + uint32(stages * BARRIER_BYTES))
        stage, parity = uint32(0), uint32(0)
        nothing = (float32(NOTHING), float32(NOTHING))
        await_full(barriers, stage, parity)
        scores = await_all(begin_scores(queries, places))
        release(barriers, stage, lane)
        weights, peaks, totals, _ = weigh_tile(
            scores, nothing, (float32(0), float32(0)), spots, tile, scale, lane
        )  # fmt: skip
        words, sums, done = pack(weights), zeros(), uint32(1)
        later, later_parity = after(stage, parity)
        if done < count:
            await_full(barriers, later, later_parity)
        while done < count:
            scores = begin_scores(queries, uint32(places + later * uint32(tile_bytes)))
            await_full(second, stage, parity)
            sums = begin_values(sums, words, values_at(places, stage, part))
            scores = await_first(scores)
            release(barriers, later, lane)
            weights, peaks, totals, factors = weigh_tile(
                scores, peaks, totals, spots, uint32(tile - done), scale, lane
            )  # fmt: skip
            done, before = uint32(done + uint32(1)), stage
            stage, parity = later, later_parity
            later, later_parity = after(later, later_parity)
            if done < count:  # a loop here also keeps the assembler from awaiting sums before it has begun the weights
                await_full(barriers, later, later_parity)
            sums = await_sums(sums, words)
            release(second, before, lane)
            if ptx.ballot(uint32(factors[0] != float32(1) or factors[1] != float32(1))) != uint32(0):
                sums = scale_sums(sums, factors[0], factors[1])
            words = pack(weights)
        await_full(second, stage, parity)
        sums = begin_values(sums, words, values_at(places, stage, part))
        sums = await_sums(sums, words)
        return sums, peaks, totals

    return multiply


def _make_store(heads: int, dim: int) -> Any:
    """A device function of a warpgroup that stores a lane's words of its two rows, row by row."""
    pitch = heads * dim * 2
    store, store_low = (ptx_attention.store_row(dim // 4, half) for half in (0, 1))

    @device_function
    def store_rows(out: Any, head: Any, row: Any, rows: Any, lane: Any, words: Any) -> None:
        column = uint32(head * uint32(2 * dim) + uint32(lane & uint32(3)) * uint32(4))
        at = out + row * int64(pitch) + int64(column)
        if row < rows:
            store(at, words)
        if row + int64(8) < rows:
            store_low(at + int64(8 * pitch), words)

    return store_rows


def _make_places(dim: int) -> Any:
    """A device function of a lane that returns the addresses of its pieces of a row, two a step of one, two or four.

    at     of the row in a head's first step
    piece  bytes to its first piece there
    pitch  bytes from step to step
    """

    @device_function
    def places_of_one(at: Any, piece: Any, pitch: Any) -> Any:
        return at + int64(piece), at + int64(uint32(piece ^ uint32(4 * PIECE_BYTES)))

    @device_function
    def places_of_two(at: Any, piece: Any, pitch: Any) -> Any:
        first, second = places_of_one(at, piece, pitch)
        return first, second, first + pitch, second + pitch

    @device_function
    def places_of_four(at: Any, piece: Any, pitch: Any) -> Any:
        return places_of_two(at, piece, pitch) + places_of_two(at + int64(2) * pitch, piece, pitch)

    return {STEP: places_of_one, 2 * STEP: places_of_two, 4 * STEP: places_of_four}[dim]


def _make_store_arranged(dim: int) -> Any:
    """A device function of a warpgroup that stores a lane's words of its two rows in the order of `arrange`.

    A head has whole steps. Of every 32 columns a lane has exactly the words of one piece.
    """
    store, store_low = (ptx_attention.store_pieces(dim // 4, half) for half in (0, 1))
    places_of, steps = _make_places(dim), dim // STEP

    @device_function
    def store_rows(out: Any, head: Any, row: Any, rows: Any, lane: Any, words: Any) -> None:
        pitch = rows * int64(ROW_BYTES)
        at = out + int64(uint32(head * uint32(steps))) * pitch + row * int64(ROW_BYTES)
        swizzled = uint32(uint32(uint32(row) & uint32(7)) ^ uint32(lane & uint32(3)))  # of the row 8 below, too
        piece = uint32(swizzled * uint32(PIECE_BYTES))
        if row < rows:
            store(places_of(at, piece, pitch), words)
        if row + int64(8) < rows:
            store_low(places_of(at + int64(8 * ROW_BYTES), piece, pitch), words)

    return store_rows


def make_finish(heads: int, dim: int, sink_bytes: int, arranged: bool, parts: int = 1) -> Any:
    """A device function of a warpgroup that divides its sums by those of the weights, and stores them as bf16.

    parts       of a head, each stored as if it were one, of `dim` numbers
    sink_bytes  of a head's sink; 0: there are none
    arranged    rows are stored as a prefill GEMM reads them
    """
    scale_sums, pack = ptx_attention.scale_rows(dim // 2), ptx_attention.pack_rows(dim // 2)
    store_rows = _make_store_arranged(dim) if arranged else _make_store(heads, dim)

    @device_function
    def share(total: Any, peak: Any, sink: Any, scale: Any) -> Any:
        """Return one over a row's sum; 0 if the sum is 0, or a sink makes it infinite."""
        total = _all_four(total)
        if sink_bytes:
            total = ptx.add_rn(total, ptx.exp2_approx_ftz(ptx.add_rn(sink, _offset(peak, scale))))
        share = ptx.rcp_approx(
            total
        )  # put right below: a division is a call, next to which products are not overlapped
        share = ptx.fma_rn(share, ptx.fma_rn(-total, share, float32(1)), share)
        return float32(0) if total == float32(0) or total > float32(LARGEST) else share

    @device_function
    def finish(
        sums: Any, peaks: Any, totals: Any, sinks: Any, out: Any, head: Any, row: Any, rows: Any, scale: Any, lane: Any
    ) -> None:  # fmt: skip
        sink = float32(0)
        if sink_bytes == 4:
            sink = ptx.load_global_f32(sinks + int64(uint32(head // uint32(parts))) * int64(4))
        elif sink_bytes == 2:
            sink = ptx.load_global_bf16(sinks + int64(uint32(head // uint32(parts))) * int64(2))
        sink = ptx.mul_rn(sink, float32(LOG2_E))
        words = pack(scale_sums(sums, share(totals[0], peaks[0], sink, scale), share(totals[1], peaks[1], sink, scale)))
        store_rows(out, head, row, rows, lane, words)

    return finish
