"""This module copies a tile's keys and values to shared memory; each warp has its own rows and pipeline.

A warp has 16 of a tile's 64 positions; of the widest heads it has half of their dimensions. Its stage has their keys,
then their values, as rows of 2 D bytes, or D for codes. The rows' 16-byte pieces are permuted by `make_swizzle`, so
that neither 16-byte reads of keys nor transposed matrix reads of values have bank conflicts. A stage's descriptor tells
the reader what was copied.
"""

from typing import Any

from lowlat.kernels.attention.plan import (
    ALIVE,
    ALL_VISIBLE,
    ALONE,
    DENSE,
    END_MAX,
    END_MIN,
    LAST,
    LAST_STEP,
    NO_ITEM,
    PAGES,
    PAGES_TILE,
    PASS,
    PLACE,
    PLAN_STRIDE,
    POSITION_TILE,
    SLOT,
    TILE,
    TREE,
    AttentionShape,
    advance,
    entry_of,
    head_of,
    row_tile_of,
)
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int32, int64, uint32, uint64

__all__ = ["make_copy_values", "make_is_early", "make_issue", "make_lane_offset", "make_look_up", "make_swizzle"]

FULL_WARP = 0xFFFFFFFF
COPY_BYTES = 32 * 16  # bytes that a warp copies at once


def make_swizzle(shape: AttentionShape) -> Any:
    """A device function that returns the number with which a row's piece numbers are xor-ed.

    It differs in eight consecutive rows, and in bit 2 between neighbours. Rows of 64 bytes are in different halves of
    128, so only every other one differs.
    """
    neighbours = 1 if shape.row_bytes > 64 else 0

    @device_function
    def row_swizzle(row: Any) -> Any:
        return uint32(((uint32(row) & uint32(neighbours)) << uint32(2)) | ((uint32(row) >> uint32(1)) & uint32(3)))

    return row_swizzle


@device_function
def _ordinal_bit(mask: Any, ordinal: Any) -> Any:
    """Return the place of the set bit with `ordinal` set bits below it."""
    rest, left, place, width = uint64(mask), int32(ordinal), int32(0), int32(32)
    while width > 0:
        low = int32(cuda.popc(rest & ((uint64(1) << uint64(width)) - uint64(1))))
        if left >= low:
            left = int32(left - low)
            rest = rest >> uint64(width)
            place = int32(place + width)
        width = int32(width >> 1)
    return place


def _make_in_list(shape: AttentionShape) -> tuple[Any, Any]:
    """Make two device functions for lists of parts.

    `entry_address` returns the address of a position's entry in a slot's list. `row_in_part` returns the cache's row of
    the position.
    """
    kv_heads, block, parts = shape.kv_heads, shape.block, max(shape.parts, 1)
    size = block // parts
    size_shift, parts_shift = size.bit_length() - 1, parts.bit_length() - 1

    @device_function
    def entry_address(lists: Any, slot: Any, head: Any, position: Any, width: Any) -> Any:
        first = (int64(slot) * int64(kv_heads) + int64(head)) * int64(width)
        return lists + (first + int64(min(int32(position) >> size_shift, width - 1))) * 4

    @device_function
    def row_in_part(entry: Any, head: Any, position: Any) -> Any:
        page, part = int32(entry >> parts_shift), int32(entry & (parts - 1))
        return int32((page * kv_heads + head) * block + part * size + (position & (size - 1)))

    return entry_address, row_in_part


