"""How sure a draft model is of its drafts: the kind of each row's largest probability.

Each warp sums the exponentials of its numbers against their largest, one warp puts a block's together, and one of the
last block of a row the row's, in an order that is fixed by the vocabulary alone. It knows no tree and no width.
"""

import functools
import math
from typing import Any

import torch

from lowlat.kernels.common.memory import byte_at, set_int
from lowlat.kernels.common.norm_math import lane_sum
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.reference.speculation.draft_confidence import EDGES, check_kinds
from lowlat.kernels.sampling.select import (
    BROKEN,
    CHUNK,
    FINITE,
    MINUS_INFINITY,
    MINUS_INFINITY_KEY,
    STRIDE,
    THREADS,
    WARPS,
    count_chunks,
    is_last,
    order_key,
    value_of_key,
    words_broken,
)
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall, Workspace
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["draft_confidence", "examples"]

LEAST_KEY = MINUS_INFINITY_KEY + 1  # of the least finite number: against it what pads a row is 0, and no NaN


def draft_confidence(
    logits: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    draft_kinds: torch.Tensor,
    end: int,
    workspace: Workspace,
) -> list[KernelCall]:
    """`draft_confidence` of the reference, whose arguments these are.

    Time: one read of the logits, all of a thread's at once, an exponential each, and a trip to memory behind a counter.
    Sums differ from the reference's in their last bits: where a probability is at an edge, so may the kind. Raises
    ShapeError for shapes that do not fit and for Vd above 262144.
    """
    check_kinds(logits, draft_kinds, end)
    (rows, width), ends = logits.shape, draft_kinds.shape[1]
    live = row_live.reshape(-1) if row_live is not None else 0
    if isinstance(live, torch.Tensor):
        check_shape("row_live", live, rows)
    chunks = count_chunks("logits", width)
    partials = workspace(f"draft_confidence.partials.{rows}.{chunks}", (rows, chunks, 2), torch.int32)
    counters = workspace(f"draft_confidence.counters.{rows}", (rows,), torch.int32)
    kernel = _make(width, ends, end, row_live is not None)
    return [KernelCall(kernel, (chunks, rows, 1), (logits, live, draft_kinds, partials, counters))]


@functools.cache
def _make_load(width: int) -> Any:
    """A device function: the words of a chunk that a thread owns, in fours as `load_words` has them.

    Its arguments: address of the row, first index of the chunk. Past the row's end they are minus infinity. Loads are
    16 bytes wide where rows are aligned to that, and none waits for another.
    """
    wide = width % 4 == 0

    @device_function
    def four(row: Any, index: Any) -> Any:
        pad = uint32(MINUS_INFINITY)
        if wide:
            a, b, c, d = ptx.load_global_128(row + 4 * min(index, int64(width - 4)))
            if index >= width:
                a, b, c, d = pad, pad, pad, pad
            return a, b, c, d
        a = _word(row, index, width)
        b = _word(row, index + 1, width)
        c = _word(row, index + 2, width)
        d = _word(row, index + 3, width)
        return a, b, c, d

    @device_function
    def load(row: Any, first: Any) -> Any:
        index = first + int64(4 * cuda.threadIdx.x)
        return (
            four(row, index),
            four(row, index + STRIDE),
            four(row, index + 2 * STRIDE),
            four(row, index + 3 * STRIDE),
        )

    return load


@device_function
def _word(row: Any, index: Any, width: Any) -> Any:
    word = uint32(ptx.load_global_i32(row + 4 * min(index, int64(width - 1))))
    return word if index < width else uint32(MINUS_INFINITY)


@device_function
def _largest_key(words: Any) -> Any:
    """The largest key of a thread's words, at least that of the least finite number."""
    key = uint32(LEAST_KEY)
    for four in words:
        for word in four:
            key = max(key, order_key(word))
    return key


@device_function
def _exponential(value: Any, largest: Any) -> Any:
    return float32(math.exp(ptx.add_rn(value, -largest)))


@device_function
def _total(words: Any, largest: Any) -> Any:
    """The sum of the exponentials of a thread's words less the largest."""
    total = float32(0.0)
    for four in words:
        for word in four:
            total = ptx.add_rn(total, _exponential(ptx.float_of_bits(word), largest))
    return total


