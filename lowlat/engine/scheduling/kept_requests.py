"""This module lists requests that have decoded and have no slot, and records whether their KV has left the device."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowlat.engine.memory.host_space import HostSpace
from lowlat.engine.scheduling.queue import RequestQueue
from lowlat.engine.scheduling.records import Slot
from lowlat.sequence.book import MovedOut

if TYPE_CHECKING:  # which loads torch, of which this module needs nothing
    from lowlat.sequence.kvcache import KVCache

__all__ = ["Kept", "KeptRequests"]


@dataclass(eq=False, slots=True)
class Kept:
    """A request that has decoded and has no slot; `moved` describes its former blocks, None while it still has them."""

    slot: Slot
    moved: MovedOut | None = None


class KeptRequests(Mapping[str, Kept]):
    """Keeps the slots of such requests, by id, and counts the host memory that they take.

    space       the host memory
    queue       has their priorities and arrivals
    generation  grows with every kept request, since another one may then get its blocks
    """

    def __init__(self, kvcache: "KVCache", space: HostSpace, queue: RequestQueue) -> None:
        self._kvcache, self._space, self._queue = kvcache, space, queue
        self._kept: dict[str, Kept] = {}
        self.generation = 0

    def __getitem__(self, request_id: str) -> Kept:
        return self._kept[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, slot: Slot) -> None:
        """Keep a request that leaves its slot. Raises CapacityError if its rows do not fit in host memory."""
        self._space.take_slot(slot.request.request_id)
        self._kept[slot.request.request_id] = Kept(slot)
        self.generation += 1

    def forget(self, request_id: str) -> bool:
        """Drop a request; returns whether it was kept."""
        self._space.release(request_id)
        return self._kept.pop(request_id, None) is not None

    def move_out(self, head_id: str, num_written: Callable[[str], int]) -> tuple[str, MovedOut] | None:
        """Free the blocks of one kept request: of those that fit in host memory, the one that `here` lists first.

        head_id      the queue's head, which keeps its blocks
        num_written  returns the number of positions that a request may have written, from its id
        """
        for name, kept in self.here(head_id):
            moved = self._kvcache.move_out(name, num_written(name), self._space.has_blocks)
            if moved is not None:
                self._space.take_blocks(name, moved)
                kept.moved = moved
                return name, moved
        return None

    def here(self, head_id: str) -> list[tuple[str, Kept]]:
        """The kept requests that still have their blocks, without the queue's head; the lowest priority comes first."""
        here = [(name, kept) for name, kept in self._kept.items() if kept.moved is None and name != head_id]
        return sorted(here, key=lambda each: self._queue.place(each[1].slot.request), reverse=True)