def _make_row_of_cache(shape: AttentionShape) -> Any:
    """A device function that returns the cache's row of a position, for one query row or for all; -1: none sees it."""
    first, keep_end = shape.first, shape.first + shape.keep_first
    windowed, window = shape.window is not None, shape.window or 0
    kv_heads, block, listed = shape.kv_heads, shape.block, shape.parts > 0
    block_shift = block.bit_length() - 1
    entry_address, row_in_part = _make_in_list(shape)

    @device_function
    def row_of_cache(
        cursor: Any,
        plan: Any,
        row_ends: Any,
        position: Any,
        alone: Any,
        row_masks: Any,
        table: Any,
        rows: Any,
        width: Any,
    ) -> Any:
        entry = entry_of(cursor[PLACE])
        at = entry * PLAN_STRIDE
        dense, end, start = plan[at + DENSE], plan[at + END_MAX], plan[at + END_MIN] - window
        if alone >= 0:
            end = row_ends[entry * rows + alone]
            start = end - window
        visible = position >= first and position < end
        if windowed:
            visible = visible and (position >= start or position < keep_end)
        if not visible:
            return int32(-1)
        stored = int32(position)
        if alone >= 0 and position >= dense:
            mask = ptx.load_global_i64(row_masks + int64(entry * rows + alone) * 8)
            stored = int32(dense + _ordinal_bit(mask, position - dense))
        if listed:
            head = head_of(cursor[PLACE])
            entry_of_list = ptx.load_global_i32(entry_address(table, plan[at + SLOT], head, stored, width))
            return row_in_part(entry_of_list, head, stored)
        index = int64(plan[at + SLOT]) * int64(width) + int64(stored >> block_shift)
        page = ptx.load_global_i32(table + index * 4)
        return int32((page * kv_heads + head_of(cursor[PLACE])) * block + (stored & (block - 1)))

    return row_of_cache


def _make_copy_rows(shape: AttentionShape) -> tuple[Any, Any]:
    """Make `copy_run`, which copies 16 consecutive rows, and `copy_rows`: any 16 rows, row i by lane i, -1: zeros."""
    pitch, whole = shape.pitch, shape.halves == 1
    pieces = shape.row_bytes // 16  # of a row
    rows_a_copy = 32 // pieces
    copies = 16 // rows_a_copy
    piece_shift, values_at, step = pieces.bit_length() - 1, 16 * shape.row_bytes, rows_a_copy * pitch

    @device_function
    def copy_run(target: Any, k_cache: Any, v_cache: Any, row: Any, lane: Any) -> None:
        if whole:
            offset = int64(row) * pitch + int64(lane) * 16
        else:
            own = int64(row) + int64(lane >> uint32(piece_shift))
            offset = own * pitch + int64(lane & uint32(pieces - 1)) * 16
        for copy in range(copies):
            swizzled = (target ^ uint32((((copy * rows_a_copy) >> 1) & 3) << 4)) + uint32(copy * 512)
            ptx.copy_async_16_once(swizzled, k_cache + offset + copy * step)
        for copy in range(copies):
            swizzled = (target ^ uint32((((copy * rows_a_copy) >> 1) & 3) << 4)) + uint32(copy * 512 + values_at)
            ptx.copy_async_16_once(swizzled, v_cache + offset + copy * step)

    @device_function
    def copy_rows(target: Any, k_cache: Any, v_cache: Any, row: Any, lane: Any) -> None:
        piece = int64(lane & uint32(pieces - 1)) * 16
        for copy in range(copies):
            mine = cuda.shfl_sync(FULL_WARP, row, int32(uint32(copy * rows_a_copy) + (lane >> uint32(piece_shift))))
            size = uint32(16) if mine >= 0 else uint32(0)
            offset = int64(max(mine, int32(0))) * pitch + piece
            swizzled = (target ^ uint32((((copy * rows_a_copy) >> 1) & 3) << 4)) + uint32(copy * 512)
            ptx.copy_async_16_or_zero(swizzled, k_cache + offset, size)
            ptx.copy_async_16_or_zero(swizzled + uint32(values_at), v_cache + offset, size)

    return copy_run, copy_rows


