"""This module has the kernel of a router's logits, with or without the norm before it.

A block has four experts and a few rows. It fetches its experts' weights before the previous kernel has ended, norms its
rows in the order of `norm_math` if asked to, and multiplies. Four warps share an expert, each with a quarter of the
columns, so a logit's order of accumulation depends on the width alone. Rows are multiplied as stored bf16, so a row's
bits do not depend on the kernel that normed it.
"""

from functools import cache
from typing import Any

from lowlat.kernels.common.norm_math import (
    CHUNK,
    THREADS,
    WARPS,
    add_squares,
    high_value,
    inverse_rms,
    lane_sum,
    low_value,
    normalised_pair,
)
from lowlat.kernels.common.norm_row import is_live, make_norm_functions, weights_label
from lowlat.kernels.common.sentinels import MISSING
from lowlat.kernels.sampling.select import copies_wait_all
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = ["EXPERTS", "MOST_AWAITED", "make_router", "min_blocks_of", "rows_at_once"]

EXPERTS = 4  # of a block
QUARTERS = WARPS // EXPERTS  # warps that share an expert
MOST_AWAITED = 3
MOST_HELD_BYTES = 47 * 1024  # of 48 that a kernel may declare
DEAD = -1.0  # no row has such an inverse


def min_blocks_of(width: int, held: int, gpu: Gpu) -> int:
    """The blocks an SM by registers: two where nothing spills, so that a block fits next to the GEMM's."""
    return 2 if held < 4 and width <= CHUNK * THREADS and gpu.capability == H200.capability else 1


