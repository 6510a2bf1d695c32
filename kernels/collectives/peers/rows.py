"""These device functions all-reduce rows inside the kernel that computes them, number by number.

A thread computes a number of this rank's partial row and pushes it to all peers. It awaits theirs at the same place of
its own memory (`words`), and adds all as a tree in the order of ranks. So all ranks have the same bits. The thread
counts a number's all-reduces itself, in the word of this rank's own part, which no peer writes. So a grid may be cut in
any way, and an all-reduce may leave out rows, if all ranks leave out the same ones.

All blocks of a launch must run at the same time as those of the other ranks' launches, which ranks that share a GPU
cannot do.
"""

from dataclasses import dataclass
from typing import Any

import torch

from lowlat.kernels.collectives.peers.chunk import added, bits_of, floats_of
from lowlat.kernels.collectives.peers.words import (
    MAX_RANKS,
    WORD_BYTES,
    area_of,
    await_chunk,
    await_word,
    check_rank,
    push_chunk,
)
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Argument
from lowlat.kernels.toolchain.numba_cuda import device_function, int64, uint32

__all__ = ["NUM_ARGUMENTS", "PeerRows", "area_shape", "make_add_chunk", "make_add_value", "make_begin"]

SLOTS = 2  # slots that alternate
NUM_ARGUMENTS = 3 + MAX_RANKS
PIECE = 16  # bytes of two words


@dataclass(frozen=True)
class PeerRows:
    """The memory for all-reduces of rows of one width in one kind of kernel.

    rank   of the GPU that launches
    areas  [2, R, M, N] int64, by rank, zero at first: the peers' pushed words, and in the rank's own part its counts
    abort  [1] int64 in pinned memory, shared by all ranks and the host: not zero ends all waits
    """

    rank: int
    areas: tuple[torch.Tensor, ...]
    abort: torch.Tensor

    def __post_init__(self) -> None:
        check_rank(self.rank, len(self.areas))
        for area in self.areas:
            check_shape("area", area, *area_shape(self.size, self.rows, self.width))
        check_shape("abort", self.abort, 1)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.areas)

    @property
    def rows(self) -> int:
        """The most rows of a launch."""
        return self.areas[0].shape[2]

    @property
    def width(self) -> int:
        """The numbers of a row."""
        return self.areas[0].shape[3]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments: rank, abort, rows, and every rank's area, 0 for ranks that do not exist."""
        return (self.rank, self.abort, self.rows, *self.areas, *[0] * (MAX_RANKS - self.size))


def area_shape(ranks: int, rows: int, width: int) -> tuple[int, ...]:
    """The shape of a rank's area, for launches of up to `rows` rows."""
    return SLOTS, ranks, rows, width


def make_begin(ranks: int, width: int) -> Any:
    """A device function (given, row, column) that begins the all-reduce of one number before it is computed.

    given  the tuple `PeerRows.arguments`
    """

    @device_function
    def begin(given: Any, row: Any, column: Any) -> Any:
        """The own word, the all-reduce's number, whether a wait was given up before, and the offset in the areas."""
        rank, _, rows, a0, a1, a2, a3, a4, a5, a6, a7 = given
        per_rank = rows * int64(width * WORD_BYTES)
        offset = (int64(row) * int64(width) + int64(column)) * int64(WORD_BYTES)
        private = area_of(rank, (a0, a1, a2, a3, a4, a5, a6, a7)) + rank * per_rank + offset
        epoch, lost = ptx.load_global_64(private)
        epoch = uint32(epoch + uint32(1))
        return private, epoch, lost, int64(epoch & uint32(1)) * int64(ranks) * per_rank + offset, per_rank

    return begin