def _make_copy_wide_rows(shape: AttentionShape) -> tuple[Any, Any]:
    """Make `copy_run` and `copy_rows` for rows as wide as a warp's copy, so that every row begins a copy."""
    pitch, row_bytes, both = shape.pitch, shape.row_bytes, not shape.takes_turns
    values_at = 16 * row_bytes

    @device_function
    def place_of(target: Any, copy: Any) -> Any:
        return (target ^ uint32((((copy & 1) << 2) | ((copy >> 1) & 3)) << 4)) + uint32(copy * row_bytes)

    @device_function
    def copy_run(target: Any, k_cache: Any, v_cache: Any, row: Any, lane: Any) -> None:
        offset = int64(row) * pitch + int64(lane) * 16
        for copy in range(16):
            ptx.copy_async_16_once(place_of(target, copy), k_cache + offset + copy * pitch)
        if both:
            for copy in range(16):
                ptx.copy_async_16_once(place_of(target, copy) + uint32(values_at), v_cache + offset + copy * pitch)

    @device_function
    def copy_rows(target: Any, k_cache: Any, v_cache: Any, row: Any, lane: Any) -> None:
        for copy in range(16):
            mine = cuda.shfl_sync(FULL_WARP, row, copy)
            size = uint32(16) if mine >= 0 else uint32(0)
            offset = int64(max(mine, int32(0))) * pitch + int64(lane) * 16
            ptx.copy_async_16_or_zero(place_of(target, copy), k_cache + offset, size)
            if both:
                ptx.copy_async_16_or_zero(place_of(target, copy) + uint32(values_at), v_cache + offset, size)

    return copy_run, copy_rows


def make_copy_values(shape: AttentionShape) -> Any:
    """A device function of a warp that copies a step's values over its keys, after all lanes have read the keys."""
    _, copy_rows = _make_copy_wide_rows(shape)
    wait = ptx.copies_wait(0)

    @device_function
    def copy_values(target: Any, v_cache: Any, descriptor: Any, lane: Any) -> None:
        cuda.syncwarp()
        lane, target = uint32(ptx.stay_here(int32(lane))), uint32(ptx.stay_here(int32(target)))
        source = int32(ptx.load_shared_u32(uint32(descriptor + uint32(16) + (lane & uint32(15)) * uint32(4))))
        copy_rows(target, v_cache, v_cache, source, lane)
        ptx.copies_commit()
        wait()
        cuda.syncwarp()

    return copy_values


def make_lane_offset(shape: AttentionShape) -> Any:
    """A device function that returns the offset of a lane's first piece in its warp's stage."""
    pitch, row_swizzle = shape.row_bytes, make_swizzle(shape)
    pieces = pitch // 16
    piece_shift = pieces.bit_length() - 1

    @device_function
    def lane_offset(lane: Any) -> Any:
        row, piece = lane >> uint32(piece_shift), lane & uint32(pieces - 1)
        return uint32(row * uint32(pitch) + ((piece ^ row_swizzle(row)) << uint32(4)))

    return lane_offset


def make_is_early(shape: AttentionShape) -> Any:
    """A device function that returns whether all live rows see the cursor's whole tile, and it is of earlier steps."""
    first, keep_end = shape.first, shape.first + shape.keep_first
    windowed, window = shape.window is not None, shape.window or 0

    @device_function
    def is_early(cursor: Any, plan: Any) -> Any:
        start, at = cursor[POSITION_TILE] * TILE, entry_of(cursor[PLACE]) * PLAN_STRIDE
        dense = plan[at + DENSE]
        early = start >= first and start + TILE <= dense
        if windowed:
            early = early and (start > plan[at + LAST] - window or start + TILE <= keep_end)
        return early

    return is_early


def make_look_up(shape: AttentionShape) -> Any:
    """A device function of a warp that reads entries of the block table ahead: for 32 tiles at once, one a lane."""
    block_shift, listed = shape.block.bit_length() - 1, shape.parts > 0
    entry_address, _ = _make_in_list(shape)

    @device_function
    def look_up(cursor: Any, plan: Any, table: Any, width: Any, warp: Any, lane: Any) -> None:
        width = ptx.stay_here(width)
        if cursor[PLACE] != NO_ITEM and uint32(cursor[POSITION_TILE] - cursor[PAGES_TILE]) >= uint32(32):
            cursor[PAGES_TILE] = cursor[POSITION_TILE]
            position = (cursor[POSITION_TILE] + int32(lane)) * TILE + int32(warp) * 16
            slot = plan[entry_of(cursor[PLACE]) * PLAN_STRIDE + SLOT]
            if listed:
                address = entry_address(table, slot, head_of(cursor[PLACE]), position, width)
                cursor[PAGES] = ptx.load_global_i32(address)
                return
            page = min(position >> block_shift, width - 1)
            index = int64(slot) * int64(width) + page
            cursor[PAGES] = ptx.load_global_i32(table + index * 4)

    return look_up


