"""These kernels gather or all-reduce rows of all ranks, with the residual sum and the norm after them; one launch each.

Every rank runs the same launch at the same place of its stream. A block pushes its partial row to all peers, waits for
theirs in its own memory (`peers.words`) and adds them as a tree, in the order of ranks. So all ranks have the same
bits, and one GPU that adds the same tree has them, too. A block counts its own all-reduces. So programs of any shape
may follow each other, if all ranks run the same ones. More rows than a channel holds take several launches.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.collectives.peers.chunk import added, bits_of, floats_of, store_wide
from lowlat.kernels.collectives.peers.words import MAX_RANKS, WORD_BYTES, area_of, await_chunk, check_rank, push_chunk
from lowlat.kernels.common.norm_math import CHUNK, THREADS, WARPS
from lowlat.kernels.common.norm_row import chunk_values, is_live, make_norm_functions, weights_label
from lowlat.kernels.elementwise.norm import are_wide, check_dtype, check_row_live, check_width
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument, Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int64, types, uint32

__all__ = [
    "CHUNK",
    "Channel",
    "all_reduce",
    "all_reduce_add",
    "all_reduce_add_norm",
    "channel_shapes",
    "examples",
    "gather_ranks",
]  # fmt: skip

SEGMENT_THREADS = 128  # threads of a block for a part of a row: 1024 numbers
COUNTERS = 4  # int32 a block: its last epoch, whether it gave up, two unused
SLOTS = 2  # slots that alternate
MAX_WIDTH = 262144
GATHER, SUM, ADD, NORM = "gather", "sum", "add", "norm"


@dataclass(frozen=True)
class Channel:
    """The memory for all-reduces of rows of one width; `channel_shapes` has its shapes.

    rank      of the GPU that launches
    areas     by rank, the memory to which its peers push; every GPU writes to all areas
    counters  this rank's own epochs, zero at first
    abort     [1] int64 in pinned memory, shared by all ranks and the host: not zero ends all waits
    whole     whether one block has a whole row, as norms need; else a block has 1024 numbers
    early     whether the next launch may start while this one waits; not if ranks share a GPU, since the next launch's
              blocks would fill it
    """

    rank: int
    areas: tuple[torch.Tensor, ...]
    counters: torch.Tensor
    abort: torch.Tensor
    whole: bool = False
    early: bool = True

    def __post_init__(self) -> None:
        check_rank(self.rank, len(self.areas))
        _, _, rows, width = self.areas[0].shape
        shapes = channel_shapes(len(self.areas), rows, width, self.whole)
        for area in self.areas:
            check_shape("area", area, *shapes[0])
            check_dtype(torch.int64, area=area)
        check_shape("counters", self.counters, *shapes[1])
        check_dtype(torch.int32, counters=self.counters)
        check_shape("abort", self.abort, 1)
        check_dtype(torch.int64, abort=self.abort)

    @property
    def rows(self) -> int:
        """The most rows of an all-reduce."""
        return self.areas[0].shape[2]

    @property
    def width(self) -> int:
        """The numbers of a row."""
        return self.areas[0].shape[3]


def channel_shapes(ranks: int, rows: int, width: int, whole: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a rank's area, int64, and its counters, int32, for all-reduces of up to `rows` rows.

    Raises ShapeError for an unsupported width.
    """
    if width < CHUNK or width % CHUNK or width > MAX_WIDTH:
        raise ShapeError(f"ranks exchange rows of a multiple of {CHUNK} numbers, at most {MAX_WIDTH}, not {width}")
    if whole:
        check_width(width)
    return (SLOTS, ranks, rows, width), (rows * _segments(width, whole), COUNTERS)


