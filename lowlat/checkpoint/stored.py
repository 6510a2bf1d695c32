"""This module reads weights from their files: each look-up reads, arranges and checks them.

A stream reads ahead. A few threads read and arrange pieces of some megabytes each, while the caller uses the tensors
before; pieces that need no change are read straight into their place. The memory between files and caller is at most
`arena_bytes`, about two of the largest tensors.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lowlat.checkpoint.recipes import Piece, Progress, Recipe, check_values, place_rows, placed_rows
from lowlat.checkpoint.source import Named, WeightSource
from lowlat.checkpoint.tensors import DTYPES, Checkpoint, OpenFiles, TensorEntry

__all__ = ["Group", "StoredWeights", "Weights", "ahead_bytes"]

CHUNK_BYTES = 8 << 20  # fits a core's caches with its copy, so that the check for NaN hits the cache
MAX_READERS = 4
MIN_AHEAD_BYTES = 64 << 20
ALIGNMENT = 4096

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Group:
    """Recipes whose weights are made together; `finish` checks or corrects them before the caller gets them."""

    recipes: tuple[Recipe, ...]
    finish: Callable[[Weights], None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights, each aligned."""
        return sum(_aligned(recipe.num_bytes) for recipe in self.recipes)


def ahead_bytes(groups: Sequence[Group]) -> int:
    """Return bytes for two of the largest groups, one in use while the next is read; 64 MiB if groups are small."""
    sizes = [group.num_bytes for group in groups]
    return min(sum(sizes), max(2 * max(sizes), MIN_AHEAD_BYTES)) if sizes else 0


@dataclass
class _Reading:
    """A group that is being read: its tensors, and the readers' jobs."""

    group: Group
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    jobs: list[Future[int]] = field(default_factory=list)