def make_issue(shape: AttentionShape) -> Any:
    """A device function that starts the copies of the cursor's step, describes them and advances the cursor."""
    group, tile_rows, block, kv_heads = shape.group, 16 * shape.row_tiles, shape.block, shape.kv_heads
    listed, (_, row_in_part) = shape.parts > 0, _make_in_list(shape)
    make_copy = _make_copy_wide_rows if shape.row_bytes == COPY_BYTES else _make_copy_rows
    row_of_cache, (copy_run, copy_rows) = _make_row_of_cache(shape), make_copy(shape)
    move_on, is_early, takes_turns = advance(shape), make_is_early(shape), shape.takes_turns

    @device_function
    def issue(
        cursor: Any, plan: Any, row_ends: Any, target: Any, descriptor: Any, k_cache: Any, v_cache: Any, table: Any,
        row_masks: Any, batch: Any, rows: Any, width: Any, warp: Any, lane: Any,
    ) -> None:  # fmt: skip
        batch, rows, width = ptx.stay_here(batch), ptx.stay_here(rows), ptx.stay_here(width)
        place = uint32(cursor[PLACE])
        if cursor[PLACE] == NO_ITEM:
            ptx.store_shared_u32(descriptor, place)
            return
        tile, at = cursor[POSITION_TILE], entry_of(place) * PLAN_STRIDE
        passing, last_pass, alone = False, int32(0), int32(-1)
        position = int32(tile * TILE + int32(warp) * 16)
        if is_early(cursor, plan):
            place = uint32(place | uint32(ALL_VISIBLE))
            page = cuda.shfl_sync(FULL_WARP, cursor[PAGES], int32(cursor[POSITION_TILE] - cursor[PAGES_TILE]))
            if listed:
                if takes_turns and lane < 16:
                    first = row_in_part(page, head_of(place), position)
                    ptx.store_shared_u32(uint32(descriptor + uint32(16) + lane * uint32(4)), uint32(first + lane))
                copy_run(target, k_cache, v_cache, row_in_part(page, head_of(place), position), lane)
            else:
                inside = (page * kv_heads + head_of(place)) * block + (position & (block - 1))
                if takes_turns and lane < 16:
                    ptx.store_shared_u32(uint32(descriptor + uint32(16) + lane * uint32(4)), uint32(inside + lane))
                copy_run(target, k_cache, v_cache, inside, lane)
        else:
            passing = plan[at + TREE] != 0 and tile * TILE + TILE > plan[at + DENSE]
            if passing:
                low = uint32(row_tile_of(place) * tile_rows)
                last_pass = int32(min(uint32(low + uint32(tile_rows - 1)) // uint32(group), uint32(rows - 1)))
                if cursor[PASS] < 0:
                    cursor[PASS] = int32(low // uint32(group))
                alone = cursor[PASS]
                place = uint32(place | uint32(ALONE))
            source = int32(-1)
            if lane < 16 and plan[at + ALIVE] != 0:
                source = row_of_cache(
                    cursor, plan, row_ends, position + int32(lane), alone, row_masks, table, rows, width
                )
            copy_rows(target, k_cache, v_cache, source, lane)
            if takes_turns and lane < 16:
                ptx.store_shared_u32(uint32(descriptor + uint32(16) + lane * uint32(4)), uint32(source))
        if move_on(cursor, plan, passing, last_pass, batch, rows):
            place = uint32(place | uint32(LAST_STEP))
        ptx.store_shared_128(descriptor, place, uint32(tile), uint32(alone), uint32(0))

    return issue
