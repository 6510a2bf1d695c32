"""This module merges the sums of a block's warps, to a split's partial sum for `combine` or to a whole row's result.

The warps are merged in order. The largest peak is taken, and each warp's sums are multiplied by the power of two of its
peak's distance from it, and added. A warp in which a row sees nothing has factor 0, which changes no bit.
"""

import math
from typing import Any

from lowlat.kernels.attention.copies import FULL_WARP
from lowlat.kernels.attention.plan import (
    KEEP_SPLITS,
    PLAN_STRIDE,
    TILE_SHIFT,
    WINDOW_SPLIT,
    AttentionShape,
    entry_of,
    head_of,
    query_tiles_of,
    row_tile_of,
)
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, uint32

__all__ = ["LOG2_E", "join_sink", "make_merge"]

LOG2_E = math.log2(math.e)
MINUS_INFINITY = -math.inf


@device_function
def _factor(peak: Any, largest: Any) -> Any:
    """Return the power of two of a peak's distance from the largest; 0 if the part sees nothing."""
    shift = float32(0) if largest == float32(MINUS_INFINITY) else -largest
    return ptx.exp2_approx(ptx.add_rn(peak, shift))


@device_function
def join_sink(largest: Any, norm: Any, sink: Any) -> Any:
    """Return a row's norm with its head's sink, and the factor of its sums."""
    sink = ptx.mul_rn(sink, float32(LOG2_E))
    peak = max(largest, sink)
    factor = _factor(largest, peak)
    return factor, ptx.fma_rn(norm, factor, _factor(sink, peak))


def make_merge(shape: AttentionShape) -> Any:
    """A device function of all threads that merges, at an item's end, the warps' sums to the split's part.

    It uses the stages that the warps have just read, and leaves them free. Parts are in the order of the processed
    splits: [0, keep), then [start, ..). For whole rows `partials` are the sinks and `sums` the results.
    """
    write_totals, merge_warps, finish_rows = _make_write(shape), _make_merge_warps(shape), _make_finish_rows(shape)
    kv_heads, group, row_tiles, stage_bytes = shape.kv_heads, shape.group, shape.row_tiles, shape.stage_bytes
    size, turns = _rows_at_once(shape), 8 * shape.eights // _rows_at_once(shape)
    split_shift, whole = shape.split_shift - TILE_SHIFT, shape.whole

    @device_function
    def merge(
        totals: Any, queries: Any, peaks: Any, norms: Any, plan: Any, words: Any, stages: Any, shared_norms: Any,
        warp: Any, lane: Any, partials: Any, sums: Any, splits: Any, rows: Any, row_ends: Any,
    ) -> None:  # fmt: skip
        rows, splits = ptx.stay_here(rows), ptx.stay_here(splits)
        entry, head, row_tile = entry_of(words[0]), head_of(words[0]), row_tile_of(words[0])
        owner = int32((entry * kv_heads + head) * query_tiles_of(rows, group) + row_tile * row_tiles)
        at, split = entry * PLAN_STRIDE, int32(words[1] >> uint32(split_shift))
        keep = plan[at + KEEP_SPLITS]
        part = split if split < keep else int32(split - plan[at + WINDOW_SPLIT] + keep)
        for turn in range(turns):
            tile, inner = turn * size // 16, turn * size % 16
            write_totals(
                totals, queries, peaks, norms, turn, uint32(stages + warp * uint32(stage_bytes)), shared_norms, warp,
                lane,
            )  # fmt: skip
            cuda.syncthreads()
            first = (row_tile * row_tiles + tile) * 16 + inner
            count = min(rows * group - first, size)
            if whole:
                finish_rows(shared_norms, stages, count, int32(first), entry, head, rows, row_ends, partials, sums)
            else:
                parked = min(rows * group, 16)
                target = int64((owner + tile) * splits + part) * int64(parked) + inner
                merge_warps(shared_norms, stages, count, target, partials, sums)
            cuda.syncthreads()

    return merge


