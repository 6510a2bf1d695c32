"""This module has one warp's share of one tile: scores of 16 positions, online softmax, weighted values, in registers.

Scores are q k * scale * log2(e) in float32. Weights are powers of two of their distance from the running peak. For
codes the peak is only updated if a score exceeds it by HEADROOM, so that sums are rarely multiplied. The sum of the
unrounded weights is kept in float32; the product with the values takes weights rounded to bf16, or to fp16. A row that
sees none of the positions keeps its bits: its factor is exactly 1 and its weights are exactly 0. For the widest heads
two warps have the same positions, and half of the dimensions each. They add up their scores through shared memory, and
so have the same weights. The inner index of both operands of a product has the same permutation, so that a lane reads
16 bytes at a time.
"""

import math
from typing import Any

from lowlat.kernels.attention.copies import FULL_WARP, make_copy_values
from lowlat.kernels.attention.plan import (
    ALL_VISIBLE,
    ALONE,
    DENSE,
    END_MAX,
    FIRST_STEP,
    LAST_STEP,
    PLAN_STRIDE,
    TILE,
    AttentionShape,
    entry_of,
    head_of,
    query_row,
    row_tile_of,
)
from lowlat.kernels.attention.products import make_arrange_queries, make_products
from lowlat.kernels.common.kv_codes import nan_bits
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, uint32

__all__ = ["exchange_bytes", "make_attend", "make_forget", "query_words"]

NAN_BITS = 0x7FC00000
HEADROOM = 8.0  # weights of codes reach 2**8: fp16 holds them, and 32 binades below
NOBODY = 0xFFFFFFFF
OWNER = NOBODY & ~(FIRST_STEP | LAST_STEP | ALL_VISIBLE | ALONE)  # of a place: entry, head and rows
LOG2_E = math.log2(math.e)
MINUS_INFINITY = -math.inf


def query_words(shape: AttentionShape) -> int:
    """Return the words of a lane's queries. For bf16 they include rows that a tile lacks.

    For caches of codes they are followed by the multipliers of rows' scores, that of results, and the queries' owner.
    """
    words = shape.warp_dim // 8
    return shape.eights * (words + 1) + 2 if shape.coded else 2 * shape.row_tiles * words


def make_forget(shape: AttentionShape) -> Any:
    """A device function that clears an item's registers at its end, so that they are free between items.

    Arranged queries stay if there are registers for them, since a block's next item often has the same rows.
    """
    num_totals, num_queries, eights = shape.eights * shape.warp_dim // 4, query_words(shape), shape.eights
    stay = _queries_stay(shape)

    @device_function
    def forget(totals: Any, queries: Any, peaks: Any, norms: Any, is_first: Any) -> None:
        for k in range(num_totals):
            totals[k] = float32(0)
        if is_first or not stay:
            for k in range(num_queries):
                queries[k] = uint32(NOBODY)
        for part in range(eights):
            peaks[part], norms[part] = float32(MINUS_INFINITY), float32(0)

    return forget


def _queries_stay(shape: AttentionShape) -> bool:
    return shape.coded and not shape.whole and shape.eights * shape.warp_dim <= 256


