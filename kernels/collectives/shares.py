"""This all-reduce of many rows is a reduce-scatter and an all-gather, with the residual sum and the norm after it.

Rank r mod R sums row r. The other ranks push their partial rows to it. It adds them as a tree in the order of ranks,
adds the residual, rounds, and pushes the sum to the others. So a row crosses the link twice, once in float32 and once
in bf16, except a rank's own rows. `all_reduce` pushes every partial row to all ranks, in words of twice the size. Here
numbers have no epoch of their own: one counter word follows a block's part of a row.

A block pushes a row, sums a row, or takes a row's sum. Pushing blocks wait for no other block, so that rows cross at
the link's speed. The other blocks wait for blocks of the same row. So the blocks of a launch must start in order, and
the blocks of all ranks must run at the same time, which ranks that share a GPU cannot do.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.peers.words import MAX_RANKS, MISSING_BITS, WORD_BYTES, area_of, await_word, check_rank
from lowlat.kernels.common.norm_math import CHUNK, THREADS, WARPS, high_value, low_value
from lowlat.kernels.common.norm_row import is_live, make_norm_functions, weights_label
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live, check_width
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["RowShares", "examples", "share_add", "share_add_norm", "share_words"]

BLOCKS_AN_SM = {2: 3, 4: 2}  # by number of ranks; for more ranks registers allow one


@dataclass(frozen=True)
class RowShares:
    """The memory for the reduce-scatter of many rows of one width.

    rank   of the GPU that launches
    areas  [share_words] int64, by rank, zero at first: a counter for each row and rank, the partial rows that this rank
           sums, and the sums of other ranks' rows
    rows   the most rows of a launch
    width  numbers of a row
    abort  [1] int64 in pinned memory, shared by all ranks and the host: not zero ends all waits
    """

    rank: int
    areas: tuple[torch.Tensor, ...]
    rows: int
    width: int
    abort: torch.Tensor

    def __post_init__(self) -> None:
        check_rank(self.rank, len(self.areas))
        for area in self.areas:
            check_shape("area", area, share_words(len(self.areas), self.rows, self.width))


def share_words(ranks: int, rows: int, width: int) -> int:
    """The number of int64 in a rank's area. Raises ShapeError for an unsupported width."""
    check_width(width)
    return (_sums_at(ranks, rows, width) + rows * width * 2) // WORD_BYTES


