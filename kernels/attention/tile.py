"""One warp's part of one tile: scores of 16 positions, online softmax, weighted values; all in registers.

Scores are q k * scale * log2(e) in float32; weights are powers of two of their distance from the running peak. The
weights' sum is kept in float32 from the unrounded weights, the product with the values takes them rounded to bf16.
A row that sees none of the positions keeps its bits: its factor is exactly 1 and its weights are exactly 0.
Both operands of a product have their inner index permuted alike, so that a lane reads 16 bytes at a time.
"""

import math
from typing import Any

from lowlat.kernels.attention.coded_products import make_coded_products, make_coded_queries
from lowlat.kernels.attention.copies import FULL_WARP, make_swizzle
from lowlat.kernels.attention.plan import (
    ALL_VISIBLE,
    ALONE,
    DENSE,
    END_MAX,
    FIRST_STEP,
    PLAN_STRIDE,
    TILE,
    AttentionShape,
    entry_of,
    head_of,
    query_row,
    row_tile_of,
)
from lowlat.kernels.common.kv_codes import load_multiplier, nan_bits
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, uint32

__all__ = ["make_attend", "make_forget", "query_words"]

NAN_BITS = 0x7FC00000
MINUS_INFINITY = -math.inf


def query_words(shape: AttentionShape) -> int:
    """Words of a lane's queries; of caches of codes the multipliers of keys and values are the last two."""
    return shape.row_tiles * shape.head_dim // 4 + (2 if shape.coded else 0)


def make_forget(shape: AttentionShape) -> Any:
    """The function that clears an item's registers; where it ends, so that they are free between items."""
    num_totals, num_queries, halves = shape.row_tiles * shape.head_dim // 2, query_words(shape), 2 * shape.row_tiles

    @device_function
    def forget(totals: Any, queries: Any, peaks: Any, norms: Any) -> None:
        for k in range(num_totals):
            totals[k] = float32(0)
        for k in range(num_queries):
            queries[k] = uint32(0)
        for part in range(halves):
            peaks[part], norms[part] = float32(MINUS_INFINITY), float32(0)

    return forget


def make_attend(shape: AttentionShape) -> Any:
    """The function that adds one step's tile, described by `words`, to a warp's sums; an item's first loads queries."""
    load_queries = _make_load_queries(shape)
    add_scores, add_values = make_coded_products(shape) if shape.coded else _make_products(shape)
    hide, weigh, drop_broken = _make_hide(shape), _make_weigh(shape), _make_drop(shape)
    row_tiles = shape.row_tiles
    num_scores, num_weights, num_factors = 8 * row_tiles, 4 * row_tiles, 2 * row_tiles

    @device_function
    def attend(
        totals: Any, queries: Any, peaks: Any, norms: Any, q: Any, row_ends: Any, plan: Any, words: Any,
        stage: Any, rows: Any, scale: Any, kv_scales: Any, warp: Any, lane: Any,
    ) -> None:  # fmt: skip
        entry, row_tile = entry_of(words[0]), int32(row_tile_of(words[0]) * row_tiles)
        if words[0] & uint32(FIRST_STEP):
            load_queries(queries, q, kv_scales, entry, head_of(words[0]), row_tile, rows, lane)
        start, alone = int32(int32(words[1]) * TILE), int32(words[2])
        all_visible, is_alone = words[0] & uint32(ALL_VISIBLE) != 0, words[0] & uint32(ALONE) != 0
        if not all_visible:
            rows = ptx.stay_here(rows)
            if start >= (row_ends[entry * rows + alone] if is_alone else plan[entry * PLAN_STRIDE + END_MAX]):
                return
        scores = cuda.local.array(num_scores, float32)
        weights = cuda.local.array(num_weights, uint32)
        factors = cuda.local.array(num_factors, float32)
        for k in range(8 * row_tiles):
            scores[k] = float32(0)
        add_scores(scores, queries, stage, lane)
        for k in range(8 * row_tiles):
            scores[k] = ptx.mul_rn(scores[k], scale)
        if not all_visible:
            broken = uint32(0)
            if start + TILE > plan[entry * PLAN_STRIDE + DENSE]:
                broken = drop_broken(stage, lane)
            hide(
                scores, row_ends, int32(entry * rows), rows, int32(start + int32(warp) * 16), is_alone, alone, row_tile,
                broken, lane,
            )  # fmt: skip
        weigh(scores, weights, factors, peaks, norms)
        add_values(totals, queries, weights, factors, stage, lane)

    return attend