def make_attend(shape: AttentionShape) -> Any:
    """A device function that adds one step's tile, described by `words`, to a warp's sums; first it loads queries."""
    load_queries, add_multiplied = _make_load_queries(shape), _make_score(shape)
    hide, weigh, drop_broken = _make_hide(shape), _make_weigh(shape), _make_drop(shape)
    break_scores, add_halves, cap = _make_break(shape), _make_add_halves(shape), _make_cap(shape)
    _, add_values = make_products(shape)
    row_tiles, eights, split, capped = shape.row_tiles, shape.eights, shape.halves > 1, shape.softcap is not None
    takes_turns = shape.takes_turns
    copy_values: Any = make_copy_values(shape) if takes_turns else None
    num_scores, num_weights = 8 * row_tiles, 2 * eights

    @device_function
    def attend(
        totals: Any, queries: Any, peaks: Any, norms: Any, q: Any, row_ends: Any, plan: Any, words: Any,
        stage: Any, rows: Any, scale: Any, kv_scales: Any, warp: Any, lane: Any, values: Any,
    ) -> None:  # fmt: skip
        """values: the arguments of `copy_values`, and the place to exchange scores if keys and values take turns."""
        entry, row_tile = entry_of(words[0]), int32(row_tile_of(words[0]) * row_tiles)
        if words[0] & uint32(FIRST_STEP):
            load_queries(queries, q, kv_scales, words[0], row_tile, rows, scale, lane)
        start, alone = int32(int32(words[1]) * TILE), int32(words[2])
        all_visible, is_alone = words[0] & uint32(ALL_VISIBLE) != 0, words[0] & uint32(ALONE) != 0
        if not all_visible:
            rows = ptx.stay_here(rows)
            if start >= (row_ends[entry * rows + alone] if is_alone else plan[entry * PLAN_STRIDE + END_MAX]):
                return
        scores = cuda.local.array(num_scores, float32)
        weights = cuda.local.array(num_weights, uint32)
        factors = cuda.local.array(eights, float32)
        add_multiplied(scores, queries, scale, stage, lane)
        exchanged = stage
        if takes_turns:
            offset, v_cache, descriptor, exchanged = values
            copy_values(uint32(stage + offset), v_cache, descriptor, lane)
        if split:
            if not all_visible and start + TILE > plan[entry * PLAN_STRIDE + DENSE]:
                break_scores(scores, drop_broken(stage, lane), lane)
            add_halves(scores, exchanged, warp, lane)
        if capped:
            cap(scores)
        if not all_visible:
            broken = uint32(0)
            if not split and start + TILE > plan[entry * PLAN_STRIDE + DENSE]:
                broken = drop_broken(stage, lane)
            hide(
                scores, row_ends, int32(entry * rows), rows, int32(start + int32(warp) * 16), is_alone, alone, row_tile,
                broken, lane,
            )  # fmt: skip
        weigh(scores, weights, factors, peaks, norms)
        add_values(totals, weights, factors, stage, lane)
        if split:  # the other warp has read this one's scores
            ptx.sync_two_warps(uint32(warp + uint32(1)))

    return attend


def _make_score(shape: AttentionShape) -> Any:
    """A device function that returns a row's scores of 16 positions, of which a lane has four, scaled for weights."""
    add_scores, _ = make_products(shape)
    eights, num_scores, coded, at = shape.eights, 8 * shape.row_tiles, shape.coded, shape.eights * shape.warp_dim // 8

    @device_function
    def score(scores: Any, queries: Any, scale: Any, stage: Any, lane: Any) -> None:
        for k in range(num_scores):
            scores[k] = float32(0)
        add_scores(scores, queries, stage, lane)
        for part in range(eights):
            if coded:
                scale = ptx.float_of_bits(queries[at + part])
            for k in range(4):
                place = (part >> 1) * 8 + (part & 1) * 2 + (k >> 1) * 4 + (k & 1)
                scores[place] = ptx.mul_rn(scores[place], scale)

    return score


def _make_break(shape: AttentionShape) -> Any:
    """A device function that sets scores to NaN for positions whose value, in this warp's half, is not finite."""
    eights = shape.eights

    @device_function
    def break_scores(scores: Any, broken: Any, lane: Any) -> None:
        for part in range(eights):
            for element in range(4):
                place = int32((element >> 1) * 8 + int32(lane & uint32(3)) * 2 + (element & 1))
                index = (part >> 1) * 8 + (element >> 1) * 4 + (part & 1) * 2 + (element & 1)
                if (broken >> uint32(place)) & uint32(1):
                    scores[index] = ptx.float_of_bits(uint32(NAN_BITS))

    return break_scores