class StoredWeights(WeightSource):
    """Weights by canonical name; each look-up reads the files again, `stream` reads them all once.

    checkpoint  an open checkpoint, checked against the recipes
    groups      the groups of recipes, in the order of the stream
    aliases     second name -> name of a weight; at most one for each weight
    progress    called with (bytes read, bytes in all) during a stream
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        groups: Sequence[Group],
        *,
        aliases: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self._groups = tuple(groups)
        self._aliases = dict(aliases or {})
        self._progress = progress
        self._group_of = {recipe.weight: group for group in self._groups for recipe in group.recipes}

    def __getitem__(self, name: str) -> torch.Tensor:
        own = self._aliases.get(name, name)
        with OpenFiles() as files, _readers() as pool:
            return self._finish(self._start(self._group_of[own], None, files, pool), lambda _: None)[own]

    def __iter__(self) -> Iterator[str]:
        yield from self._group_of
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._group_of) + len(self._aliases)

    def __contains__(self, name: object) -> bool:
        return name in self._group_of or name in self._aliases

    def shapes(self) -> dict[str, torch.Tensor]:
        """See `WeightSource.shapes`."""
        recipes = [recipe for group in self._groups for recipe in group.recipes]
        found = {recipe.weight: torch.empty(recipe.shape, dtype=recipe.dtype, device="meta") for recipe in recipes}
        return found | {name: found[own] for name, own in self._aliases.items()}

    @cached_property
    def arena_bytes(self) -> int:
        """See `ahead_bytes`."""
        return ahead_bytes(self._groups)

    def loaded(self) -> dict[str, torch.Tensor]:
        """Read all weights into memory of their own. Raises ConfigError as `stream` does."""
        return {name: tensor for names, tensor in self.stream() for name in names}

    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """See `WeightSource.stream`. Raises ConfigError naming file, tensor, expected and found."""
        second = {own: name for name, own in self._aliases.items()}
        entries = self.checkpoint.entries
        total = sum(entries[p.name].num_bytes for g in self._groups for r in g.recipes for p in r.pieces)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if self._progress is not None:
                self._progress(done, total)

        room, waiting, upcoming = _Ring(self.arena_bytes), deque[_Reading](), deque(self._groups)
        with OpenFiles() as files, _readers() as pool:
            while waiting or upcoming:
                while upcoming and (start := room.take(upcoming[0].num_bytes)) is not None:
                    group = upcoming.popleft()
                    memory = None if arena is None else arena[start : start + group.num_bytes]
                    waiting.append(self._start(group, memory, files, pool))
                weights = self._finish(waiting.popleft(), advance)
                while weights:
                    own = next(iter(weights))
                    yield (own, second[own]) if own in second else (own,), weights.pop(own)
                room.release()

    def _start(self, group: Group, memory: torch.Tensor | None, files: OpenFiles, pool: ThreadPoolExecutor) -> _Reading:
        """Allocate a group's weights, and submit its pieces to the readers."""
        reading = _Reading(group)
        at = 0
        for recipe in group.recipes:
            if memory is None:
                out = torch.empty(recipe.shape, dtype=recipe.dtype)
            else:
                out = memory[at : at + recipe.num_bytes].view(recipe.dtype).view(recipe.shape)
            at += _aligned(recipe.num_bytes)
            reading.weights[recipe.weight] = out
            offset = 0
            for piece in recipe.pieces:
                entry = self.checkpoint.entries[piece.name]
                files.expect(entry)
                if piece.conversion is not None:
                    placed = placed_rows(recipe, out, offset, 0, piece.made[0])
                    reading.jobs.append(pool.submit(self._convert, files, recipe, piece, placed))
                    offset += piece.made[0]
                    continue
                step = max(1, CHUNK_BYTES // entry.row_bytes)
                for first in range(0, entry.shape[0], step):
                    count = min(step, entry.shape[0] - first)
                    placed = placed_rows(recipe, out, offset, first, count)
                    reading.jobs.append(pool.submit(_read, files, recipe, entry, placed, first))
                offset += entry.shape[0]
        return reading

    def _convert(self, files: OpenFiles, recipe: Recipe, piece: Piece, placed: torch.Tensor) -> int:
        """Read a piece whole, convert and place it; returns its bytes. Runs on a reader. Raises ConfigError."""
        conversion = piece.conversion
        if conversion is None:
            raise ValueError(f"{piece.name} is read as it is")
        found, size = [], 0
        for name in (piece.name, *(each.name for each in conversion.beside)):
            entry = self.checkpoint.entries[name]
            found.append(torch.empty(entry.shape, dtype=DTYPES[entry.dtype]))
            files.read(entry, found[-1])
            size += entry.num_bytes if name == piece.name else 0
        entry = self.checkpoint.entries[piece.name]
        placed.copy_(conversion.make(f"{entry.file}: tensor {entry.name!r}", *found))
        check_values(recipe, entry, placed, 0)
        return size

    def _finish(self, reading: _Reading, advance: Callable[[int], None]) -> dict[str, torch.Tensor]:
        """Wait for a group's pieces. Raises ConfigError."""
        for job in reading.jobs:
            advance(job.result())
        if reading.group.finish is not None:
            reading.group.finish(reading.weights)
        return reading.weights


_scratch = threading.local()  # a reader's memory, reused for each piece: to allocate it anew costs more than to read


def _read(files: OpenFiles, recipe: Recipe, entry: TensorEntry, placed: torch.Tensor, first: int) -> int:
    """Read, place and check some rows of a stored tensor; returns their bytes. Runs on a reader."""
    count = placed.shape[0]
    dtype = DTYPES[entry.dtype]
    if recipe.arrange == "rows" and dtype == recipe.dtype:
        files.read(entry, placed, first=first)
    else:
        size = count * entry.row_bytes
        scratch = getattr(_scratch, "memory", None)
        if scratch is None or scratch.numel() < size:
            _scratch.memory = scratch = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8)
        stored = scratch[:size].view(dtype).view(count, *entry.shape[1:])
        files.read(entry, stored, first=first)
        place_rows(recipe, placed, stored)
    check_values(recipe, entry, placed, first)
    return count * entry.row_bytes


@contextmanager
def _readers() -> Iterator[ThreadPoolExecutor]:
    """Make threads that read, each without torch threads of its own; jobs not begun are cancelled at the end."""
    count = min(MAX_READERS, len(os.sched_getaffinity(0)))
    # torch would start a team of threads for each reader
    pool = ThreadPoolExecutor(count, "lowlat-read", initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torch.get_num_threads())  # otherwise a reader's number would hold for new threads


class _Ring:
    """A ring of memory whose places are taken and released in the same order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> int | None:
        """Take `size` contiguous bytes; returns their start, or None if they are not free."""
        start: int | None = 0
        if self._taken:
            oldest, end = self._taken[0][0], self._taken[-1][1]
            limit = self._size if end > oldest else oldest
            start = end if end + size <= limit else 0 if end > oldest and size <= oldest else None
        if start is not None:
            self._taken.append((start, start + size))
        return start

    def release(self) -> None:
        """Release the oldest place."""
        self._taken.popleft()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
