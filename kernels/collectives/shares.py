"""Many rows added up over ranks, each rank its share of them, with the residual stream and the norm after them.

Row r is rank r mod R's. The others push their parts of it to that rank, which adds all as a tree in the ranks' order,
adds the residual, rounds, and pushes the sum to the others: of a row that crosses twice, but for a rank's own share,
that is a part in float32 and a sum in bf16, where `exchange` pushes every part to everybody, in words twice as long.
Numbers have no words of their own here: after a block's part of a row comes one word that counts.

A block has a row, and blocks of both kinds wait for others' of the same row: those of one launch must start in their
order, and those of all ranks run next to each other. Ranks that share a GPU have no room for that.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.peers.chunk import added, bits_of, floats_of
from lowlat.kernels.collectives.peers.words import MAX_RANKS, MISSING_BITS, WORD_BYTES, area_of, await_word, check_rank
from lowlat.kernels.common.norm_math import CHUNK, THREADS, WARPS
from lowlat.kernels.common.norm_row import chunk_values, is_live, make_norm_functions, weights_label
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live, check_width
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = ["RowShares", "examples", "share_add", "share_add_norm", "share_words"]


@dataclass(frozen=True)
class RowShares:
    """The memory by which ranks add up their shares of rows of one width.

    rank   of the GPU that launches
    areas  [share_words] int64, by rank, zero at first: a word for each row and rank that counts, the parts of this
           rank's rows, and the sums of others'
    rows   the most of a launch
    width  numbers of a row
    abort  [1] int64 in pinned memory, of all ranks and the host: not zero ends all waits
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
    """The int64 of a rank's area. Raises ShapeError for a width that rows cannot have."""
    check_width(width)
    return (_sums_at(ranks, rows, width) + rows * width * 2) // WORD_BYTES