@device_function
def _together(key: Any, total: Any) -> Any:
    """A warp's pairs of a largest number's key and a sum against that number, as one pair in every lane."""
    largest = ptx.warp_max(key)
    share = _exponential(value_of_key(key), value_of_key(largest))
    return largest, lane_sum(ptx.mul_rn(total, share))


@device_function
def _pair_of_row(partials: Any, chunks: Any) -> Any:
    """The one pair of a row; partials: address of [chunks, 2] uint32, at most two for each lane."""
    lane = int64(cuda.threadIdx.x & 31)
    near_key, near_total, far_key, far_total = uint32(LEAST_KEY), uint32(0), uint32(LEAST_KEY), uint32(0)
    if lane < chunks:
        near_key, near_total = ptx.load_global_64(partials + 8 * lane)
    if chunks > 32 and lane + 32 < chunks:
        far_key, far_total = ptx.load_global_64(partials + 8 * (lane + 32))
    key = max(near_key, far_key)
    largest = value_of_key(key)
    total = ptx.mul_rn(ptx.float_of_bits(near_total), _exponential(value_of_key(near_key), largest))
    if chunks > 32:
        share = _exponential(value_of_key(far_key), largest)
        total = ptx.add_rn(total, ptx.mul_rn(ptx.float_of_bits(far_total), share))
    return _together(key, total)


@device_function
def _kind(key: Any, total: Any) -> Any:
    """How many edges the largest probability reaches, the inverse of the row's sum; 0 where the row is not finite."""
    found = int64(0)
    if key != uint32(BROKEN):
        for edge in EDGES:
            found += int64(1) if ptx.mul_rn(total, float32(edge)) <= float32(1.0) else int64(0)
    return found


@functools.cache
def _make(width: int, ends: int, end: int, masked: bool) -> Kernel:
    """Specialised by Vd, the columns of kinds and the one that is written, and whether rows may be dead.

    Grid (chunks of a row, R).
    """
    chunks, load = count_chunks("logits", width), _make_load(width)

    def kernel(logits: Any, row_live: Any, draft_kinds: Any, partials: Any, counters: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        keys = cuda.shared.array(WARPS, types.uint32)
        totals = cuda.shared.array(WARPS, types.float32)
        chunk, row, thread = int64(cuda.blockIdx.x), int64(cuda.blockIdx.y), cuda.threadIdx.x
        first, live = chunk * CHUNK, True
        words = load(logits + row * (4 * width), first)  # of dead rows, too: nobody waits for the flag
        if masked:
            live = byte_at(row_live, row) != 0
        if not live:
            if chunk == 0 and thread == 0:
                set_int(draft_kinds, row * ends + end, int64(0))
            return
        key = _largest_key(words)
        if words_broken(words, first, width, uint32(FINITE)):
            key = uint32(BROKEN)
        key = ptx.warp_max(key)
        total = lane_sum(_total(words, value_of_key(key)))
        if thread & 31 == 0:
            keys[thread >> 5], totals[thread >> 5] = key, total
        cuda.syncthreads()
        if thread >= 32:
            return
        key, total = uint32(LEAST_KEY), float32(0.0)
        if thread < WARPS:
            key, total = keys[thread], totals[thread]
        key, total = _together(key, total)
        if chunks > 1:
            mine = partials + row * (8 * chunks)
            if thread == 0:
                ptx.store_global_64(mine + 8 * chunk, key, ptx.bits_of_float(total))
            if not is_last(counters + 4 * row, chunks):
                return
            key, total = _pair_of_row(mine, chunks)
        if thread == 0:
            set_int(draft_kinds, row * ends + end, _kind(key, total))

    name = f"draft_confidence_{width}_{ends}_{end}_{'masked' if masked else 'whole'}"
    return Kernel(name, kernel, (types.int64,) * 5, THREADS)


def examples() -> list[Kernel]:
    """Specialisations for CI to compile: with and without wide loads, of one chunk, a few and many."""
    return [_make(32000, 3, 0, True), _make(201088, 3, 2, False), _make(97, 1, 0, True)]
