"""This module copies blocks and rows of the state between a device and host memory, for the tiers of the prefix cache.

What a pool's buffers hold of some blocks is one flat content, [n] uint8, in order of the buffers' names.

There are two ways on a GPU. `read` and `write` gather and scatter on the executor's stream, after what was launched
before, through a few staging buffers; the copy over the bus runs on a stream of its own. `start_out` and `start_in` are
for blocks that nobody writes meanwhile: the copy engines move each run of blocks between its place and host memory, on
streams of their own, so that bytes cross the device's memory once and steps neither wait nor share their SMs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from lowlat.errors import CapacityError
from lowlat.executors.bus_copies import BusCopies, Moves, Starting, start_together, wait_for
from lowlat.executors.peeks import SentValues
from lowlat.graphs import BufferSet
from lowlat.sequence.tiers.key import Copier, Load, Mark, Save

__all__ = ["BlockMover", "ContentMover", "content_layout", "slot_layout"]

NUM_STAGING = 4
ALIGNMENT = 16


@dataclass(frozen=True)
class Piece:
    """The part of a content that one buffer has: where it begins, and shape and dtype of a block or row."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def content_layout(state: BufferSet, pool: str, count: int) -> tuple[tuple[Piece, ...], int]:
    """The pieces of a content of `count` blocks or rows of a pool, and its bytes."""
    pieces, start = [], 0
    for name in sorted(state.specs):
        spec = state.specs[name]
        if spec.paging is None or spec.pool != pool:
            continue
        pieces.append(Piece(name, start, (count, *spec.shape[1:]), spec.dtype))
        start += -(-count * prod(spec.shape[1:]) * spec.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return tuple(pieces), start


def slot_layout(state: BufferSet) -> tuple[tuple[Piece, ...], int]:
    """The pieces of a slot's rows of all buffers that have some, and their bytes."""
    pieces, start = [], 0
    for name in sorted(state.specs):
        spec = state.specs[name]
        if spec.by_slot:
            pieces.append(Piece(name, start, spec.shape[1:], spec.dtype))
            start += -(-prod(spec.shape[1:]) * spec.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return tuple(pieces), start


class ContentMover(Copier, Protocol):
    """Copies contents of blocks or rows of all ranks; see `BlockMover`, which does so for one."""

    @property
    def states(self) -> tuple[BufferSet, ...]:
        """Each rank's state."""

    def read(self, pool: str, places: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Start to read blocks or rows, [n] uint8; returns a function that waits for them."""

    def write(self, pool: str, places: Sequence[int], content: torch.Tensor) -> None:
        """Write a content to blocks or rows, before what is launched later."""


class BlockMover:
    """Reads and writes blocks and rows of one executor's state.

    stream  the executor's, on a GPU; None: the state is on the CPU, and nothing waits
    """

    def __init__(self, state: BufferSet, device: torch.device, stream: "torch.cuda.Stream | None" = None) -> None:
        self._state, self._device, self._stream = state, device, stream
        self._copies = None if stream is None else torch.cuda.Stream(device)
        self.bus = BusCopies(device, num_streams=0 if stream is None else 2)
        self._staging: list[torch.Tensor] = []
        self._free: list[torch.cuda.Event] = []  # of each staging buffer: when it may be written again
        self._next = 0
        self._sent = SentValues()
        self._layouts: dict[tuple[str, int], tuple[tuple[Piece, ...], int]] = {}
        self._places: dict[tuple[str, int], tuple[npt.NDArray[np.uint64], ...]] = {}

    @property
    def states(self) -> tuple[BufferSet, ...]:
        """The only rank's state."""
        return (self._state,)

    def allocate(self, size: int, knob: str) -> torch.Tensor:
        """Host memory of so many bytes, [n] uint8, from which the device copies.

        knob  the option that lowers what is asked for
        Raises CapacityError where the system refuses it.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._stream is not None)
        except RuntimeError as error:
            raise CapacityError(
                f"the host refuses {size / 2**30:.3f} GiB of pinned memory ({error!s:.200}): lower {knob}, or raise "
                "the limit of locked memory (ulimit -l)"
            ) from error

    def mark(self) -> Mark:
        """All that was launched until now, for copies to come after it."""
        if self._stream is None:
            return _nothing
        with torch.cuda.device(self._device):
            self._sent.let_go()
            event = self._stream.record_event()
        return lambda: self.bus.wait_event(event)

    def content_bytes(self, pool: str, count: int) -> int:
        """The bytes of a content of so many blocks or rows of a pool."""
        return self._layout(pool, count)[1]

    def start_in(self, loads: Sequence[Load], mark: Mark) -> Callable[[], None]:
        """Start to copy contents to their blocks, in one thread at a time; returns a function that waits for them."""
        return start_together([self.starting_in(loads, mark)])

    def start_out(self, saves: Sequence[Save], contents: Sequence[torch.Tensor], mark: Mark) -> Callable[[], None]:
        """Start to copy blocks to contents, in one thread at a time; returns a function that waits for them."""
        return start_together([self.starting_out(saves, contents, mark)])

    def starting_in(self, loads: Sequence[Load], mark: Mark) -> Starting:
        """The copies of `start_in`, started as they are asked for."""
        moves = self._moves((load.pool, load.places, load.content) for load in loads)
        return self.bus.start(0, moves, mark, to_device=True)

    def starting_out(self, saves: Sequence[Save], contents: Sequence[torch.Tensor], mark: Mark) -> Starting:
        """The copies of `start_out`, started as they are asked for."""
        pairs = zip(saves, contents, strict=True)
        moves = self._moves((save.key.pool, save.places, content) for save, content in pairs)
        return self.bus.start(1, moves, mark, to_device=False)

    def _layout(self, pool: str, count: int) -> tuple[tuple[Piece, ...], int]:
        """See `content_layout`, which looks at every buffer: it is asked once for each number of blocks."""
        key = pool, count
        if key not in self._layouts:
            self._layouts[key] = content_layout(self._state, pool, count)
        return self._layouts[key]

    def _moves(self, contents: Iterable[tuple[str, Sequence[int], torch.Tensor]]) -> Moves:
        """The copies between contents and their places: of each buffer a run of places that follow each other.

        They are many, some for each chunk and layer, and made while steps run: by arrays, once for contents of a size.
        """
        sorts: dict[tuple[str, int], list[tuple[Sequence[int], int]]] = {}
        for pool, places, content in contents:
            size = self.content_bytes(pool, len(places))
            if content.numel() != size or not content.is_contiguous():
                raise ValueError(f"a content of {content.numel()} bytes for {len(places)} places of {size}")
            sorts.setdefault((pool, len(places)), []).append((places, content.data_ptr()))
        found = [self._moves_of(*sort, own) for sort, own in sorts.items()]
        return found[0] if len(found) == 1 else Moves.joined(found)

    def _moves_of(self, pool: str, count: int, contents: Sequence[tuple[Sequence[int], int]]) -> Moves:
        """The copies of contents, given by places and address, that have as many places in a pool."""
        addresses, rows, starts = self._rows(pool, count)
        runs = [
            (places[begin], address, begin, end - begin)
            for places, address in contents
            for begin, end in pairwise([0, *(k for k in range(1, count) if places[k] != places[k - 1] + 1), count])
        ]
        first, host, begin, length = np.array(runs, np.uint64).T[:, :, None]
        return Moves(
            (first * rows + addresses).ravel(), (begin * rows + (host + starts)).ravel(), (length * rows).ravel()
        )

    def _rows(self, pool: str, count: int) -> tuple[npt.NDArray[np.uint64], ...]:
        """Of each piece of a content: its buffer's address, the bytes of a place there, and where the piece begins.

        Only addresses are asked for each time: memory that leaves a CPU and comes back has others.
        """
        pieces, _ = self._layout(pool, count)
        buffers = [self._state[piece.name] for piece in pieces]
        if (pool, count) not in self._places:
            rows = np.array([each.stride(0) * each.element_size() for each in buffers], np.uint64)
            self._places[pool, count] = rows, np.array([piece.start for piece in pieces], np.uint64)
        return np.array([each.data_ptr() for each in buffers], np.uint64), *self._places[pool, count]

    @torch.inference_mode()
    def read(self, pool: str, places: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Start to read blocks or rows as they are after what was launched; returns a function that waits for them.

        It gives the content, [n] uint8 in host memory, and may be called by another thread.
        """
        pieces, size = self._layout(pool, len(places))
        if self._stream is None or self._copies is None:
            content = torch.zeros(size, dtype=torch.uint8)
            self._gather(pieces, places, content)
            return lambda: content
        with torch.cuda.device(self._device):
            number, staging = self._stage(size, self._stream)
            with torch.cuda.stream(self._stream):
                self._gather(pieces, places, staging)
            self._copies.wait_stream(self._stream)
            with torch.cuda.stream(self._copies):
                host = self.allocate(size, "pause_gib or host_cache_gib")
                host.copy_(staging, non_blocking=True)
                done = self._free[number] = self._copies.record_event()

        def wait() -> torch.Tensor:
            wait_for(done, self._device)
            return host

        return wait

    @torch.inference_mode()
    def write(
        self, pool: str, places: Sequence[int], content: torch.Tensor, source: torch.Tensor | None = None
    ) -> None:
        """Write a content to blocks or rows, before what is launched later.

        source  the tensor whose memory the content is a part of, which is kept until it was copied; None: itself
        """
        pieces, size = self._layout(pool, len(places))
        if content.numel() != size:
            raise ValueError(f"a content of {content.numel()} bytes for {len(places)} places of {size}")
        if self._stream is None or self._copies is None:
            self._scatter(pieces, places, content)
            return
        with torch.cuda.device(self._device):
            number, staging = self._stage(size, self._copies)
            with torch.cuda.stream(self._copies):
                staging.copy_(content, non_blocking=True)
            self._stream.wait_stream(self._copies)
            with torch.cuda.stream(self._stream):
                self._scatter(pieces, places, staging)
                self._free[number] = self._stream.record_event()
                # a tier gives memory that nobody holds to another content
                self._sent.keep([content if source is None else source])

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot's rows, as `read_slot` gives them."""
        return slot_layout(self._state)[1]

    def block_bytes(self, pool: str) -> int:
        """Bytes of a block or row of a pool, as `read` gives them."""
        return self._layout(pool, 1)[1]

    @torch.inference_mode()
    def read_slot(self, slot: int) -> Callable[[], torch.Tensor]:
        """Start to read a slot's rows, as `read` reads blocks.

        The copies run on the executor's stream: what is launched later may write to the rows.
        """
        pieces, size = slot_layout(self._state)
        host = self.allocate(size, "pause_gib")
        for piece, own in self._on_stream(pieces):
            _view(host, piece).copy_(own[slot], non_blocking=True)
        if self._stream is None:
            return lambda: host
        done = self._stream.record_event()

        def wait() -> torch.Tensor:
            wait_for(done, self._device)
            return host

        return wait

    @torch.inference_mode()
    def write_slot(
        self, slot: int, content: torch.Tensor, others: Mapping[str, Sequence[int]], moved: Mapping[int, int]
    ) -> None:
        """Write a content that `read_slot` gave to a slot's rows, before what is launched later.

        others  rows of these buffers in place of the content's, each as long as the buffer's or shorter
        moved   blocks of the first pool, by those that they were when the content was read, where they are others
        """
        pieces, size = slot_layout(self._state)
        if content.numel() != size:
            raise ValueError(f"a content of {content.numel()} bytes for a slot's rows of {size}")
        for piece, own in self._on_stream(pieces):
            row = _view(content, piece)
            if piece.name in others:
                row = torch.zeros_like(row)
                row[: len(others[piece.name])] = torch.tensor(others[piece.name], dtype=row.dtype)
            elif moved and (parts := self._state.specs[piece.name].parts):
                row = row.clone().apply_(lambda part: moved.get(part // parts, part // parts) * parts + part % parts)
            own[slot].copy_(row, non_blocking=True)
            # host memory must stay until the copy has ended: torch's cache of pinned memory sees to that

    def _on_stream(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Pieces and their buffers, while copies are queued on the executor's stream."""
        if self._stream is None:
            yield from ((piece, self._state[piece.name]) for piece in pieces)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield from ((piece, self._state[piece.name]) for piece in pieces)

    def _stage(self, size: int, user: "torch.cuda.Stream") -> tuple[int, torch.Tensor]:
        """The next staging buffer, which `user` may write as soon as what used it before has ended."""
        if not self._staging or self._staging[0].numel() < size:
            torch.cuda.synchronize(self._device)
            self._staging = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(NUM_STAGING)]
            self._free = [torch.cuda.current_stream(self._device).record_event() for _ in range(NUM_STAGING)]
        self._next = (self._next + 1) % NUM_STAGING
        user.wait_event(self._free[self._next])
        return self._next, self._staging[self._next][:size]

    def _gather(self, pieces: Sequence[Piece], places: Sequence[int], content: torch.Tensor) -> None:
        index = torch.tensor(places, dtype=torch.long, device=self._device)
        for piece in pieces:
            torch.index_select(self._state[piece.name], 0, index, out=_view(content, piece))

    def _scatter(self, pieces: Sequence[Piece], places: Sequence[int], content: torch.Tensor) -> None:
        index = torch.tensor(places, dtype=torch.long, device=self._device)
        for piece in pieces:
            self._state[piece.name].index_copy_(0, index, _view(content, piece))


def _view(content: torch.Tensor, piece: Piece) -> torch.Tensor:
    size = prod(piece.shape) * piece.dtype.itemsize
    return content[piece.start : piece.start + size].view(piece.dtype).view(piece.shape)


def _nothing() -> None:
    return
