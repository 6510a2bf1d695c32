"""From the warps' sums of a split to the rows' results: merge, park what is not complete, combine what is.

Sums are merged in three levels, in order at each: the four warps of a split; eight splits that follow each other; all
such groups. A merge takes the largest peak and adds each part times the power of two of its distance from it. A part
in which a row saw nothing has factor 0, the only part of a row has factor 1: neither changes a bit. So it does not
matter which splits were processed for other rows, and a level of one part is left out.
"""

import math
from collections.abc import Callable
from typing import Any

from lowlat.kernels import ptx
from lowlat.kernels.attention_copy import FULL_WARP, HEAD_SHIFT, ROW_TILE_SHIFT
from lowlat.kernels.attention_plan import (
    KEEP_SPLITS,
    NUM_SPLITS,
    PLAN_STRIDE,
    SPLIT_SHIFT,
    TILE_SHIFT,
    WINDOW_SPLIT,
    AttentionShape,
    query_row,
)
from lowlat.kernels.numba_cuda import cuda, device_function, float32, int32, int64, uint32

__all__ = ["GROUP_SHIFT", "LOG2_E", "TABLE_FLOATS", "WARPS", "make_ending"]

WARPS, THREADS = 4, 128
GROUP_SHIFT = 3  # 8 splits a group
PARTS = 1 << GROUP_SHIFT
AT_ONCE = 4  # parts whose loads are under way together
LOG2_E = math.log2(math.e)
MINUS_INFINITY = -math.inf
FACTORS, NORMS, PEAKS = 0, 16 * PARTS, 32 * PARTS  # of the table that a combining block shares
TABLE_FLOATS = 32 * PARTS + 16


@device_function
def _factor(peak: Any, largest: Any) -> Any:
    """The power of two of a peak's distance from the largest; 0 where the part saw nothing."""
    shift = float32(0) if largest == float32(MINUS_INFINITY) else -largest
    return ptx.exp2_approx(ptx.add_rn(peak, shift))


@device_function
def group_of(split: Any, keep: Any, start: Any, splits: Any) -> Any:
    """A split's place among those processed, [0, keep) and [start, splits), and its group's.

    Returns the split's ordinal, the first ordinal of its group and the count of the group's splits, the group's
    ordinal and the count of groups.
    """
    group, first_group = split >> GROUP_SHIFT, start >> GROUP_SHIFT
    low = group << GROUP_SHIFT
    high = min(low + PARTS, splits)
    kept = max(min(high, keep) - low, 0)
    count = kept + max(high - max(low, start), 0)
    first = low if kept > 0 else keep + max(low, start) - start
    kept_groups = min((keep + PARTS - 1) >> GROUP_SHIFT, first_group)
    num_groups = kept_groups + ((splits - 1) >> GROUP_SHIFT) - first_group + 1
    ordinal = split if split < keep else split - start + keep
    group_ordinal = group if group < kept_groups else group - first_group + kept_groups
    return int32(ordinal), int32(first), int32(count), int32(group_ordinal), int32(num_groups)