def _parts_at(ranks: int, rows: int) -> int:
    return -(-rows * ranks // 2) * 2 * WORD_BYTES


def _sums_at(ranks: int, rows: int, width: int) -> int:
    return _parts_at(ranks, rows) + ranks * -(-rows // ranks) * width * 4


def _make_part(number: int) -> Any:
    """A device function: 8 numbers of one rank's part of a row, its own or what it pushed."""

    @device_function
    def part(x: Any, rank: Any, parts: Any, per_rank: Any, chunk: Any) -> Any:
        if rank == int64(number):
            return chunk_values(x, chunk, True)
        place = parts + int64(number) * per_rank + int64(chunk) * int64(32)
        a, b, c, d = ptx.load_relaxed_gpu_128(place)
        e, f, g, h = ptx.load_relaxed_gpu_128(place + int64(16))
        return floats_of((a, b, c, d, e, f, g, h))

    return part


def _make_tree(first: int, last: int) -> Any:
    """A device function: the parts of ranks `first` to `last` - 1 added up, the sums of two halves at every joint."""
    if last - first == 1:
        return _make_part(first)
    half = (first + last + 1) // 2
    low, high = _make_tree(first, half), _make_tree(half, last)

    @device_function
    def both(x: Any, rank: Any, parts: Any, per_rank: Any, chunk: Any) -> Any:
        return added(low(x, rank, parts, per_rank, chunk), high(x, rank, parts, per_rank, chunk))

    return both


@device_function
def _await(place: Any, epoch: Any, abort: Any, code: Any, lost: Any, failed: Any) -> None:
    """Wait for a peer's word; the block's other threads hear of a wait that was given up."""
    _, lost = await_word(place, epoch, abort, code, lost)
    ptx.fence_system()
    if lost != uint32(0):
        failed[0] = uint32(1)


def _make_push_part(chunks: int) -> Any:
    """A device function: a row of this rank's part goes to the rank that adds it up."""

    @device_function
    def push_part(x: Any, target: Any, thread: Any) -> None:
        chunk = thread
        while chunk < uint32(chunks):
            a, b, c, d, e, f, g, h = bits_of(chunk_values(x, chunk, True))
            ptx.store_global_128(target + int64(chunk) * int64(32), a, b, c, d)
            ptx.store_global_128(target + int64(chunk) * int64(32) + int64(16), e, f, g, h)
            chunk = uint32(chunk + uint32(THREADS))

    return push_part


def _make_take_sum(chunks: int) -> Any:
    """A device function: a row's sum goes from what a peer left to the stream; the thread's first chunk."""

    @device_function
    def take_sum(source: Any, total: Any, thread: Any, is_lost: Any) -> Any:
        chunk, first = thread, (uint32(0), uint32(0), uint32(0), uint32(0))
        while chunk < uint32(chunks):
            words = ptx.load_relaxed_gpu_128(source + int64(chunk) * int64(16))
            if is_lost:
                words = (uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS))
            ptx.store_global_128(total + int64(chunk) * int64(16), words[0], words[1], words[2], words[3])
            if chunk == thread:
                first = words
            chunk = uint32(chunk + uint32(THREADS))
        return first

    return take_sum


def _make_add_parts(width: int, ranks: int, shares: int) -> Any:
    """A device function: a row of this rank's share is added up, and goes to the stream and to all peers; the thread's
    first chunk."""
    chunks, add_up = width // CHUNK, _make_tree(0, ranks)

    @device_function
    def add_parts(
        x: Any, a: Any, total: Any, parts: Any, rank: Any, areas: Any, sum_at: Any, thread: Any, is_lost: Any
    ) -> Any:
        chunk, first = thread, (uint32(0), uint32(0), uint32(0), uint32(0))
        while chunk < uint32(chunks):
            residual, at = chunk_values(a, chunk, False), int64(chunk) * int64(16)
            b, c, d, e, f, g, h, k = added(residual, add_up(x, rank, parts, int64(shares * width * 4), chunk))
            words = ptx.bf16_pair(b, c), ptx.bf16_pair(d, e), ptx.bf16_pair(f, g), ptx.bf16_pair(h, k)
            if is_lost:
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
    no_weights, load_first_weights, finish_norm = functions.no_weights, functions.load_first, functions.finish
    chunks, shares = width // CHUNK, -(-rows // ranks)
    parts_at, sums_at = _parts_at(ranks, rows), _sums_at(ranks, rows, width)
    push_part, take_sum, add_parts = (
        _make_push_part(chunks),
        _make_take_sum(chunks),
        _make_add_parts(width, ranks, shares),
    )

    def share_rows(
        x: Any, a: Any, weight: Any, row_live: Any, total: Any, out: Any, abort: Any, rank: Any, a0: Any, a1: Any,
        a2: Any, a3: Any, a4: Any, a5: Any, a6: Any, a7: Any,
    ) -> None:  # fmt: skip
        sums, failed = cuda.shared.array(shape=WARPS, dtype=float32), cuda.shared.array(shape=1, dtype=uint32)
        thread, row = uint32(cuda.threadIdx.x), int64(cuda.blockIdx.x)
        areas, offset = (a0, a1, a2, a3, a4, a5, a6, a7), row * int64(width * 2)
        weights = no_weights()
        if normed:
            weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        owner, share = row % int64(ranks), row // int64(ranks)
        words_at, own = row * int64(ranks * WORD_BYTES), area_of(rank, areas)
        private = own + words_at + rank * int64(WORD_BYTES)
        epoch, lost = ptx.load_global_64(private)
        epoch = uint32(epoch + uint32(1))
        if thread == uint32(0):
            failed[0] = lost
        mine, sum_at, code = x + row * int64(width * 4), int64(sums_at) + offset, rank + int64(1)
        cuda.syncthreads()  # all have read the count
        if owner != rank:
            part_at = int64(parts_at) + (rank * int64(shares) + share) * int64(width * 4)
            push_part(mine, area_of(owner, areas) + part_at, thread)
            cuda.syncthreads()
            if thread == uint32(0):
                ptx.fence_system()
                word = area_of(owner, areas) + words_at + rank * int64(WORD_BYTES)
                ptx.store_relaxed_system_word(word, uint32(0), epoch)
                place = own + words_at + owner * int64(WORD_BYTES)
                _await(place, epoch, abort, code | (owner + int64(1)) << int64(8), lost, failed)
            cuda.syncthreads()
            first = take_sum(own + sum_at, total + offset, thread, failed[0] != uint32(0))
        else:
            if thread < uint32(ranks) and int64(thread) != rank:
                place = own + words_at + int64(thread) * int64(WORD_BYTES)
                _await(place, epoch, abort, code | (int64(thread) + int64(1)) << int64(8), lost, failed)
            cuda.syncthreads()
            parts = own + int64(parts_at) + share * int64(width * 4)
            is_lost = failed[0] != uint32(0)
            first = add_parts(mine, a + offset, total + offset, parts, rank, areas, sum_at, thread, is_lost)
            cuda.syncthreads()
            if thread < uint32(ranks) and int64(thread) != rank:
                ptx.fence_system()
                word = area_of(int64(thread), areas) + words_at + rank * int64(WORD_BYTES)
                ptx.store_relaxed_system_word(word, uint32(0), epoch)
        if thread == uint32(0):
            ptx.store_global_64(private, epoch, failed[0])
        if normed:
            live = is_live(row_live, row)
            finish_norm(first, weights, total + offset, False, weight, out + offset, int64(0), live, sums, width, eps)

    name = f"share_rows_n{width}_ranks{ranks}_m{rows}{f'_norm_eps{eps!r}' if normed else ''}{weights_label(wide)}"
    return Kernel(name, share_rows, (types.int64,) * (8 + MAX_RANKS), THREADS)


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
        arguments = (x[part], a[part], weight, live, total[part], normed, shares.abort, shares.rank, *areas)
        calls.append(KernelCall(kernel, (part.stop - start, 1, 1), arguments))
    return calls


def share_add(x: torch.Tensor, a: torch.Tensor, *, shares: RowShares, total: torch.Tensor) -> list[KernelCall]:
    """The residual sum a + x, rounded once, x added up over all ranks in their order, as a tree.

    x         [M, N]  float32    this rank's part
    a, total  [M, N]  bf16       the residual stream; out, the same bits on every rank; NaN where a wait was given up
    A launch for every `shares.rows` rows. Raises ShapeError for rows of another width.
    """
    return _calls(x, a, shares, total, (), 0.0)


def share_add_norm(
    x: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, row_live: torch.Tensor | None = None, *, shares: RowShares,
    total: torch.Tensor, out: torch.Tensor, eps: float,
) -> list[KernelCall]:  # fmt: skip
    """The same sum, and its RMS norm, bit for bit what `rms_norm` gives of it.

    weight    [N]     bf16 or float32
    row_live  [M]     uint8; None: all rows are live; dead ones are normed to zeros
    out       [M, N]  bf16  out
    Launches and errors as `share_add` has them.
    """
    check_shape("weight", weight, x.shape[1])
    check_shape("out", out, *x.shape)
    check_dtype(torch.bfloat16, out=out)
    check_row_live(row_live, x.shape[0])
    return _calls(x, a, shares, total, (weight, 0 if row_live is None else row_live, out), eps)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    made = [_make(4096, 2, 2048, False), _make(8192, 8, 2048, True, 1e-5), _make(2880, 2, 4096, True, 1e-5)]
    return [*made, _make(5120, 4, 2048, True, 1e-6, True)]