def _make_add_halves(shape: AttentionShape) -> Any:
    """A device function of two warps: each adds the other's scores to its own. They are four warps apart.

    Scores are exchanged in the memory of the warp's keys, or if keys and values take turns in that of `exchange_bytes`.
    The other warp must have read them before that memory is written again.
    """
    eights, apart = shape.eights, 4 * (exchange_bytes(shape) or shape.stage_bytes)

    @device_function
    def add_halves(scores: Any, stage: Any, warp: Any, lane: Any) -> None:
        at, second = uint32(stage + lane * uint32(16)), uint32(cuda.threadIdx.x) >> uint32(7)
        cuda.syncwarp()  # all lanes have read their keys
        for part in range(eights):
            s = (part >> 1) * 8 + (part & 1) * 2
            ptx.store_shared_128(
                uint32(at + uint32(part * 512)),
                ptx.bits_of_float(scores[s]), ptx.bits_of_float(scores[s + 1]),
                ptx.bits_of_float(scores[s + 4]), ptx.bits_of_float(scores[s + 5]),
            )  # fmt: skip
        ptx.sync_two_warps(uint32(warp + uint32(1)))
        at = uint32(at - uint32(apart)) if second else uint32(at + uint32(apart))
        for part in range(eights):
            s, others = (part >> 1) * 8 + (part & 1) * 2, ptx.load_shared_128(uint32(at + uint32(part * 512)))
            scores[s] = ptx.add_rn(scores[s], ptx.float_of_bits(others[0]))
            scores[s + 1] = ptx.add_rn(scores[s + 1], ptx.float_of_bits(others[1]))
            scores[s + 4] = ptx.add_rn(scores[s + 4], ptx.float_of_bits(others[2]))
            scores[s + 5] = ptx.add_rn(scores[s + 5], ptx.float_of_bits(others[3]))

    return add_halves


def exchange_bytes(shape: AttentionShape) -> int:
    """Return the bytes of a warp's scores, which are kept next to its stages if keys and values take turns."""
    return 512 * shape.eights if shape.takes_turns else 0


def _make_cap(shape: AttentionShape) -> Any:
    """A device function that caps scores s, given times log2(e): c tanh(s / c), as c (1 - 2 / (exp(2 s / c) + 1)).

    The result is times log2(e), too.
    """
    eights, limit = shape.eights, (shape.softcap or 1.0) * LOG2_E

    @device_function
    def cap(scores: Any) -> None:
        for part in range(eights):
            for k in range(4):
                place = (part >> 1) * 8 + (part & 1) * 2 + (k >> 1) * 4 + (k & 1)
                power = ptx.exp2_approx(ptx.mul_rn(scores[place], float32(2.0 * LOG2_E / limit)))
                share = ptx.div_rn(float32(-2.0 * limit), ptx.add_rn(power, float32(1)))
                scores[place] = ptx.add_rn(share, float32(limit))

    return cap