@device_function
def arrive(counter: Any, expected: Any, flag: Any) -> Any:
    """Whether this block is the last of `expected` to come here; what the others wrote before can then be read."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        ptx.fence_gpu()
        last = ptx.atomic_add_gpu(counter, uint32(1)) == uint32(expected - 1)
        if last:
            ptx.store_global_u32(counter, uint32(0))  # for the next launch
        flag[0] = int32(1 if last else 0)
        ptx.fence_gpu()
    cuda.syncthreads()
    return flag[0] != 0


def make_ending(shape: AttentionShape) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`merge` and `settle`, for all threads of a block at an item's end.

    merge   the four warps' sums into a part of its split, or of its group, or into the result, as parts are missing;
            it uses the stages that the warps have just read, and leaves them free
    settle  combines groups and results whose last part this block has made
    """
    emit, write_totals = _make_emit(shape), _make_write(shape)
    merge_warps, combine = _make_merge_warps(shape, emit), _make_combine(shape, emit)
    kv_heads, group, row_tiles, stage_bytes = shape.kv_heads, shape.group, shape.row_tiles, 64 * shape.head_dim

    @device_function
    def item_of(plan: Any, words: Any, rows: Any) -> Any:
        entry, head = int32(words[0] & uint32(255)), int32(words[0] >> uint32(HEAD_SHIFT))
        row_tile = int32((words[0] >> uint32(ROW_TILE_SHIFT)) & uint32(255))
        tiles = (rows * group + 16 * row_tiles - 1) // (16 * row_tiles)
        return entry, head, int32(row_tile * row_tiles), int32((entry * kv_heads + head) * tiles + row_tile)

    @device_function
    def merge(
        totals: Any, peaks: Any, norms: Any, plan: Any, words: Any, stages: Any, shared_norms: Any, warp: Any, lane: Any,
        partials: Any, sums: Any, splits: Any, groups: Any, rows: Any, row_ends: Any, sinks: Any, out: Any,
    ) -> None:  # fmt: skip
        rows, splits, groups = ptx.stay_here(rows), ptx.stay_here(splits), ptx.stay_here(groups)
        entry, head, row_tile, owner = item_of(plan, words, rows)
        at = entry * PLAN_STRIDE
        ordinal, _, count, group_ordinal, num_groups = group_of(
            int32(words[1] >> uint32(SPLIT_SHIFT - TILE_SHIFT)), plan[at + KEEP_SPLITS], plan[at + WINDOW_SPLIT],
            plan[at + NUM_SPLITS],
        )  # fmt: skip
        place, complete = int32(ordinal), count == 1 and num_groups == 1
        if count == 1:
            place = int32(splits + group_ordinal)
        for tile in range(row_tiles):
            write_totals(
                totals, peaks, norms, tile, uint32(stages + warp * uint32(stage_bytes)), shared_norms, warp, lane
            )
            cuda.syncthreads()
            target = int32(-1) if complete else int32((owner * row_tiles + tile) * (splits + groups) + place)
            here = int32(row_tile + tile)
            merge_warps(
                shared_norms, stages, min(rows * group - here * 16, 16), target, partials, sums, min(rows * group, 16),
                entry, head, here, rows, row_ends, sinks, out,
            )  # fmt: skip
            cuda.syncthreads()

    @device_function
    def settle(
        parts: Any, flag: Any, plan: Any, words: Any, counters: Any, partials: Any, sums: Any, splits: Any, groups: Any,
        rows: Any, row_ends: Any, sinks: Any, out: Any,
    ) -> None:  # fmt: skip
        rows, splits, groups = ptx.stay_here(rows), ptx.stay_here(splits), ptx.stay_here(groups)
        entry, head, row_tile, owner = item_of(plan, words, rows)
        at = entry * PLAN_STRIDE
        _, first, count, group_ordinal, num_groups = group_of(
            int32(words[1] >> uint32(SPLIT_SHIFT - TILE_SHIFT)), plan[at + KEEP_SPLITS], plan[at + WINDOW_SPLIT],
            plan[at + NUM_SPLITS],
        )  # fmt: skip
        base = counters + int64(owner) * (int64(groups) + 1) * 4
        complete, place = num_groups == 1, int32(splits + group_ordinal)
        counter = base + int64(group_ordinal) * 4
        for _level in range(2):  # the group's splits, then the groups
            if count > 1:
                if not arrive(counter, count, flag):
                    return
                tile = int32(0)
                while tile < row_tiles:
                    here = int32(row_tile + tile)
                    owned = int32((owner * row_tiles + tile) * (splits + groups))
                    if here * 16 < rows * group:
                        combine(
                            parts, int32(owned + first), count, min(rows * group - here * 16, 16),
                            int32(-1) if complete else int32(owned + place), partials, sums, min(rows * group, 16),
                            entry, head, here, rows, row_ends, sinks, out,
                        )  # fmt: skip
                    tile = int32(tile + 1)
            first, count, complete, counter = splits, num_groups, True, base + int64(groups) * 4

    return merge, settle


