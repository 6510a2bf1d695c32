"""This module sends prompts through a `KVCache` of some kind of model without one, and counts the positions found."""

import random
from collections.abc import Sequence
from functools import partial

import torch

from lowlat.sequence.kvcache import KVCache
from lowlat.sequence.pool_book import PoolBook
from lowlat.sequence.snapshot_book import SnapshotBook
from lowlat.sequence.tiers.arena import HostArena
from lowlat.sequence.tiers.host import HostTier
from lowlat.sequence.tiers.key import Load, Mark, Save
from lowlat.sequence.tiers.tiers import CacheTiers
from lowlat.sequence.window_book import WindowBook
from lowlat.sequence.window_pool import WindowPool

__all__ = ["CHUNK", "PART", "Traffic"]

BLOCK, CHUNK, AHEAD = 32, 128, 8
PART = 16 * CHUNK  # positions of a prompt that are read at a time
WINDOWS: dict[str, int | None] = {"plain": None, "gpt-oss": 128, "gemma": 1024, "hybrid": None}
CONTENT_BYTES = {"": 8192, ".w128": 4096, ".w1024": 40960, ".states": 16384}


class _Device:
    """A device whose blocks hold nothing: contents have sizes alone."""

    def allocate(self, size: int, knob: str) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> Mark:
        return _done

    def content_bytes(self, pool: str, count: int) -> int:
        return CONTENT_BYTES[pool]

    def start_in(self, loads: Sequence[Load], mark: Mark) -> Mark:
        return _done

    def start_out(self, saves: Sequence[Save], contents: Sequence[torch.Tensor], mark: Mark) -> Mark:
        return _done


def _done() -> None:
    return


class Traffic:
    """Requests one after the other.

    kind         of a model, in WINDOWS
    max_context  positions that the device's memory holds
    host_chunks  of the first pool's contents that host memory holds; 0: there is none
    """

    def __init__(self, kind: str, *, max_context: int = 65536, snapshots: int = 8, host_chunks: int = 0) -> None:
        num_blocks, window = -(-(max_context + AHEAD) // BLOCK), WINDOWS[kind]
        books: list[PoolBook] = []
        if window is not None:
            size = WindowPool(window, 2, BLOCK, PART, 8, AHEAD).default_blocks(num_blocks, CHUNK // BLOCK, 1)
            books.append(WindowBook(WindowPool(window, size, BLOCK, PART, 8, AHEAD), CHUNK))
        if kind == "hybrid":
            books.append(SnapshotBook(1, snapshots, CHUNK, 8192))
        self._device, self._count, self._random = _Device(), 0, random.Random(1)
        self.tiers = None
        if host_chunks:
            arena = HostArena(host_chunks * CONTENT_BYTES[""], lambda size: torch.empty(size, dtype=torch.uint8))
            self.tiers = CacheTiers(HostTier(arena), None, self._device)
        self.cache = KVCache(
            num_blocks + 1, BLOCK, CHUNK, reuse=True, share_decoded=False, books=books, tiers=self.tiers
        )

    def text(self, length: int) -> list[int]:
        """Positions that no other text has."""
        return [self._random.randrange(100_000) for _ in range(length)]

    def ask(self, prompt: Sequence[int], *, num_parts: int | None = None) -> int:
        """Read a prompt and answer it, or break it off after so many parts; returns the positions that were found."""
        self._count += 1
        name, prompt = str(self._count), tuple(prompt)
        while (allocation := self.cache.admit(name, prompt, len(prompt) + 1, AHEAD)) is None:
            assert self.tiers is not None, "it waits for nobody"
            self._move()
        self._move()
        starts = range(allocation.num_cached_tokens, len(prompt), PART)[:num_parts]
        for start in starts:
            stop = min(start + PART, len(prompt))
            self.cache.append(name, start, stop)
            self.cache.mark_prefilled(name, stop)
            self._move()
        self.cache.release(name, completed=num_parts is None)
        return allocation.num_cached_tokens

    def close(self) -> None:
        """End the tiers' threads, and check the books."""
        if self.tiers is not None:
            self.tiers.close()
        self.cache.invariants()

    def _move(self) -> None:
        """Do what copies the book asks for."""
        loads = [load for load in self.cache.take_loads() if load.holder is not None]
        saves = self.cache.take_saves()
        if self.tiers is None:
            return
        for save in saves:
            if save.holder is not None:
                self.tiers.copy_out([save], self._device.mark())
            else:
                content = torch.zeros(CONTENT_BYTES[save.key.pool], dtype=torch.uint8)
                self.tiers.put(save.key, partial(torch.clone, content), spare=save.spare)
        if loads:
            self.tiers.copy_in(loads, self._device.mark())
        self.tiers.flush()
