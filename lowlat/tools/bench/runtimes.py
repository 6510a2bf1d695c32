"""This module loads the runtimes for measurements, one at a time, each for several cases."""

import gc
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from lowlat.engine.runtime import Runtime
from lowlat.errors import DeviceError, LowlatError
from lowlat.tools.bench.subject import Subject

__all__ = ["BLOCK_SIZE", "Need", "Runtimes"]

BLOCK_SIZE = 32
EXTRA_ROWS = 64  # the most rows of a step after a request's last token


class Need(NamedTuple):
    """The runtime sizes that a case needs.

    depth      draft tokens
    positions  positions of one request, prompt included
    reuse      share keys and values of prompts
    adaptive   each step chooses its draft length
    kv_share   the share of the runtime's KV blocks that its requests take
    """

    depth: int
    batch: int
    positions: int
    reuse: bool
    adaptive: bool = False
    kv_share: float = 1.0

    @property
    def blocks(self) -> int:
        """KV blocks of all its requests, and those that must stay free."""
        own = self.batch * -(-(self.positions + EXTRA_ROWS) // BLOCK_SIZE)
        return math.ceil(own / self.kv_share)


class Runtimes:
    """Runtimes of one subject for a sequence of needs; without a draft model if nothing is drafted.

    A context manager that closes the last one.
    """

    def __init__(self, subject: Subject, needs: Iterable[Need]) -> None:
        self._subject = subject
        self._ahead = list(needs)
        self._runtime: Runtime | None = None

    def __enter__(self) -> "Runtimes":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def take(self, need: Need) -> Runtime:
        """Return a runtime with a need's draft length: the loaded one if it is large enough.

        Raises the errors of a load for this need alone.
        """
        self._ahead = self._ahead[self._ahead.index(need) + 1 :]
        if self._runtime is None or not self._serves(self._runtime, need):
            self.drop()
            self._runtime = self._load_largest([need, *self._ahead])
        self._runtime.speculate(need.depth)
        return self._runtime

    def drop(self) -> None:
        """Close the loaded runtime and free its memory, before the next one is loaded."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
        gc.collect()

    def _load_largest(self, needs: list[Need]) -> Runtime:
        first = needs[0]
        needs = [need for need in needs if _kind(need) == _kind(first)]
        if first.kv_share < 1.0:
            needs = [need for need in needs if need.blocks == first.blocks]
        while len(needs) > 1:
            largest = max(need.blocks for need in needs)
            try:
                return self._load(needs)
            except DeviceError:
                raise
            except (LowlatError, torch.OutOfMemoryError):
                if first.blocks == largest:
                    raise
                gc.collect()
                needs = [first, *(need for need in needs[1:] if need.blocks < largest)]
        return self._load(needs)

    def _load(self, needs: list[Need]) -> Runtime:
        return self._subject.load(
            max(need.depth for need in needs),
            adaptive=needs[0].adaptive,
            max_batch=max(need.batch for need in needs),
            max_context=max(need.positions for need in needs),
            block_size=BLOCK_SIZE,
            kv_blocks=max(need.blocks for need in needs) + 1,
            prefix_reuse=needs[0].reuse,
        )

    def _serves(self, runtime: Runtime, need: Need) -> bool:
        """Whether a runtime has a need's draft length, and is large enough."""
        config = runtime.config
        fits = need.batch <= config.max_batch and need.positions <= config.max_context
        known = need.depth in runtime.ladder.rows_of and (need.depth > 0) is (runtime.speculator is not None)
        known = known and runtime.ladder.adaptive is need.adaptive
        has_room = need.blocks < (config.kv_blocks or 0)
        if need.kv_share < 1.0:  # no more blocks may be free
            has_room = need.blocks + 1 == config.kv_blocks
        return known and fits and has_room


def _kind(need: Need) -> tuple[bool, bool, bool]:
    """Return a key, equal for needs that one load can serve, apart from sizes."""
    return need.depth > 0, need.reuse, need.adaptive