def rows_at_once(rows: int, width: int, blocks: int, gpu: Gpu, wide: bool = False) -> int:
    """The rows that a block holds at a time: 1, 2 or 4; no bit depends on it.

    They are as few as give each SM a block at most, for a row takes its time, and as registers and shared memory allow.

    blocks  of the experts
    wide    a norm's weight of float32, which takes two rows' places, is held with them
    """
    most = 4 if width <= CHUNK * THREADS else 1
    if wide and (most + 2) * 2 * width > MOST_HELD_BYTES:
        most = min(most, 2)
    fitting = (held for held in (1, 2) if blocks * -(-rows // held) <= gpu.num_multiprocessors)
    return min(most, next(fitting, 4 if rows > 2 else rows))


@cache
def make_router(
    width: int, experts: int, held: int, min_blocks: int, eps: float | None, biased: bool = True, wide: bool = False
) -> Kernel:
    """The kernel for E experts and rows [.., N]. Grid (blocks of EXPERTS experts, groups of rows).

    held        rows that a block holds at a time, as `rows_at_once` has it
    min_blocks  as `min_blocks_of` has it
    eps         of the norm; None: rows are normed already, and the norm's arguments are not used
    biased      logits have a bias
    wide        the norm's weight is float32
    """
    normed_here = eps is not None
    load_weights, keep_norm = _make_load_weights(width, experts), _make_keep_norm(width, wide)
    load_rows, store_rows = _make_load_rows(width, held), _make_store_rows(width, held)
    add_row_squares, invert = _make_row_squares(width, held), _make_invert(width, 0.0 if eps is None else eps)
    normalise, multiply = _make_normalise(width, held, wide), _make_multiply(width, held)
    steps, own = _steps(width), _chunks_a_thread(width)
    weight_words, row_words = 4 * steps, 4 * own * held
    weight_rows = (2 if wide else 1) if normed_here else 0  # rows' places that the norm's weight takes after the rows
    shared_words = (held + weight_rows) * width // 2
    parts = held * WARPS

    def router(
        x: Any, norm_weight: Any, row_live: Any, weight: Any, bias: Any, normed: Any, logits: Any, rows: Any,
        first_awaited: Any, second_awaited: Any, third_awaited: Any, first_chunks: Any, second_chunks: Any,
        third_chunks: Any,
    ) -> None:  # fmt: skip
        ptx.let_next_kernel_start()
        shared_rows = cuda.shared.array(shared_words, types.uint32, alignment=16)
        sums, partials = cuda.shared.array(parts, float32), cuda.shared.array(parts, float32)
        inverses = cuda.shared.array(held, float32)
        weights = cuda.local.array(weight_words, uint32)
        words = cuda.local.array(row_words, uint32)
        thread, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        lane, warp = thread & uint32(31), thread >> uint32(5)
        base = ptx.shared_address(shared_rows)
        load_weights(weights, weight, uint32(block * uint32(EXPERTS) + (warp >> uint32(2))), warp & uint32(3), lane)
        if normed_here:
            keep_norm(uint32(base + uint32(held * 2 * width)), norm_weight)
        expert, own_bias = uint32(block * uint32(EXPERTS) + (lane & uint32(3))), float32(0)
        if biased and warp == uint32(0) and expert < uint32(experts):
            own_bias = ptx.load_global_bf16(bias + int64(expert) * int64(2))
        ptx.wait_for_previous_kernel()
        _fill(first_awaited, first_chunks)
        _fill(second_awaited, second_chunks)
        _fill(third_awaited, third_chunks)
        first = int32(int32(cuda.blockIdx.y) * int32(held))
        while first < rows:
            if normed_here:
                row = int32(first + int32(warp))
                live = warp < uint32(held) and row < rows
                if live:
                    live = is_live(row_live, row)
                load_rows(words, x, first, rows)
                add_row_squares(words, sums, lane, warp)
                cuda.syncthreads()
                if warp < uint32(held):
                    invert(sums, inverses, warp, live)
                cuda.syncthreads()
                copies_wait_all()
                normalise(words, inverses, base, normed, first, rows, block == uint32(0))
            else:
                load_rows(words, x, first, rows)
                store_rows(words, base)
            cuda.syncthreads()
            multiply(weights, base, partials, lane, warp)
            cuda.syncthreads()
            if warp == uint32(0):
                mine = int32(lane >> uint32(2))
                if mine < held and int32(first + mine) < rows and expert < uint32(experts):
                    at = int64(mine) * int64(WARPS) + int64((lane & uint32(3)) * uint32(QUARTERS))
                    total = partials[at]
                    for quarter in range(1, QUARTERS):
                        total = ptx.add_rn(total, partials[at + int64(quarter)])
                    if biased:
                        total = ptx.add_rn(total, own_bias)
                    place = int64(first + mine) * int64(experts) + int64(expert)
                    ptx.store_relaxed_gpu_f32(logits + place * int64(4), total)
            first = int32(first + int32(cuda.gridDim.y) * int32(held))

    signature = (*(types.int64,) * 7, types.int32, *(types.int64,) * MOST_AWAITED, *(types.int32,) * MOST_AWAITED)
    norm = f"eps{eps!r}{weights_label(wide)}" if normed_here else "alone"
    name = f"router_n{width}_e{experts}_r{held}x{min_blocks}_{norm}{'' if biased else '_unbiased'}"
    return Kernel(name, router, signature, THREADS, min_blocks)


@device_function
def _fill(awaited: Any, chunks: Any) -> None:
    """Fill memory with `sentinels.MISSING`, all blocks' threads together."""
    block = int64(cuda.blockIdx.y) * int64(cuda.gridDim.x) + int64(cuda.blockIdx.x)
    place, missing = int64(block * int64(THREADS) + int64(cuda.threadIdx.x)), uint32(MISSING)
    while place < int64(chunks):
        ptx.store_global_128(awaited + place * int64(16), missing, missing, missing, missing)
        place = int64(place + int64(cuda.gridDim.x) * int64(cuda.gridDim.y) * int64(THREADS))


def _steps(width: int) -> int:
    """The turns in which a quarter's 32 lanes take 8 columns each."""
    return -(-(width // 8) // (32 * QUARTERS))


def _chunks_a_thread(width: int) -> int:
    """The chunks of 8 elements of a row that a thread loads."""
    return -(-(width // 8) // THREADS)


def _make_load_weights(width: int, experts: int) -> Any:
    steps = _steps(width)

    @device_function
    def load_weights(weights: Any, weight: Any, expert: Any, quarter: Any, lane: Any) -> None:
        """Load a lane's part of its warp's quarter of an expert's row; zeros where there is none."""
        for step in range(steps):
            chunk = uint32(uint32(step * QUARTERS * 32) + quarter * uint32(32) + lane)
            a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
            if expert < uint32(experts) and chunk < uint32(width // 8):
                place = weight + int64(expert) * int64(2 * width) + int64(chunk) * int64(16)
                a, b, c, d = ptx.load_global_nc_128(place)
            weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3] = a, b, c, d

    return load_weights


def _make_keep_norm(width: int, wide: bool) -> Any:
    own, pieces = _chunks_a_thread(width), 2 if wide else 1

    @device_function
    def keep_norm(target: Any, weight: Any) -> None:
        """Start copies of a thread's chunks of the norm's weight to shared memory, for this thread alone."""
        for part in range(own):
            chunk = uint32(uint32(cuda.threadIdx.x) + uint32(part * THREADS))
            if chunk < uint32(width // 8):
                for piece in range(pieces):
                    place = uint32(uint32(chunk * uint32(pieces)) + uint32(piece))
                    ptx.copy_async_16(uint32(target + place * uint32(16)), weight + int64(place) * int64(16))
        ptx.copies_commit()

    return keep_norm


def _make_load_rows(width: int, held: int) -> Any:
    own = _chunks_a_thread(width)

    @device_function
    def load_rows(words: Any, x: Any, first: Any, rows: Any) -> None:
        """Load a thread's chunks of all rows; zeros past their end, the last row again past the last."""
        for row in range(held):
            source = x + int64(min(int32(first + int32(row)), int32(rows - int32(1)))) * int64(2 * width)
            for part in range(own):
                chunk = uint32(uint32(cuda.threadIdx.x) + uint32(part * THREADS))
                a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                if chunk < uint32(width // 8):
                    a, b, c, d = ptx.load_global_128(source + int64(chunk) * int64(16))
                at = 4 * (row * own + part)
                words[at], words[at + 1], words[at + 2], words[at + 3] = a, b, c, d

    return load_rows


def _make_store_rows(width: int, held: int) -> Any:
    own = _chunks_a_thread(width)

    @device_function
    def store_rows(words: Any, base: Any) -> None:
        """Put rows that are normed already into shared memory."""
        for part in range(own):
            chunk = uint32(uint32(cuda.threadIdx.x) + uint32(part * THREADS))
            if chunk < uint32(width // 8):
                for row in range(held):
                    at, place = 4 * (row * own + part), uint32(base + uint32(row * 2 * width) + chunk * uint32(16))
                    ptx.store_shared_128(place, words[at], words[at + 1], words[at + 2], words[at + 3])

    return store_rows


def _make_row_squares(width: int, held: int) -> Any:
    own = _chunks_a_thread(width)

    @device_function
    def add_row_squares(words: Any, sums: Any, lane: Any, warp: Any) -> None:
        """Store each warp's sum of squares of each row, in the order of `norm_math.block_sum`."""
        for row in range(held):
            total = float32(0.0)
            for part in range(own):
                at = 4 * (row * own + part)
                total = add_squares(total, words[at], words[at + 1], words[at + 2], words[at + 3])
            total = lane_sum(total)
            if lane == uint32(0):
                sums[int64(row * WARPS) + int64(warp)] = total

    return add_row_squares


def _make_invert(width: int, eps: float) -> Any:
    @device_function
    def invert(sums: Any, inverses: Any, row: Any, live: Any) -> None:
        """Store one over the root of a row's mean square, by one warp; minus one for a dead row."""
        at = int64(row) * int64(WARPS)
        total = sums[at]
        for warp in range(1, WARPS):
            total = ptx.add_rn(total, sums[at + int64(warp)])
        if uint32(cuda.threadIdx.x) & uint32(31) == uint32(0):
            inverses[int64(row)] = inverse_rms(total, width, eps) if live else float32(DEAD)

    return invert


def _make_kept_weights(wide: bool) -> Any:
    """A device function that loads a chunk's weights from where `keep_norm` has stored them."""

    @device_function
    def narrow(kept: Any, chunk: Any) -> Any:
        return ptx.load_shared_128(uint32(kept + chunk * uint32(16)))

    @device_function
    def both(kept: Any, chunk: Any) -> Any:
        a, b, c, d = ptx.load_shared_128(uint32(kept + chunk * uint32(32)))
        e, f, g, h = ptx.load_shared_128(uint32(kept + chunk * uint32(32) + uint32(16)))
        return a, b, c, d, e, f, g, h

    return both if wide else narrow


def _make_normalise(width: int, held: int, wide: bool) -> Any:
    own, kept_weights, scale = _chunks_a_thread(width), _make_kept_weights(wide), make_norm_functions(wide).scale

    @device_function
    def normalise(words: Any, inverses: Any, base: Any, normed: Any, first: Any, rows: Any, writes: Any) -> None:
        """Scale the rows and put them into shared memory; one block of all that have them writes them out."""
        for part in range(own):
            chunk = uint32(uint32(cuda.threadIdx.x) + uint32(part * THREADS))
            if chunk < uint32(width // 8):
                kept = kept_weights(uint32(base + uint32(held * 2 * width)), chunk)
                for row in range(held):
                    at, inverse = 4 * (row * own + part), inverses[row]
                    if wide:
                        a, b, c, d = scale((words[at], words[at + 1], words[at + 2], words[at + 3]), inverse, kept)
                    else:
                        a, b = (
                            normalised_pair(words[at], inverse, kept[0]),
                            normalised_pair(words[at + 1], inverse, kept[1]),
                        )
                        c, d = (
                            normalised_pair(words[at + 2], inverse, kept[2]),
                            normalised_pair(words[at + 3], inverse, kept[3]),
                        )
                    if inverse == float32(DEAD):
                        a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
                    ptx.store_shared_128(uint32(base + uint32(row * 2 * width) + chunk * uint32(16)), a, b, c, d)
                    place = int32(first + int32(row))
                    if writes and place < rows:
                        ptx.store_global_128(
                            normed + int64(place) * int64(2 * width) + int64(chunk) * int64(16), a, b, c, d
                        )

    return normalise


def _make_multiply(width: int, held: int) -> Any:
    steps = _steps(width)

    @device_function
    def multiply(weights: Any, base: Any, partials: Any, lane: Any, warp: Any) -> None:
        """Multiply each row with this warp's quarter of an expert: columns in order in a lane, then the lanes."""
        quarter = warp & uint32(QUARTERS - 1)
        for row in range(held):
            total = float32(0.0)
            for step in range(steps):
                chunk = uint32(uint32(step * QUARTERS * 32) + quarter * uint32(32) + lane)
                words = (uint32(0), uint32(0), uint32(0), uint32(0))
                if chunk < uint32(width // 8):
                    words = ptx.load_shared_128(uint32(base + uint32(row * 2 * width) + chunk * uint32(16)))
                for word in range(4):
                    w = weights[4 * step + word]
                    total = ptx.fma_rn(low_value(words[word]), low_value(w), total)
                    total = ptx.fma_rn(high_value(words[word]), high_value(w), total)
            total = lane_sum(total)
            if lane == uint32(0):
                partials[int64(row * WARPS) + int64(warp)] = total

    return multiply