def _parts_at(ranks: int, rows: int) -> int:
    return -(-rows * ranks // 2) * 2 * WORD_BYTES


def _sums_at(ranks: int, rows: int, width: int) -> int:
    return _parts_at(ranks, rows) + ranks * -(-rows // ranks) * width * 4


def _make_part(number: int) -> Any:
    """A device function: 4 numbers of one rank's partial row, this rank's own or a pushed one."""

    @device_function
    def part(x: Any, rank: Any, parts: Any, per_rank: Any, offset: Any) -> Any:
        if rank == int64(number):
            a, b, c, d = ptx.load_global_128(x + offset)
        else:
            a, b, c, d = ptx.load_relaxed_gpu_128(parts + int64(number) * per_rank + offset)
        return ptx.float_of_bits(a), ptx.float_of_bits(b), ptx.float_of_bits(c), ptx.float_of_bits(d)

    return part


def _make_tree(first: int, last: int) -> Any:
    """A device function: the sum of ranks `first` to `last` - 1, as a tree of halves."""
    if last - first == 1:
        return _make_part(first)
    half = (first + last + 1) // 2
    low, high = _make_tree(first, half), _make_tree(half, last)

    @device_function
    def both(x: Any, rank: Any, parts: Any, per_rank: Any, offset: Any) -> Any:
        a, b, c, d = low(x, rank, parts, per_rank, offset)
        e, f, g, h = high(x, rank, parts, per_rank, offset)
        return ptx.add_rn(a, e), ptx.add_rn(b, f), ptx.add_rn(c, g), ptx.add_rn(d, h)

    return both


@device_function
def _await(place: Any, epoch: Any, abort: Any, code: Any, lost: Any, failed: Any) -> None:
    """Wait for a peer's counter; all threads of the block learn if the wait was given up."""
    _, lost = await_word(place, epoch, abort, code, lost)
    ptx.fence_system()
    if lost != uint32(0):
        failed[0] = uint32(1)


def _make_place_of(ranks: int) -> Any:
    """A device function: the row of a block. Pushing blocks come first, then summing ones, then those that take sums.

    So a block waits only for blocks with smaller numbers, on another rank.
    """

    @device_function
    def place_of(block: Any, others: Any, count: Any, rank: Any) -> Any:
        row = uint32(uint32(block - others) * uint32(ranks) + rank)
        if block < others or block >= count:  # of other ranks' rows, in order
            number = block if block < others else uint32(block - count)
            group = uint32(number // uint32(ranks - 1))
            owner = uint32(number - group * uint32(ranks - 1))
            row = uint32(group * uint32(ranks) + owner + uint32(owner >= rank))
        return row

    return place_of


def _make_push_part(width: int) -> Any:
    """A device function that pushes a partial row to the rank that sums it, in runs of 512 bytes a warp."""
    pieces = width // 4  # of 16 bytes

    @device_function
    def push_part(x: Any, target: Any, thread: Any) -> None:
        piece = thread
        while piece < uint32(pieces):
            offset = int64(piece) * int64(16)
            words = ptx.load_global_128(x + offset)
            ptx.store_global_128(target + offset, words[0], words[1], words[2], words[3])
            piece = uint32(piece + uint32(THREADS))

    return push_part


def _make_take_sum(chunks: int) -> Any:
    """A device function that copies a pushed sum to the residual stream; returns the thread's first chunk."""

    @device_function
    def take_sum(source: Any, total: Any, thread: Any, failed: Any) -> Any:
        chunk, first = thread, (uint32(0), uint32(0), uint32(0), uint32(0))
        while chunk < uint32(chunks):
            words = ptx.load_relaxed_gpu_128(source + int64(chunk) * int64(16))
            if failed[0] != uint32(0):
                words = (uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS))
            ptx.store_global_128(total + int64(chunk) * int64(16), words[0], words[1], words[2], words[3])
            if chunk == thread:
                first = words
            chunk = uint32(chunk + uint32(THREADS))
        return first

    return take_sum


def _make_add_parts(width: int, ranks: int, shares: int) -> Any:
    """A device function that sums a row of this rank's share, and stores it in the residual stream and at all peers;
    returns the thread's first chunk."""
    chunks, add_up = width // CHUNK, _make_tree(0, ranks)

    @device_function
    def add_half(low: Any, high: Any, x: Any, rank: Any, parts: Any, offset: Any) -> Any:
        """Half a chunk's residual, two words, and its parts, added and rounded: four numbers at a time, so that blocks
        of few registers are many on an SM."""
        a, b, c, d = add_up(x, rank, parts, int64(shares * width * 4), offset)
        return (
            ptx.bf16_pair(ptx.add_rn(low_value(low), a), ptx.add_rn(high_value(low), b)),
            ptx.bf16_pair(ptx.add_rn(low_value(high), c), ptx.add_rn(high_value(high), d)),
        )

    @device_function
    def add_parts(
        x: Any, a: Any, total: Any, parts: Any, rank: Any, areas: Any, sum_at: Any, thread: Any, failed: Any
    ) -> Any:
        chunk, first = thread, (uint32(0), uint32(0), uint32(0), uint32(0))
        while chunk < uint32(chunks):
            at = int64(chunk) * int64(16)
            b, c, d, e = ptx.load_global_128(a + at)
            b, c = add_half(b, c, x, rank, parts, at * int64(2))
            d, e = add_half(d, e, x, rank, parts, at * int64(2) + int64(16))
            words = b, c, d, e
            if failed[0] != uint32(0):
                words = (uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS))
            ptx.store_global_128(total + at, words[0], words[1], words[2], words[3])
            for peer in range(ranks):
                if int64(peer) != rank:
                    target = area_of(int64(peer), areas) + sum_at + at
                    ptx.store_global_128(target, words[0], words[1], words[2], words[3])
            if chunk == thread:
                first = words
            chunk = uint32(chunk + uint32(THREADS))
        return first

    return add_parts


@cache
def _make(width: int, ranks: int, rows: int, normed: bool, eps: float = 0.0, wide: bool = False) -> Kernel:
    functions = make_norm_functions(wide)
    load_first_weights, finish_norm = functions.load_first, functions.finish
    chunks, shares = width // CHUNK, -(-rows // ranks)
    parts_at, sums_at = _parts_at(ranks, rows), _sums_at(ranks, rows, width)
    place_of = _make_place_of(ranks)
    push_part, take_sum, add_parts = (
        _make_push_part(width),
        _make_take_sum(chunks),
        _make_add_parts(width, ranks, shares),
    )

    def share_rows(
        x: Any, a: Any, weight: Any, row_live: Any, total: Any, out: Any, abort: Any, count: Any, others: Any,
        rank: Any, a0: Any, a1: Any, a2: Any, a3: Any, a4: Any, a5: Any, a6: Any, a7: Any,
    ) -> None:  # fmt: skip
        sums, failed = cuda.shared.array(shape=WARPS, dtype=float32), cuda.shared.array(shape=1, dtype=uint32)
        thread, block = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        areas = a0, a1, a2, a3, a4, a5, a6, a7
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        row = place_of(block, uint32(others), uint32(count), uint32(rank))
        owner, share, offset = int64(row % uint32(ranks)), int64(row // uint32(ranks)), int64(row) * int64(width * 2)
        words_at, own = int64(row) * int64(ranks * WORD_BYTES), area_of(rank, areas)
        private = own + words_at + rank * int64(WORD_BYTES)
        mine, sum_at, code = x + int64(row) * int64(width * 4), int64(sums_at) + offset, rank + int64(1)
        epoch, lost = ptx.load_global_64(private)
        epoch = uint32(epoch + uint32(1))
        if block < uint32(others):
            part_at = int64(parts_at) + (rank * int64(shares) + share) * int64(width * 4)
            push_part(mine, area_of(owner, areas) + part_at, thread)
            cuda.syncthreads()
            if thread == uint32(0):
                ptx.fence_system()
                word = area_of(owner, areas) + words_at + rank * int64(WORD_BYTES)
                ptx.store_relaxed_system_word(word, uint32(0), epoch)
            return
        if thread == uint32(0):
            failed[0] = lost
        cuda.syncthreads()  # all threads have read the count
        if owner != rank:
            if thread == uint32(0):
                place = own + words_at + owner * int64(WORD_BYTES)
                _await(place, epoch, abort, code | (owner + int64(1)) << int64(8), lost, failed)
        elif thread < uint32(ranks) and int64(thread) != rank:
            place = own + words_at + int64(thread) * int64(WORD_BYTES)
            _await(place, epoch, abort, code | (int64(thread) + int64(1)) << int64(8), lost, failed)
        cuda.syncthreads()
        if thread == uint32(0):
            ptx.store_global_64(private, epoch, failed[0])
        if owner != rank:
            first = take_sum(own + sum_at, total + offset, thread, failed)
        else:
            parts = own + int64(parts_at) + share * int64(width * 4)
            first = add_parts(mine, a + offset, total + offset, parts, rank, areas, sum_at, thread, failed)
            cuda.syncthreads()
            if thread < uint32(ranks) and int64(thread) != rank:
                ptx.fence_system()
                word = area_of(int64(thread), areas) + words_at + rank * int64(WORD_BYTES)
                ptx.store_relaxed_system_word(word, uint32(0), epoch)
        if normed:
            live, weights = is_live(row_live, int64(row)), load_first_weights(weight, width)
            finish_norm(first, weights, total + offset, False, weight, out + offset, int64(0), live, sums, width, eps)

    name = f"share_rows_n{width}_ranks{ranks}_m{rows}{f'_norm_eps{eps!r}' if normed else ''}{weights_label(wide)}"
    return Kernel(name, share_rows, (types.int64,) * (10 + MAX_RANKS), THREADS, BLOCKS_AN_SM.get(ranks, 1))


def _calls(
    x: torch.Tensor, a: torch.Tensor, shares: RowShares, total: torch.Tensor, norm: tuple[Argument, ...], eps: float
) -> list[KernelCall]:
    count, width = x.shape
    if width != shares.width or not count:
        raise ShapeError(f"ranks share rows of {shares.width}, not {list(x.shape)}")
    check_dtype(torch.float32, x=x)
    check_dtype(torch.bfloat16, a=a, total=total)
    for name, tensor in (("a", a), ("total", total)):
        check_shape(name, tensor, count, width)
    areas: list[Argument] = [*shares.areas, *[0] * (MAX_RANKS - len(shares.areas))]
    weight, row_live, out = norm or (0, 0, 0)
    wide = isinstance(weight, torch.Tensor) and are_wide(weight)
    kernel, calls = _make(width, len(shares.areas), shares.rows, bool(norm), eps, wide), []
    for start in range(0, count, shares.rows):
        part = slice(start, min(start + shares.rows, count))
        live = row_live.reshape(-1)[part] if isinstance(row_live, torch.Tensor) else 0
        normed = out[part] if isinstance(out, torch.Tensor) else 0
        rows, ranks = part.stop - start, len(shares.areas)
        others = rows - len(range(shares.rank, rows, ranks))
        numbers = rows, others, shares.rank
        arguments = (x[part], a[part], weight, live, total[part], normed, shares.abort, *numbers, *areas)
        calls.append(KernelCall(kernel, (rows + others, 1, 1), arguments))
    return calls


def share_add(x: torch.Tensor, a: torch.Tensor, *, shares: RowShares, total: torch.Tensor) -> list[KernelCall]:
    """All-reduce x, as a tree in the order of ranks, and add it to the residual stream a; the sum is rounded once.

    x         [M, N]  float32    this rank's partial sums
    a, total  [M, N]  bf16       the residual stream; out, the same bits on every rank; NaN if a wait was given up
    A launch for every `shares.rows` rows. Raises ShapeError for rows of another width.
    """
    return _calls(x, a, shares, total, (), 0.0)


def share_add_norm(
    x: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, row_live: torch.Tensor | None = None, *, shares: RowShares,
    total: torch.Tensor, out: torch.Tensor, eps: float,
) -> list[KernelCall]:  # fmt: skip
    """`share_add` and the RMS norm of its sum, with the bits of `rms_norm`.

    weight    [N]     bf16 or float32
    row_live  [M]     uint8; None: all rows are live; a dead row's norm is zero
    out       [M, N]  bf16  out
    Launches and errors are those of `share_add`.
    """
    check_shape("weight", weight, x.shape[1])
    check_shape("out", out, *x.shape)
    check_dtype(torch.bfloat16, out=out)
    check_row_live(row_live, x.shape[0])
    return _calls(x, a, shares, total, (weight, 0 if row_live is None else row_live, out), eps)


def examples() -> list[Kernel]:
    """Representative specialisations, to compile without a GPU."""
    made = [_make(4096, 2, 2048, False), _make(8192, 8, 2048, True, 1e-5), _make(2880, 2, 4096, True, 1e-5)]
    made.append(_make(4096, 2, 2048, True, 1e-5))
    return [*made, _make(5120, 4, 2048, True, 1e-6, True)]