def _rows_at_once(shape: AttentionShape) -> int:
    """Return the rows whose float32 sums fit a warp's part of a stage: half of a tile's for codes, or in turns."""
    return 8 if shape.coded or shape.few or shape.takes_turns else 16


def _make_write(shape: AttentionShape) -> Any:
    """A device function that stores a warp's sums of a turn's rows to its stage; those of codes times their scale."""
    tiles, row_bytes, eights, coded = shape.warp_dim // 16, 4 * shape.warp_dim, _rows_at_once(shape) // 8, shape.coded
    multiplier = shape.eights * shape.warp_dim // 8 + shape.eights

    @device_function
    def write_columns(totals: Any, queries: Any, first: Any, base: Any) -> None:
        """Every other sum from `first` on: of dimensions 2 i and 2 i + 1 of 16 of codes, else of i and 8 + i."""
        for tile in range(tiles):
            o = first + tile * 4
            if coded:
                scale = ptx.float_of_bits(queries[multiplier])
                ptx.store_shared_64(
                    (base ^ uint32((tile & 1) << 6)) + uint32((tile >> 1) * 128),
                    ptx.bits_of_float(ptx.mul_rn(totals[o], scale)),
                    ptx.bits_of_float(ptx.mul_rn(totals[o + 2], scale)),
                )
            else:
                for half in range(2):
                    at = (base ^ uint32((2 * tile + half & 3) << 5)) + uint32((tile >> 1) * 128)
                    ptx.store_shared_f32(at, totals[o + 2 * half])

    @device_function
    def write_totals(
        totals: Any, queries: Any, peaks: Any, norms: Any, turn: Any, stage: Any, shared_norms: Any, warp: Any,
        lane: Any,
    ) -> None:  # fmt: skip
        lane = uint32(ptx.stay_here(int32(lane)))
        quad, octet = lane & uint32(3), lane >> uint32(2)
        for eight in range(eights):
            part = turn * eights + eight
            for side in range(2):
                row = uint32(uint32(eight * 8 + side) + (quad << uint32(1)))
                inner = (quad << uint32(5)) ^ (octet << uint32(3 if coded else 2))
                base = uint32(stage + row * uint32(row_bytes) + inner)
                write_columns(totals, queries, part * tiles * 4 + side, base)
            norm = ptx.add_rn(norms[part], cuda.shfl_xor_sync(FULL_WARP, norms[part], 1))
            norm = ptx.add_rn(norm, cuda.shfl_xor_sync(FULL_WARP, norm, 2))
            if quad == 0:
                at = int64(warp) * 32 + int64(uint32(eight * 8) + octet) * 2
                shared_norms[at], shared_norms[at + 1] = peaks[part], norm

    return write_totals


