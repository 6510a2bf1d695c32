"""This module gives slots and blocks to the head of the queue, and takes them from requests of lower priority."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lowlat.engine.memory.host_space import HostSpace
from lowlat.engine.scheduling.kept_requests import Kept, KeptRequests
from lowlat.engine.scheduling.queue import RequestQueue
from lowlat.engine.scheduling.records import Admission, Departure, Phase, ScheduledRequest, Slot
from lowlat.errors import CapacityError
from lowlat.sequence.book import MovedIn, MovedOut

if TYPE_CHECKING:  # it loads torch, which this module does not need
    from lowlat.sequence.kvcache import KVCache

__all__ = ["Placement"]


class Placement:
    """Moves requests between the queue and the slots of one scheduler.

    slots              by number; None is a free slot
    requests           the slot of each request, by id; None for a request without a slot
    space              host memory for requests that have left their slot
    num_overprovision  positions that a step may write past a request's total
    num_written        returns the number of positions that a decoding request may have written, from its id
    kept               requests that have decoded and have no slot
    retry_at           monotonic time at which the host is asked again for memory that the queue's head waits for;
                       None: it waits for none
    """

    def __init__(
        self,
        *,
        kvcache: "KVCache",
        queue: RequestQueue,
        slots: list[Slot | None],
        requests: dict[str, Slot | None],
        space: HostSpace,
        num_overprovision: int,
        num_written: Callable[[str], int],
    ) -> None:
        self._kvcache, self._queue, self._slots, self._requests = kvcache, queue, slots, requests
        self._space, self._num_overprovision, self._num_written = space, num_overprovision, num_written
        self.kept = KeptRequests(kvcache, space, queue)
        self._departed: list[Departure] = []
        self._moved_out: list[tuple[str, MovedOut]] = []
        self._num_admitted = 0
        self._refused: tuple[ScheduledRequest, int] | None = None  # the head, and the cache it did not fit into
        self._passed = 0  # the generation of `kept` in which no kept request could make way for it
        self.retry_at: float | None = None

    def may_admit(self) -> bool:
        """Whether the head of the queue may get a slot now."""
        if not self._queue.queued:
            return False
        head = self._queue.queued[0]
        if None not in self._slots:
            return self._victim(head) is not None and self._may_fit(head)
        if self._refused != (head, self._kvcache.generation) or self._passed != self.kept.generation:
            return True
        if self.retry_at is not None and time.monotonic() >= self.retry_at:
            return True
        return bool(self.kept) and any(map(self._has_blocks, self._queue.queued))

    def take_moves(self) -> tuple[tuple[Departure, ...], tuple[tuple[str, MovedOut], ...]]:
        """The requests that lost their slots, and those that lost their blocks, since the last call."""
        moves = tuple(self._departed), tuple(self._moved_out)
        self._departed, self._moved_out = [], []
        return moves

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has a slot again, or has ended."""
        if self.kept.forget(request_id):
            self._refused = None

    def admit(self) -> list[Admission]:
        """Give slots to the first requests of the queue, as far as blocks suffice.

        Its time grows with the number of slots, and with the time of the cache's `admit`.
        """
        admitted = []
        self.retry_at, refused_until = None, self._space.refused_until
        place = 0  # of the first request that may be admitted
        while place < len(self._queue.queued):
            request = self._queue.queued[place]
            is_free = None in self._slots
            if (is_free or self._victim(request)) and self._is_coming(request):
                place += 1  # another request is prefilling the same prefix
                continue
            admission = self._place(request) if is_free else None
            if admission is not None:
                admitted.append(admission)
            elif not self._make_way(request):
                admitted += self._take_back()
                self._passed = self.kept.generation
                self.retry_at = self._space.refused_until or refused_until
                break
        return admitted

    def _take_back(self) -> list[Admission]:
        """Give free slots to queued requests that still have their blocks.

        The queue's head waits for blocks. These requests free theirs only by going on to their end.
        """
        admitted = []
        for request in [each for each in self._queue.queued if self._has_blocks(each)]:
            admission = self._place(request) if None in self._slots else None
            if admission is not None:
                admitted.append(admission)
        return admitted

    def _has_blocks(self, request: ScheduledRequest) -> bool:
        """Whether a request without a slot still has the blocks with which it can go on."""
        kept = self.kept.get(request.request_id)
        return kept is not None and kept.moved is None

    def _is_coming(self, request: ScheduledRequest) -> bool:
        if not request.reads_cache or request.request_id in self.kept:
            return False
        return self._kvcache.is_coming(request.prompt_token_ids, request.cache_salt)

    def _place(self, request: ScheduledRequest) -> Admission | None:
        """Give a queued request a free slot if the blocks that it needs are free.

        After a refusal the cache is asked again only once it has changed, since asking digests the prefix.
        """
        name = request.request_id
        if self._refused is not None and self._refused == (request, self._kvcache.generation):
            return None
        generation = self._kvcache.generation  # read before asking: a change meanwhile is worth another try
        number, kept = self._slots.index(None), self.kept.get(name)
        slot = self._begin(request, number) if kept is None else self._come_back(kept, number)
        self._refused = (request, generation) if slot is None else None
        if slot is None:
            return None
        self._queue.unqueue(name)
        admitted, moved_in = slot
        self._slots[number] = self._requests[name] = admitted
        self.forget(name)
        cached = admitted.next_start if kept is None else 0
        return Admission(name, number, admitted.table, cached, resumes=kept is not None, moved_in=moved_in)

    def _begin(self, request: ScheduledRequest, number: int) -> tuple[Slot, None] | None:
        allocation = self._kvcache.admit(
            request.request_id,
            request.prompt_token_ids,
            request.max_total_tokens,
            self._num_overprovision,
            request.cache_salt,
            reads=request.reads_cache,
        )
        if allocation is None:
            return None
        self._num_admitted += 1
        return Slot(request, number, self._num_admitted, allocation.table, allocation.num_cached_tokens), None

    def _come_back(self, kept: Kept, number: int) -> tuple[Slot, MovedIn | None] | None:
        if kept.moved is None:
            return replace(kept.slot, number=number), None
        moved_in = self._kvcache.move_in(kept.slot.request.request_id, kept.moved)
        return None if moved_in is None else (replace(kept.slot, number=number, table=moved_in.table), moved_in)

    def _make_way(self, head: ScheduledRequest) -> bool:
        """Take blocks, or a slot, from another request for the queue's head; returns False if none can be taken.

        Blocks of requests without a slot are taken first.
        """
        if None in self._slots and (moved := self.kept.move_out(head.request_id, self._num_written)) is not None:
            self._moved_out.append(moved)
            return True
        victim = self._victim(head)
        if victim is None or not self._may_fit(head):
            return False
        try:
            self._departed.append(self.depart(victim))
        except CapacityError:  # the host refuses memory, so the request keeps its slot
            return False
        self._queue.put(victim.request)
        return True

    def _victim(self, head: ScheduledRequest) -> Slot | None:
        """The slot that `head` may take: the lowest priority below its own, of equals the latest arrival; or None."""
        may_leave = self._space.has_slot()
        return next((slot for slot in self._lower(head) if may_leave or slot.phase is Phase.PREFILLING), None)

    def _lower(self, head: ScheduledRequest) -> list[Slot]:
        """The slots of requests of lower priority; the first one is to be taken first."""
        lower = [slot for slot in self._slots if slot is not None and slot.request.priority < head.priority]
        return sorted(lower, key=lambda slot: self._queue.place(slot.request), reverse=True)

    def _may_fit(self, head: ScheduledRequest) -> bool:
        """Whether blocks can suffice for the queue's head once requests of lower priority have left.

        Only those count that fit in host memory.
        """
        if self._has_blocks(head):
            return True
        num_free, leaving = self._space.num_free, set[str]()

        def leave(name: str, num_slots: int) -> None:
            nonlocal num_free
            counts = self._kvcache.num_to_move(name, self._num_written(name))
            num_bytes = num_slots * self._space.slot_bytes + self._space.bytes_of(counts)
            if num_bytes <= num_free:
                num_free -= num_bytes
                leaving.add(name)

        for name, _ in self.kept.here(head.request_id):
            leave(name, 0)
        for slot in self._lower(head):
            if slot.phase is Phase.PREFILLING:
                leaving.add(slot.request.request_id)
            else:
                leave(slot.request.request_id, 1)
        needed = self._kvcache.num_needed(head.max_total_tokens, self._num_overprovision)
        return needed <= self._kvcache.num_free_without(leaving)

    def depart(self, slot: Slot) -> Departure:
        """Take a request out of its slot. Raises CapacityError if the rows to keep do not fit in host memory."""
        request_id, decoded = slot.request.request_id, slot.phase is Phase.DECODING
        if decoded:
            self.kept.keep(slot)
        else:
            self._kvcache.release(request_id)
        self._slots[slot.number] = self._requests[request_id] = None
        return Departure(request_id, slot.number, decoded)