def _make_write(shape: AttentionShape) -> Callable[..., Any]:
    columns, row_bytes = shape.head_dim // 8, 4 * shape.head_dim

    @device_function
    def write_totals(
        totals: Any, peaks: Any, norms: Any, tile: Any, stage: Any, shared_norms: Any, warp: Any, lane: Any
    ) -> None:
        lane = uint32(ptx.stay_here(int32(lane)))
        quad = lane & uint32(3)
        for half in range(2):
            part, row = 2 * tile + half, uint32(half * 8) + (lane >> uint32(2))
            base = uint32(stage + row * uint32(row_bytes) + ((row & uint32(3)) << uint32(5)) + quad * uint32(8))
            for column in range(columns):
                o = (tile * columns + column) * 4 + 2 * half
                ptx.store_shared_64(
                    (base ^ uint32((column & 3) << 5)) + uint32((column >> 2) * 128),
                    ptx.bits_of_float(totals[o]),
                    ptx.bits_of_float(totals[o + 1]),
                )
            norm = ptx.add_rn(norms[part], cuda.shfl_xor_sync(FULL_WARP, norms[part], 1))
            norm = ptx.add_rn(norm, cuda.shfl_xor_sync(FULL_WARP, norm, 2))
            if quad == 0:
                at = int64(warp) * 32 + int64(row) * 2
                shared_norms[at], shared_norms[at + 1] = peaks[part], norm

    return write_totals


def _make_emit(shape: AttentionShape) -> Callable[..., Any]:
    """Park four columns of a row at an entry; or, where that is negative, store the result."""
    head_dim, group, kv_heads, has_sinks = shape.head_dim, shape.group, shape.kv_heads, shape.sinks

    @device_function
    def emit(
        entry: Any, row: Any, piece: Any, peak: Any, norm: Any, o: Any, at: Any, partials: Any, sums: Any, parked: Any,
        slot: Any, head: Any, row_tile: Any, rows: Any, row_ends: Any, sinks: Any, out: Any,
    ) -> None:
        if entry >= 0:
            place = int64(entry) * int64(parked) + int64(row)
            ptx.store_global_128(
                partials + place * (head_dim * 4) + int64(piece) * 16,
                ptx.bits_of_float(o[at]), ptx.bits_of_float(o[at + 1]),
                ptx.bits_of_float(o[at + 2]), ptx.bits_of_float(o[at + 3]),
            )  # fmt: skip
            if piece == 0:
                ptx.store_global_64(sums + place * 8, ptx.bits_of_float(peak), ptx.bits_of_float(norm))
            return
        node, member = query_row(row_tile, row, group)
        index = int64(slot) * int64(rows) + int64(node)
        query_head = int64(head) * group + int64(member)
        factor, total = float32(1), norm
        if has_sinks:
            sink = ptx.mul_rn(ptx.load_global_f32(sinks + query_head * 4), float32(LOG2_E))
            largest = max(peak, sink)
            factor = _factor(peak, largest)
            total = ptx.fma_rn(norm, factor, _factor(sink, largest))
        elif norm == float32(0):
            total = float32(1)
        live = row_ends[index] > 0
        for k in range(4):  # adding 0 makes -0 and 0 one
            value = ptx.div_rn(ptx.mul_rn(ptx.add_rn(o[at + k], float32(0)), factor), total)
            o[at + k] = value if live else float32(0)
        address = out + ((index * (kv_heads * group) + query_head) * head_dim + int64(piece) * 4) * 2
        ptx.store_global_64(address, ptx.bf16_pair(o[at], o[at + 1]), ptx.bf16_pair(o[at + 2], o[at + 3]))

    return emit


def _make_merge_warps(shape: AttentionShape, emit: Callable[..., Any]) -> Callable[..., Any]:
    units, pieces, row_bytes = shape.head_dim // 32, shape.head_dim // 4, 4 * shape.head_dim
    piece_shift, stage_bytes = pieces.bit_length() - 1, 64 * shape.head_dim

    @device_function
    def merge_warps(
        shared_norms: Any, stage: Any, count: Any, entry: Any, partials: Any, sums: Any, parked: Any,
        slot: Any, head: Any, row_tile: Any, rows: Any, row_ends: Any, sinks: Any, out: Any,
    ) -> None:
        o = cuda.local.array(4, float32)
        factors = cuda.local.array(WARPS, float32)
        thread = uint32(ptx.stay_here(int32(cuda.threadIdx.x)))
        for unit in range(units):
            number = uint32(thread + uint32(unit * THREADS))
            row, piece = number >> uint32(piece_shift), number & uint32(pieces - 1)
            if row < count:
                largest, norm = float32(MINUS_INFINITY), float32(0)
                for warp in range(WARPS):
                    factors[warp] = shared_norms[warp * 32 + int64(row) * 2]
                    largest = max(largest, factors[warp])
                for k in range(4):
                    o[k] = float32(0)
                at = uint32(stage + row * uint32(row_bytes) + ((piece << uint32(4)) ^ ((row & uint32(3)) << uint32(5))))
                for warp in range(WARPS):
                    factor = _factor(factors[warp], largest)
                    norm = ptx.fma_rn(shared_norms[warp * 32 + int64(row) * 2 + 1], factor, norm)
                    words = ptx.load_shared_128(uint32(at + uint32(warp * stage_bytes)))
                    for k in range(4):
                        o[k] = ptx.fma_rn(ptx.float_of_bits(words[k]), factor, o[k])
                emit(
                    entry, row, piece, largest, norm, o, 0, partials, sums, parked, slot, head, row_tile, rows, row_ends,
                    sinks, out,
                )  # fmt: skip

    return merge_warps