def _make_load_queries(shape: AttentionShape) -> Any:
    """Query fragments of the item's row tiles; rows past the last are zero."""
    group, kv_heads, row_tiles, coded = shape.group, shape.kv_heads, shape.row_tiles, shape.coded
    chunks, row_bytes = shape.head_dim // 32, 2 * shape.head_dim
    piece_bytes, words, rearrange = (32 if coded else 16), query_words(shape), make_coded_queries(shape)

    @device_function
    def load_queries(
        queries: Any, q: Any, kv_scales: Any, entry: Any, head: Any, row_tile: Any, rows: Any, lane: Any
    ) -> None:
        rows, lane = ptx.stay_here(rows), uint32(ptx.stay_here(int32(lane)))
        for part in range(2 * row_tiles):
            node, member = query_row(row_tile, uint32(part * 8) + (lane >> uint32(2)), group)
            for word in range(4 * chunks):
                queries[part * 4 * chunks + word] = uint32(0)
            if int64(node) < int64(rows):
                row = int64(entry) * int64(rows) + int64(node)
                place = (row * kv_heads + int64(head)) * group + int64(member)
                address = q + place * row_bytes + int64(lane & uint32(3)) * piece_bytes
                for word in range(4 * chunks):  # one by one: the products want them in registers side by side
                    offset = (word // (piece_bytes // 4)) * (4 * piece_bytes) + (word % (piece_bytes // 4)) * 4
                    queries[part * 4 * chunks + word] = uint32(ptx.load_global_i32(address + offset))
        if coded:
            rearrange(queries, words - 2)
            queries[words - 2] = load_multiplier(kv_scales, head)
            queries[words - 1] = load_multiplier(kv_scales, head + int32(kv_heads))

    return load_queries


def _make_products(shape: AttentionShape) -> tuple[Any, Any]:
    """Scores of two groups of 8 positions; and sums times their factors plus weights times values."""
    row_swizzle = make_swizzle(shape)
    chunks, pitch, row_tiles = shape.head_dim // 32, 2 * shape.head_dim, shape.row_tiles
    pairs, sums = shape.head_dim // 16, shape.head_dim // 2

    @device_function
    def add_scores(scores: Any, queries: Any, stage: Any, lane: Any) -> None:
        row, quad = lane >> uint32(2), lane & uint32(3)
        base = uint32(stage + row * uint32(pitch) + ((quad ^ row_swizzle(row)) << uint32(4)))
        for chunk in range(chunks):
            for half in range(2):
                at = (base ^ uint32((chunk & 1) << 6)) + uint32((chunk >> 1) * 128 + half * 8 * pitch)
                k0, k1, k2, k3 = ptx.load_shared_128(at)
                for tile in range(row_tiles):
                    s = tile * 8 + half * 4
                    a, b = (2 * tile * chunks + chunk) * 4, ((2 * tile + 1) * chunks + chunk) * 4
                    scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = ptx.mma_bf16(
                        scores[s], scores[s + 1], scores[s + 2], scores[s + 3],
                        queries[a], queries[b], queries[a + 1], queries[b + 1], k0, k1,
                    )  # fmt: skip
                    scores[s], scores[s + 1], scores[s + 2], scores[s + 3] = ptx.mma_bf16(
                        scores[s], scores[s + 1], scores[s + 2], scores[s + 3],
                        queries[a + 2], queries[b + 2], queries[a + 3], queries[b + 3], k2, k3,
                    )  # fmt: skip

    @device_function
    def add_values(totals: Any, _queries: Any, weights: Any, factors: Any, stage: Any, lane: Any) -> None:
        row = lane & uint32(15)
        base = uint32(stage + (row + uint32(16)) * uint32(pitch))
        base = uint32(base + (((lane >> uint32(4)) ^ row_swizzle(row)) << uint32(4)))
        for pair in range(pairs):
            v = ptx.load_shared_matrix_x4_transposed((base ^ uint32((pair & 3) << 5)) + uint32((pair >> 2) * 128))
            for tile in range(row_tiles):
                top, bottom, w = factors[2 * tile], factors[2 * tile + 1], tile * 4
                for half in range(2):
                    o = tile * sums + pair * 8 + half * 4
                    totals[o], totals[o + 1], totals[o + 2], totals[o + 3] = ptx.mma_bf16(
                        ptx.mul_rn(totals[o], top), ptx.mul_rn(totals[o + 1], top),
                        ptx.mul_rn(totals[o + 2], bottom), ptx.mul_rn(totals[o + 3], bottom),
                        weights[w], weights[w + 1], weights[w + 2], weights[w + 3], v[2 * half], v[2 * half + 1],
                    )  # fmt: skip

    return add_scores, add_values


def _make_hide(shape: AttentionShape) -> Any:
    """Select minus infinity where a row may not look, and NaN where it looks at a value that is not finite."""
    group, row_tiles, first = shape.group, shape.row_tiles, shape.first
    windowed, window, keep_end = shape.window is not None, shape.window or 0, shape.first + shape.keep_first

    @device_function
    def hide(
        scores: Any, row_ends: Any, first_row: Any, rows: Any, position: Any, is_alone: Any, alone: Any, row_tile: Any,
        broken: Any, lane: Any,
    ) -> None:  # fmt: skip
        lane = uint32(ptx.stay_here(int32(lane)))
        for part in range(2 * row_tiles):
            node, _ = query_row(row_tile, uint32(part * 8) + (lane >> uint32(2)), group)
            end = int32(0)
            if int32(node) < rows and not (is_alone and int32(node) != alone):
                end = row_ends[first_row + int32(node)]
            for element in range(4):
                place = int32((element >> 1) * 8 + int32(lane & uint32(3)) * 2 + (element & 1))
                at = int32(position + place)
                visible = at >= first and at < end
                if windowed:
                    visible = visible and (at >= end - window or at < keep_end)
                index = (part >> 1) * 8 + (element >> 1) * 4 + (part & 1) * 2 + (element & 1)
                if (broken >> uint32(place)) & uint32(1):
                    scores[index] = ptx.float_of_bits(uint32(NAN_BITS))
                if not visible:
                    scores[index] = float32(MINUS_INFINITY)

    return hide


def _make_weigh(shape: AttentionShape) -> Any:
    """From scores to weights and factors; renews the peaks and the sums of weights, which are each lane's own."""
    row_tiles = shape.row_tiles

    @device_function
    def weigh(scores: Any, weights: Any, factors: Any, peaks: Any, norms: Any) -> None:
        for part in range(2 * row_tiles):
            at = (part >> 1) * 8 + (part & 1) * 2
            peak = max(max(scores[at], scores[at + 1]), max(scores[at + 4], scores[at + 5]))
            peak = max(peak, cuda.shfl_xor_sync(FULL_WARP, peak, 1))
            peak = max(peak, cuda.shfl_xor_sync(FULL_WARP, peak, 2))
            peak = max(peaks[part], peak)
            shift = float32(0) if peak == float32(MINUS_INFINITY) else -peak
            factors[part] = ptx.exp2_approx(ptx.add_rn(peaks[part], shift))
            w0 = ptx.exp2_approx(ptx.add_rn(scores[at], shift))
            w1 = ptx.exp2_approx(ptx.add_rn(scores[at + 1], shift))
            w2 = ptx.exp2_approx(ptx.add_rn(scores[at + 4], shift))
            w3 = ptx.exp2_approx(ptx.add_rn(scores[at + 5], shift))
            weights[(part >> 1) * 4 + (part & 1)] = ptx.bf16_pair(w0, w1)
            weights[(part >> 1) * 4 + (part & 1) + 2] = ptx.bf16_pair(w2, w3)
            added = ptx.add_rn(ptx.add_rn(w0, w1), ptx.add_rn(w2, w3))
            norms[part] = ptx.fma_rn(norms[part], factors[part], added)
            peaks[part] = peak

    return weigh


@device_function
def _exponent_carries(word: Any) -> Any:
    """Bits 15 and 31 tell which of a word's two bf16 are infinite or NaN; the other bits mean nothing."""
    return uint32((word & uint32(0x7F807F80)) + uint32(0x00800080))


def _make_drop(shape: AttentionShape) -> Any:
    """Zero the value rows that are not finite, and return a bit for each.

    Weight 0 times infinity would reach rows that do not see the position: a draft may not break the rows before it.
    Codes of NaN would come out as numbers: of these keys are looked through, too, and neither's rows are zeroed.
    """
    pitch = shape.row_bytes
    pieces = pitch // 16
    rows_a_read = 32 // pieces
    piece_shift, reads = pieces.bit_length() - 1, 16 // rows_a_read
    if shape.coded:
        return _make_find_nan(pitch)

    @device_function
    def drop_broken(stage: Any, lane: Any) -> Any:
        lane = uint32(ptx.stay_here(int32(lane)))
        base, broken = uint32(stage + uint32(16 * pitch) + lane * uint32(16)), uint32(0)
        for read in range(reads):
            a, b, c, d = ptx.load_shared_128(base + uint32(read * 512))
            carries = _exponent_carries(a) | _exponent_carries(b) | _exponent_carries(c) | _exponent_carries(d)
            votes = uint32(cuda.ballot_sync(FULL_WARP, carries & uint32(0x80008000) != 0))
            for row in range(rows_a_read):
                if (votes >> uint32(row * pieces)) & uint32((1 << pieces) - 1):
                    broken |= uint32(1 << (read * rows_a_read + row))
        if broken:
            for read in range(reads):
                row = uint32(read * rows_a_read) + (lane >> uint32(piece_shift))
                if (broken >> row) & uint32(1):
                    ptx.store_shared_128(base + uint32(read * 512), uint32(0), uint32(0), uint32(0), uint32(0))
            cuda.syncwarp()
        return broken

    return drop_broken


def _make_find_nan(pitch: int) -> Any:
    """Return a bit for each position whose keys or values have a code of NaN, which reads as a number."""
    pieces = pitch // 16
    rows_a_read = 32 // pieces
    reads = 16 // rows_a_read

    @device_function
    def find_nan(stage: Any, lane: Any) -> Any:
        lane = uint32(ptx.stay_here(int32(lane)))
        base, broken = uint32(stage + lane * uint32(16)), uint32(0)
        for read in range(2 * reads):
            a, b, c, d = ptx.load_shared_128(base + uint32(read * 512))
            found = (nan_bits(a) | nan_bits(b) | nan_bits(c) | nan_bits(d)) & uint32(0x80808080)
            votes = uint32(cuda.ballot_sync(FULL_WARP, found != 0))
            for row in range(rows_a_read):
                if (votes >> uint32(row * pieces)) & uint32((1 << pieces) - 1):
                    broken |= uint32(1 << (read % reads * rows_a_read + row))
        return broken

    return find_nan