def _make_load_queries(shape: AttentionShape) -> Any:
    """A device function that loads query fragments of the item's row tiles, unless an earlier item left the same.

    Rows past the last are zero.
    """
    group, kv_heads, eights, coded = shape.group, shape.kv_heads, shape.eights, shape.coded
    words, row_bytes, num_words = shape.warp_dim // 8, 2 * shape.head_dim, query_words(shape)
    piece_bytes, arrange, stay = (32 if coded else 16), make_arrange_queries(shape), _queries_stay(shape)

    @device_function
    def load_rows(queries: Any, q: Any, place: Any, row_tile: Any, rows: Any, lane: Any) -> None:
        for word in range(eights * words, 0 if coded else num_words):
            queries[word] = uint32(ptx.stay_here(int32(0)))  # in a register of its own, where products want it
        for part in range(eights):
            node, member = query_row(row_tile, uint32(part * 8) + (lane >> uint32(2)), group)
            for word in range(words):
                queries[part * words + word] = uint32(0)
            if int64(node) < int64(rows):
                row = int64(entry_of(place)) * int64(rows) + int64(node)
                number = (row * kv_heads + int64(head_of(place))) * group + int64(member)
                address = q + number * row_bytes + int64(lane & uint32(3)) * piece_bytes
                for word in range(words):  # one by one: the products want them in registers side by side
                    offset = (word // (piece_bytes // 4)) * (4 * piece_bytes) + (word % (piece_bytes // 4)) * 4
                    queries[part * words + word] = uint32(ptx.load_global_i32(address + offset))

    @device_function
    def load_queries(
        queries: Any, q: Any, kv_scales: Any, place: Any, row_tile: Any, rows: Any, scale: Any, lane: Any
    ) -> None:
        owner = uint32(place & uint32(OWNER))
        if not stay or queries[num_words - 1] != owner:
            rows, lane = ptx.stay_here(rows), uint32(ptx.stay_here(int32(lane)))
            load_rows(queries, q, place, row_tile, rows, lane)
            if coded:
                arrange(queries, kv_scales, head_of(place), kv_heads, scale)
                queries[num_words - 1] = owner

    return load_queries


def _make_hide(shape: AttentionShape) -> Any:
    """A device function that sets scores of hidden positions to minus infinity, and of values not finite to NaN."""
    group, eights, first = shape.group, shape.eights, shape.first
    windowed, window, keep_end = shape.window is not None, shape.window or 0, shape.first + shape.keep_first

    @device_function
    def hide(
        scores: Any, row_ends: Any, first_row: Any, rows: Any, position: Any, is_alone: Any, alone: Any, row_tile: Any,
        broken: Any, lane: Any,
    ) -> None:  # fmt: skip
        lane = uint32(ptx.stay_here(int32(lane)))
        for part in range(eights):
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
    """A device function that makes weights and factors of scores, and updates peaks and each lane's sums of weights."""
    eights, coded = shape.eights, shape.coded
    pack, exp2 = (ptx.f16_pair, ptx.exp2_approx_ftz) if coded else (ptx.bf16_pair, ptx.exp2_approx)

    @device_function
    def weigh(scores: Any, weights: Any, factors: Any, peaks: Any, norms: Any) -> None:
        for part in range(eights):
            at = (part >> 1) * 8 + (part & 1) * 2
            peak = max(max(scores[at], scores[at + 1]), max(scores[at + 4], scores[at + 5]))
            peak = max(peak, cuda.shfl_xor_sync(FULL_WARP, peak, 1))
            peak = max(peak, cuda.shfl_xor_sync(FULL_WARP, peak, 2))
            if coded:
                peak = peak if peak > ptx.add_rn(peaks[part], float32(HEADROOM)) else peaks[part]
            else:
                peak = max(peaks[part], peak)
            shift = float32(0) if peak == float32(MINUS_INFINITY) else -peak
            factor = exp2(ptx.add_rn(peaks[part], shift))
            factors[part] = float32(1) if peaks[part] == float32(MINUS_INFINITY) else factor  # of nothing
            w0 = exp2(ptx.add_rn(scores[at], shift))
            w1 = exp2(ptx.add_rn(scores[at + 1], shift))
            w2 = exp2(ptx.add_rn(scores[at + 4], shift))
            w3 = exp2(ptx.add_rn(scores[at + 5], shift))
            weights[2 * part], weights[2 * part + 1] = pack(w0, w1), pack(w2, w3)
            added = ptx.add_rn(ptx.add_rn(w0, w1), ptx.add_rn(w2, w3))
            norms[part] = ptx.fma_rn(norms[part], factors[part], added)
            peaks[part] = peak

    return weigh


def _make_drop(shape: AttentionShape) -> Any:
    """A device function that zeroes value rows that are not finite, and returns a bit for each.

    Weight 0 times infinity would be NaN in rows that do not see the position: a draft may not break rows before it.
    Codes of NaN may be decoded to numbers, so for codes the keys are checked, too.
    """
    pitch, coded = shape.row_bytes, shape.coded
    pieces = pitch // 16
    rows_a_read = 32 // pieces
    piece_shift, reads = pieces.bit_length() - 1, 16 // rows_a_read
    skipped = 0 if shape.values_at else reads  # values stand where keys were

    @device_function
    def not_finite(word: Any) -> Any:
        if coded:
            return nan_bits(word) & uint32(0x80808080)
        return uint32((word & uint32(0x7F807F80)) + uint32(0x00800080)) & uint32(0x80008000)

    @device_function
    def drop_broken(stage: Any, lane: Any) -> Any:
        lane = uint32(ptx.stay_here(int32(lane)))
        base, broken = uint32(stage + lane * uint32(16)), uint32(0)
        for read in range(0 if coded else reads, 2 * reads):
            a, b, c, d = ptx.load_shared_128(base + uint32((read - skipped) * 512))
            found = not_finite(a) | not_finite(b) | not_finite(c) | not_finite(d)
            votes = uint32(cuda.ballot_sync(FULL_WARP, found != 0))
            for row in range(rows_a_read):
                if (votes >> uint32(row * pieces)) & uint32((1 << pieces) - 1):
                    broken |= uint32(1 << (read % reads * rows_a_read + row))
        if broken:
            for read in range(reads):
                row = uint32(read * rows_a_read) + (lane >> uint32(piece_shift))
                if (broken >> row) & uint32(1):
                    at = base + uint32((reads + read - skipped) * 512)
                    ptx.store_shared_128(at, uint32(0), uint32(0), uint32(0), uint32(0))
            cuda.syncwarp()
        return broken

    return drop_broken
