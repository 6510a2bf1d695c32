"""This module keeps the states of requests that have left their slot in host memory, bit for bit.

It reads the states of all ranks. `lowlat.engine.scheduling` decides which blocks leave, and whether they fit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lowlat.engine.memory.host_space import HostSpace
from lowlat.executors import Executor
from lowlat.sequence.book import InvariantError, MovedIn, MovedOut

__all__ = ["KeptStates", "host_space"]

GIB = 1 << 30
Content = Callable[[], torch.Tensor]  # waits until the content has been read, and returns it


def host_space(executor: Executor, pause_gib: float, per_part: int) -> HostSpace:
    """Set up the host memory for requests without a slot, for all ranks together.

    pause_gib  its limit
    per_part   blocks that are copied at once
    """
    movers = executor.movers
    pools = {spec.pool for spec in executor.state.specs.values() if spec.paging is not None}
    blocks = {pool: sum(mover.block_bytes(pool) for mover in movers) for pool in pools}

    def obtain(counts: Mapping[str, int] | None) -> None:
        """Allocate all memory of one request, and free it into torch's cache of pinned memory, where reads find it."""
        held = []
        for mover in movers:
            sizes = [mover.slot_bytes] if counts is None else []
            for pool, count in (counts or {}).items():
                parts = (min(per_part, count - first) for first in range(0, count, per_part))
                sizes += [mover.content_bytes(pool, part) for part in parts]
            held += [mover.allocate(size, "pause_gib") for size in sizes]

    return HostSpace(int(pause_gib * GIB), sum(mover.slot_bytes for mover in movers), blocks, obtain)


class Part(NamedTuple):
    """The contents of some blocks of a pool, one for each rank."""

    pool: str
    num_blocks: int
    contents: tuple[Content, ...]


@dataclass
class _Kept:
    rows: tuple[Content, ...]
    parts: list[Part] = field(default_factory=list)
    table: tuple[int, ...] = ()  # the blocks that the request had on the device


class KeptStates:
    """Keeps the states of one runtime's requests without a slot, by request id.

    per_part  blocks that are copied at once
    """

    def __init__(self, executor: Executor, per_part: int) -> None:
        self._executor, self._per_part = executor, per_part
        self._kept: dict[str, _Kept] = {}

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._kept

    def read_slot(self, request_id: str, slot: int) -> None:
        """Read a slot's rows as the launches so far leave them. Raises DeviceError when the device has failed."""
        self._kept[request_id] = _Kept(tuple(mover.read_slot(slot) for mover in self._executor.movers))

    def read_blocks(self, request_id: str, moved: MovedOut) -> None:
        """Read the blocks of a request, before anything overwrites them."""
        parts, self._kept[request_id].table = self._kept[request_id].parts, moved.table
        for pool, places in moved.places.items():
            for first in range(0, len(places), self._per_part):
                some = places[first : first + self._per_part]
                contents = tuple(mover.read(pool, some) for mover in self._executor.movers)
                parts.append(Part(pool, len(some), contents))

    def write(self, request_id: str, slot: int, tables: Mapping[str, Sequence[int]], moved_in: MovedIn | None) -> None:
        """Write a request's rows to a slot, with these tables, and its blocks to their new places; then forget it.

        moved_in  the new places; None: the blocks have stayed on the device
        Raises DeviceError when the device has failed.
        """
        kept = self._kept.pop(request_id)
        moved = {} if moved_in is None else dict(zip(kept.table, moved_in.table, strict=True))
        for mover, rows in zip(self._executor.movers, kept.rows, strict=True):
            mover.write_slot(slot, rows(), tables, moved)
        if moved_in is None:
            return
        done = dict.fromkeys(moved_in.places, 0)
        for pool, count, contents in kept.parts:
            start = done[pool]
            done[pool] += count
            places = [place for place in moved_in.places[pool][start : start + count] if place is not None]
            if len(places) not in (0, count):
                raise InvariantError(f"request {request_id}: {len(places)} of {count} blocks of a part came back")
            if places:
                for mover, content in zip(self._executor.movers, contents, strict=True):
                    mover.write(pool, places, content())

    def forget(self, request_id: str) -> None:
        """Drop the kept state of a request, if there is one."""
        self._kept.pop(request_id, None)