def _make_add_warps(shape: AttentionShape) -> Any:
    """A device function that adds four columns of a row over the warps, into `o`; returns the largest peak and norm."""
    row_bytes, stage_bytes, warps = 4 * shape.warp_dim, shape.stage_bytes, shape.warps // shape.halves
    split, piece_shift = shape.halves > 1, (shape.warp_dim // 4).bit_length() - 1

    @device_function
    def add_warps(o: Any, factors: Any, shared_norms: Any, stage: Any, row: Any, piece: Any) -> Any:
        largest, norm = float32(MINUS_INFINITY), float32(0)
        if split:  # the warps of the piece's half: those of the other have the same peaks and norms
            stage = uint32(stage + (piece >> uint32(piece_shift)) * uint32(warps * stage_bytes))
            piece = uint32(piece & uint32((1 << piece_shift) - 1))
        for warp in range(warps):
            factors[warp] = shared_norms[warp * 32 + int64(row) * 2]
            largest = max(largest, factors[warp])
        for k in range(4):
            o[k] = float32(0)
        at = uint32(
            stage + row * uint32(row_bytes) + ((piece << uint32(4)) ^ (((row >> uint32(1)) & uint32(3)) << uint32(5)))
        )
        for warp in range(warps):
            factor = _factor(factors[warp], largest)
            norm = ptx.fma_rn(shared_norms[warp * 32 + int64(row) * 2 + 1], factor, norm)
            words = ptx.load_shared_128(uint32(at + uint32(warp * stage_bytes)))
            for k in range(4):
                o[k] = ptx.fma_rn(ptx.float_of_bits(words[k]), factor, o[k])
        return largest, norm

    return add_warps


def _make_merge_warps(shape: AttentionShape) -> Any:
    pieces, row_bytes, warps, threads = shape.head_dim // 4, 4 * shape.head_dim, shape.warps, 32 * shape.warps
    units, piece_shift = -(-_rows_at_once(shape) * pieces // threads), pieces.bit_length() - 1
    add_warps = _make_add_warps(shape)

    @device_function
    def merge_warps(shared_norms: Any, stage: Any, count: Any, target: Any, partials: Any, sums: Any) -> None:
        o = cuda.local.array(4, float32)
        factors = cuda.local.array(warps, float32)
        thread = uint32(ptx.stay_here(int32(cuda.threadIdx.x)))
        for unit in range(units):
            number = uint32(thread + uint32(unit * threads))
            row, piece = number >> uint32(piece_shift), number & uint32(pieces - 1)
            if int32(row) < int32(count):
                largest, norm = add_warps(o, factors, shared_norms, stage, row, piece)
                place = target + int64(row)
                ptx.store_global_128(
                    partials + place * row_bytes + int64(piece) * 16,
                    ptx.bits_of_float(o[0]), ptx.bits_of_float(o[1]), ptx.bits_of_float(o[2]), ptx.bits_of_float(o[3]),
                )  # fmt: skip
                if piece == 0:
                    ptx.store_global_64(sums + place * 8, ptx.bits_of_float(largest), ptx.bits_of_float(norm))

    return merge_warps


def _make_finish_rows(shape: AttentionShape) -> Any:
    """A device function that stores the results of live rows among 16, with the sink, as `attention_combine` does."""
    pieces, head_dim, warps, threads = shape.head_dim // 4, shape.head_dim, shape.warps, 32 * shape.warps
    units, piece_shift = -(-_rows_at_once(shape) * pieces // threads), pieces.bit_length() - 1
    add_warps = _make_add_warps(shape)
    group, kv_heads, has_sinks = shape.group, shape.kv_heads, shape.sinks

    @device_function
    def finish_rows(
        shared_norms: Any, stage: Any, count: Any, first: Any, entry: Any, kv_head: Any, rows: Any, row_ends: Any,
        sinks: Any, out: Any,
    ) -> None:  # fmt: skip
        o = cuda.local.array(4, float32)
        factors = cuda.local.array(warps, float32)
        thread = uint32(ptx.stay_here(int32(cuda.threadIdx.x)))
        for unit in range(units):
            number = uint32(thread + uint32(unit * threads))
            row, piece = number >> uint32(piece_shift), number & uint32(pieces - 1)
            query = uint32(uint32(first) + row)
            node = uint32(query // uint32(group))
            if int32(row) < int32(count) and row_ends[entry * rows + int32(node)] != 0:
                largest, norm = add_warps(o, factors, shared_norms, stage, row, piece)
                head, factor = int32(kv_head) * group + int32(query - node * uint32(group)), float32(1)
                if has_sinks:
                    factor, norm = join_sink(largest, norm, ptx.load_global_f32(sinks + int64(head) * 4))
                elif norm == float32(0):
                    norm = float32(1)
                for k in range(4):  # adding 0 turns -0 into 0
                    o[k] = ptx.div_rn(ptx.mul_rn(ptx.add_rn(o[k], float32(0)), factor), norm)
                place = (int64(entry * rows + int32(node)) * (group * kv_heads) + int64(head)) * head_dim
                address = out + (place + int64(piece) * 4) * 2
                ptx.store_global_64(address, ptx.bf16_pair(o[0], o[1]), ptx.bf16_pair(o[2], o[3]))

    return finish_rows