def make_add_value(ranks: int) -> Any:
    """A device function (value, given, begun) -> the sum of a float32 over ranks."""
    add_up = _tree_of_values(0, ranks)

    @device_function
    def add_value(value: Any, given: Any, begun: Any) -> Any:
        rank, abort, _, a0, a1, a2, a3, a4, a5, a6, a7 = given
        areas = (a0, a1, a2, a3, a4, a5, a6, a7)
        private, epoch, lost, place, per_rank = begun
        for other in range(1, ranks):
            peer = int64(rank + int64(other))  # each begins with the next rank: not all write to one rank at once
            if peer >= int64(ranks):
                peer = int64(peer - int64(ranks))
            ptx.store_relaxed_system_word(
                area_of(peer, areas) + place + rank * per_rank, ptx.bits_of_float(value), epoch
            )
        total, lost = add_up(value, rank, area_of(rank, areas) + place, per_rank, epoch, abort, lost)
        ptx.store_global_64(private, epoch, lost)
        return total

    return add_value


def _tree_of_values(first: int, last: int) -> Any:
    """A device function: the sum of the values of ranks `first` to `last` - 1, as a tree of halves."""
    if last - first == 1:

        @device_function
        def part(value: Any, rank: Any, received: Any, per_rank: Any, epoch: Any, abort: Any, lost: Any) -> Any:
            if rank == int64(first):
                return value, lost
            code = (rank + int64(1)) | int64((first + 1) << 8)
            word, lost = await_word(received + int64(first) * per_rank, epoch, abort, code, lost)
            return ptx.float_of_bits(word), lost

        return part
    half = (first + last + 1) // 2
    low, high = _tree_of_values(first, half), _tree_of_values(half, last)

    @device_function
    def both(value: Any, rank: Any, received: Any, per_rank: Any, epoch: Any, abort: Any, lost: Any) -> Any:
        one, lost = low(value, rank, received, per_rank, epoch, abort, lost)
        other, lost = high(value, rank, received, per_rank, epoch, abort, lost)
        return ptx.add_rn(one, other), lost

    return both


def make_add_chunk(ranks: int) -> Any:
    """A device function (sums, given, begun) that replaces 8 float32, in an array, by their sums over ranks.

    begun  for the first of the eight columns, a multiple of eight
    The eight share one count, so no other kind of kernel may use their area.
    """

    @device_function
    def push(sums: Any, rank: Any, areas: Any, place: Any, epoch: Any) -> None:
        words = bits_of(_eight(sums))
        for other in range(1, ranks):
            peer = int64(rank + int64(other))
            if peer >= int64(ranks):
                peer = int64(peer - int64(ranks))
            push_chunk(area_of(peer, areas) + place, int64(PIECE), words, epoch)

    add_up = _tree_of_chunks(0, ranks)

    @device_function
    def add_chunk(sums: Any, given: Any, begun: Any) -> None:
        rank, abort, _, a0, a1, a2, a3, a4, a5, a6, a7 = given
        areas = (a0, a1, a2, a3, a4, a5, a6, a7)
        private, epoch, lost, place, per_rank = begun
        push(sums, rank, areas, place + rank * per_rank, epoch)
        received = area_of(rank, areas) + place
        totals, lost = add_up(sums, rank, received, per_rank, epoch, abort, lost)
        for k in range(8):
            sums[k] = totals[k]
        ptx.store_global_64(private, epoch, lost)

    return add_chunk


@device_function
def _eight(sums: Any) -> Any:
    """An array of eight as a tuple."""
    return sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7]


def _tree_of_chunks(first: int, last: int) -> Any:
    """The device function of `_tree_of_values` for eight values; it returns a tuple."""
    if last - first == 1:

        @device_function
        def part(sums: Any, rank: Any, received: Any, per_rank: Any, epoch: Any, abort: Any, lost: Any) -> Any:
            if rank == int64(first):
                return _eight(sums), lost
            code = (rank + int64(1)) | int64((first + 1) << 8)
            words, lost = await_chunk(received + int64(first) * per_rank, int64(PIECE), epoch, abort, code, lost)
            return floats_of(words), lost

        return part
    half = (first + last + 1) // 2
    low, high = _tree_of_chunks(first, half), _tree_of_chunks(half, last)

    @device_function
    def both(sums: Any, rank: Any, received: Any, per_rank: Any, epoch: Any, abort: Any, lost: Any) -> Any:
        one, lost = low(sums, rank, received, per_rank, epoch, abort, lost)
        other, lost = high(sums, rank, received, per_rank, epoch, abort, lost)
        return added(one, other), lost

    return both