def _make_combine(shape: AttentionShape, emit: Callable[..., Any]) -> Callable[..., Any]:
    units, pieces, row_bytes = shape.head_dim // 32, shape.head_dim // 4, 4 * shape.head_dim
    piece_shift, values = pieces.bit_length() - 1, shape.head_dim // 8
    weigh_parts = _weigh_parts

    @device_function
    def combine(
        table: Any, first: Any, parts: Any, count: Any, entry: Any, partials: Any, sums: Any, parked: Any,
        slot: Any, head: Any, row_tile: Any, rows: Any, row_ends: Any, sinks: Any, out: Any,
    ) -> None:
        o = cuda.local.array(values, float32)
        norms = cuda.local.array(units, float32)
        thread = uint32(ptx.stay_here(int32(cuda.threadIdx.x)))
        for k in range(values):
            o[k] = float32(0)
        for unit in range(units):
            norms[unit] = float32(0)
        start = int32(0)
        while start < parts:
            weigh_parts(table, sums, first, parts, start, count, parked)
            part, stop = int32(0), ptx.stay_here(int32(min(parts - start, PARTS)))
            while part < stop:
                for unit in range(units):
                    number = uint32(thread + uint32(unit * THREADS))
                    row, piece = int64(number >> uint32(piece_shift)), int64(number & uint32(pieces - 1))
                    source = partials + min(row, int64(count) - 1) * row_bytes + piece * 16
                    for k in range(AT_ONCE):
                        place = int64(first + min(start + part + k, parts - 1)) * int64(parked)
                        words = ptx.load_global_128(source + place * row_bytes)
                        at = row * PARTS + part + k
                        factor = table[FACTORS + at]
                        norms[unit] = ptx.fma_rn(table[NORMS + at], factor, norms[unit])
                        for c in range(4):
                            o[unit * 4 + c] = ptx.fma_rn(ptx.float_of_bits(words[c]), factor, o[unit * 4 + c])
                part = int32(part + AT_ONCE)
            start = int32(start + PARTS)
        for unit in range(units):
            number = uint32(thread + uint32(unit * THREADS))
            row, piece = number >> uint32(piece_shift), number & uint32(pieces - 1)
            if row < count:
                emit(
                    entry, row, piece, table[PEAKS + int64(row)], norms[unit], o, unit * 4, partials, sums, parked,
                    slot, head, row_tile, rows, row_ends, sinks, out,
                )  # fmt: skip

    return combine


@device_function
def _weigh_parts(table: Any, sums: Any, first: Any, parts: Any, start: Any, count: Any, parked: Any) -> None:
    """Fill the table for eight parts from `start` on: each row's factors and norms, and its largest peak of all."""
    thread = ptx.stay_here(int32(cuda.threadIdx.x))
    row, lane = thread >> GROUP_SHIFT, thread & (PARTS - 1)
    source = sums + min(row, int64(count) - 1) * 8
    largest, part = float32(MINUS_INFINITY), lane
    while part < parts:
        largest = max(largest, ptx.load_global_f32(source + int64(first + part) * int64(parked) * 8))
        part = int32(part + PARTS)
    for distance in (1, 2, 4):
        largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, distance))
    factor, norm = float32(0), float32(0)
    if start + lane < parts:
        at = source + int64(first + start + lane) * int64(parked) * 8
        factor = _factor(ptx.load_global_f32(at), largest)
        norm = ptx.load_global_f32(at + 4)
    cuda.syncthreads()  # the table's last readers are done
    table[FACTORS + thread] = factor
    table[NORMS + thread] = norm
    if lane == 0:
        table[PEAKS + row] = largest
    cuda.syncthreads()