def _segments(width: int, whole: bool) -> int:
    return 1 if whole else -(-width // (CHUNK * SEGMENT_THREADS))


def _own_values(columns: int) -> Any:
    """A device function: 8 numbers of this rank's partial row, with zeros after its columns."""
    ragged = columns % CHUNK != 0  # rows are then no whole times 16 bytes either

    @device_function
    def one(x: Any, column: Any) -> Any:
        value = float32(0.0)
        if column < int64(columns):
            value = ptx.load_global_f32(x + column * int64(4))
        return value

    @device_function
    def values(x: Any, chunk: Any) -> Any:
        zero, first = float32(0.0), int64(chunk) * int64(CHUNK)
        found = (zero, zero, zero, zero, zero, zero, zero, zero)
        if ragged:
            found = (
                one(x, first),
                one(x, first + int64(1)),
                one(x, first + int64(2)),
                one(x, first + int64(3)),
                one(x, first + int64(4)),
                one(x, first + int64(5)),
                one(x, first + int64(6)),
                one(x, first + int64(7)),
            )
        elif first < int64(columns):
            found = chunk_values(x, chunk, True)
        return found

    return values


def _part(number: int, stride: int, columns: int) -> Any:
    """A device function: 8 numbers of one rank's partial row, this rank's own or a pushed one, and whether the wait was
    given up."""
    own_values = _own_values(columns)

    @device_function
    def part(x: Any, rank: Any, received: Any, per_rank: Any, chunk: Any, epoch: Any, abort: Any, lost: Any) -> Any:
        if rank == int64(number):
            return own_values(x, chunk), lost
        place = received + int64(number) * per_rank + int64(chunk) * int64(16)
        code = (rank + int64(1)) | int64((number + 1) << 8)
        words, lost = await_chunk(place, int64(stride), epoch, abort, code, lost)
        return floats_of(words), lost

    return part


@device_function
def _rounded(values: Any) -> Any:
    """8 float32 as four words of two bf16."""
    a, b, c, d, e, f, g, h = values
    return ptx.bf16_pair(a, b), ptx.bf16_pair(c, d), ptx.bf16_pair(e, f), ptx.bf16_pair(g, h)


def _tree(first: int, last: int, stride: int, columns: int) -> Any:
    """A device function: the sum of ranks `first` to `last` - 1, as a tree of halves."""
    if last - first == 1:
        return _part(first, stride, columns)
    half = (first + last + 1) // 2
    low, high = _tree(first, half, stride, columns), _tree(half, last, stride, columns)

    @device_function
    def both(x: Any, rank: Any, received: Any, per_rank: Any, chunk: Any, epoch: Any, abort: Any, lost: Any) -> Any:
        one, lost = low(x, rank, received, per_rank, chunk, epoch, abort, lost)
        other, lost = high(x, rank, received, per_rank, chunk, epoch, abort, lost)
        return added(one, other), lost

    return both


def _gather(ranks: int, stride: int, columns: int) -> Any:
    """A device function that stores every rank's partial row, with a distance of `apart` bytes."""
    last = _part(ranks - 1, stride, columns)
    before = _gather(ranks - 1, stride, columns) if ranks > 1 else None

    @device_function
    def store(
        target: Any, apart: Any, x: Any, rank: Any, received: Any, per_rank: Any, chunk: Any, epoch: Any, abort: Any,
        lost: Any,
    ) -> Any:  # fmt: skip
        if before is not None:
            lost = before(target, apart, x, rank, received, per_rank, chunk, epoch, abort, lost)
        values, lost = last(x, rank, received, per_rank, chunk, epoch, abort, lost)
        store_wide(target + int64(ranks - 1) * apart, values)
        return lost

    return store


def _make_push(ranks: int, stride: int, columns: int) -> Any:
    """A device function that pushes a chunk of this rank's partial row to all peers; `place`: offset in their areas."""
    own_values = _own_values(columns)

    @device_function
    def push(x: Any, rank: Any, areas: Any, place: Any, chunk: Any, epoch: Any) -> None:
        words = bits_of(own_values(x, chunk))
        for other in range(1, ranks):
            peer = int64(rank + int64(other))  # each begins with the next rank: not all write to one at once
            if peer >= int64(ranks):
                peer = int64(peer - int64(ranks))
            target = area_of(peer, areas) + place + int64(chunk) * int64(16)
            push_chunk(target, int64(stride), words, epoch)

    return push


@cache
def _make_all_reduce(
    width: int, ranks: int, mode: str, whole: bool, early: bool, eps: float = 0.0, columns: int = 0, wide: bool = False
) -> Kernel:
    """The kernel: grid (parts of a row, M).

    columns  of this rank's own partial row, if it is narrower than the rows; 0: it is not
    wide     whether the norm's weight is float32
    """
    functions = make_norm_functions(wide)
    no_weights, load_first_weights, finish_norm = functions.no_weights, functions.load_first, functions.finish
    chunks, row_bytes, segments = width // CHUNK, width * WORD_BYTES, _segments(width, whole)
    stride, threads = chunks * 16, THREADS if whole else SEGMENT_THREADS
    own = columns or width
    add_up, push, normed = _tree(0, ranks, stride, own), _make_push(ranks, stride, own), mode == NORM
    gather, gathers, adds = _gather(ranks, stride, own), mode == GATHER, mode in (ADD, NORM)
    last_chunk = chunks if whole else SEGMENT_THREADS

    def all_reduce(
        x: Any, a: Any, weight: Any, row_live: Any, total: Any, out: Any, counters: Any, abort: Any, rank: Any,
        rows: Any, apart: Any, a0: Any, a1: Any, a2: Any, a3: Any, a4: Any, a5: Any, a6: Any, a7: Any,
    ) -> None:  # fmt: skip
        sums = cuda.shared.array(shape=WARPS, dtype=float32)
        thread, row = uint32(cuda.threadIdx.x), int64(cuda.blockIdx.y)
        segment, areas = uint32(cuda.blockIdx.x), (a0, a1, a2, a3, a4, a5, a6, a7)
        weights = no_weights()
        if normed:
            weights = load_first_weights(weight, width)
        ptx.wait_for_previous_kernel()
        if early:
            ptx.let_next_kernel_start()
        counter = counters + (row * int64(segments) + int64(segment)) * int64(COUNTERS * 4)
        epoch, lost = ptx.load_global_64(counter)
        epoch = uint32(epoch + uint32(1))
        per_rank = rows * int64(row_bytes)
        place = int64(epoch & uint32(1)) * int64(ranks) * per_rank + row * int64(row_bytes)
        begin = uint32(segment * uint32(SEGMENT_THREADS))
        end = uint32(min(uint32(begin + uint32(last_chunk)), uint32(chunks)))
        mine, live = x + row * int64((columns or width) * 4), is_live(row_live, row)
        chunk = uint32(begin + thread)
        while chunk < end:
            push(mine, rank, areas, place + rank * per_rank, chunk, epoch)
            chunk = uint32(chunk + uint32(threads))
        cuda.syncthreads()  # all threads have read the counter
        if thread == uint32(0):
            ptx.store_global_u32(counter, epoch)
        received, given_up = area_of(rank, areas) + place, lost
        first, chunk = (uint32(0), uint32(0), uint32(0), uint32(0)), uint32(begin + thread)
        while chunk < end:
            if adds:  # before the wait
                residual = chunk_values(a + row * int64(width * 2), chunk, False)
            if gathers:
                target = out + row * int64(width * 4) + int64(chunk) * int64(32)
                given_up = gather(target, apart, mine, rank, received, per_rank, chunk, epoch, abort, given_up)
            else:
                parts, given_up = add_up(mine, rank, received, per_rank, chunk, epoch, abort, given_up)
            if adds:
                words = _rounded(added(residual, parts))
                target = total + row * int64(width * 2) + int64(chunk) * int64(16)
                ptx.store_global_128(target, words[0], words[1], words[2], words[3])
                if chunk == thread:
                    first = words
            elif not gathers:
                store_wide(out + row * int64(width * 4) + int64(chunk) * int64(32), parts)
            chunk = uint32(chunk + uint32(threads))
        if given_up != lost:
            ptx.store_global_u32(counter + int64(4), uint32(1))
        if normed:
            offset = row * int64(width * 2)
            finish_norm(first, weights, total + offset, False, weight, out + offset, int64(0), live, sums, width, eps)

    name = f"all_reduce_{mode}_n{width}_ranks{ranks}{'_rows' if whole else ''}{'' if early else '_late'}"
    name += f"_own{columns}" if columns else ""
    name = f"{name}_eps{eps!r}{weights_label(wide)}" if normed else name
    return Kernel(name, all_reduce, (types.int64,) * (11 + MAX_RANKS), threads)


def _calls(
    mode: str, x: torch.Tensor, channel: Channel, rows: dict[str, torch.Tensor], weight: Argument = 0,
    row_live: torch.Tensor | None = None, eps: float = 0.0,
) -> list[KernelCall]:  # fmt: skip
    """A launch for every `channel.rows` rows."""
    count, width = x.shape[0], channel.width
    columns = x.shape[1] if mode == GATHER and x.shape[1] < width else 0
    if x.shape[1] != (columns or width) or not x.numel():
        raise ShapeError(f"a channel of rows of {width} takes no {list(x.shape)}")
    check_dtype(torch.float32, x=x)
    if mode != GATHER:
        for name, tensor in rows.items():
            check_shape(name, tensor, count, width)
    wide = isinstance(weight, torch.Tensor) and are_wide(weight)
    kernel = _make_all_reduce(width, len(channel.areas), mode, channel.whole, channel.early, eps, columns, wide)
    areas: list[Argument] = [*channel.areas, *[0] * (MAX_RANKS - len(channel.areas))]
    apart, calls = count * width * 4, []
    for start in range(0, count, channel.rows):
        part = slice(start, start + channel.rows)
        a, total = (rows[name][part] if name in rows else 0 for name in ("a", "total"))
        out: Argument = rows["out"][part] if mode in (SUM, NORM) else 0
        if mode == GATHER:
            out = rows["out"].view(-1)[start * width :]  # each rank's rows from there on
        live = 0 if row_live is None else row_live.reshape(-1)[part]
        arguments = (x[part], a, weight, live, total, out, channel.counters, channel.abort, channel.rank)
        grid = (_segments(width, channel.whole), min(channel.rows, count - start), 1)
        calls.append(KernelCall(kernel, grid, (*arguments, channel.rows, apart, *areas)))
    return calls


def gather_ranks(x: torch.Tensor, *, channel: Channel, out: torch.Tensor) -> list[KernelCall]:
    """Gather all ranks' x, in order of ranks.

    x    [M, N]     float32       this rank's part, which may be narrower than other ranks' parts
    out  [R, M, W]  float32  out  W is the channel's width; the same bits on every rank, zeros after narrower parts; NaN
                                  if a wait was given up
    A launch for every `channel.rows` rows. Raises ShapeError for shapes that the channel does not support.
    """
    check_shape("out", out, len(channel.areas), x.shape[0], channel.width)
    check_dtype(torch.float32, out=out)
    return _calls(GATHER, x, channel, {"out": out})


def all_reduce(x: torch.Tensor, *, channel: Channel, out: torch.Tensor) -> list[KernelCall]:
    """All-reduce x: the sum over ranks, in their order, as a tree.

    x    [M, N]  float32       this rank's partial sums
    out  [M, N]  float32  out  the same bits on every rank; NaN if a wait was given up
    Launches and errors are those of `gather_ranks`.
    """
    check_dtype(torch.float32, out=out)
    return _calls(SUM, x, channel, {"out": out})


def all_reduce_add(x: torch.Tensor, a: torch.Tensor, *, channel: Channel, total: torch.Tensor) -> list[KernelCall]:
    """All-reduce x and add it to the residual stream a; the sum is rounded once.

    a, total  [M, N]  bf16  the residual stream; out
    Launches and errors are those of `gather_ranks`.
    """
    check_dtype(torch.bfloat16, a=a, total=total)
    return _calls(ADD, x, channel, {"a": a, "total": total})


def all_reduce_add_norm(
    x: torch.Tensor, a: torch.Tensor, weight: torch.Tensor, row_live: torch.Tensor | None = None, *, channel: Channel,
    total: torch.Tensor, out: torch.Tensor, eps: float,
) -> list[KernelCall]:  # fmt: skip
    """`all_reduce_add` and the norm of the rounded sum, as `add_norm` computes it; a dead row's norm is zero.

    The channel must have whole rows. Launches and errors are those of `gather_ranks`.
    """
    if not channel.whole:
        raise ShapeError("the norm of a row needs a channel whose blocks have whole rows")
    check_shape("weight", weight, x.shape[1])
    check_row_live(row_live, x.shape[0])
    check_dtype(torch.bfloat16, a=a, total=total, out=out)
    return _calls(NORM, x, channel, {"a": a, "total": total, "out": out}, weight, row_live, eps)


def examples() -> list[Kernel]:
    """Representative specialisations, to compile without a GPU."""
    return [
        _make_all_reduce(4096, 2, NORM, True, True, 1e-5),
        _make_all_reduce(2880, 2, ADD, False, True),
        _make_all_reduce(64128, 2, GATHER, False, True, columns=64112),
        _make_all_reduce(8192, 8, SUM, False, False),
        _make_all_reduce(8192, 4, NORM, True, True, 1e-5),
    ]
