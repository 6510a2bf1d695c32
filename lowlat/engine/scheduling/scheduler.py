"""The scheduler has the queue and the slots of one runtime, without a device, and plans the work before each step.

A request is queued, then prefills in a slot, then decodes in it, then ends. Requests are ordered by priority, and among
equals by arrival. No request overtakes the head of the queue, not even a smaller one that would fit. Since every
admitted request ends within its reserved worst case, the head is served in bounded time. There are two exceptions. If
a request's next chunk is being prefilled for another request, as for several answers to one prompt, it waits until it
can share the chunk. If a request returns and still has its blocks, it does not wait for a head that finds no blocks.
`lowlat.engine.scheduling.prefill_order` chooses the slot that prefills next.

A paused request frees its slot, and later returns to its place in the queue by arrival. The scheduler also takes the
slot of a request of lower priority if the head finds no slot or no blocks: of the lowest priority first, and of equals
the last to arrive. A decoding request then keeps its blocks until another request needs them; their contents then go to
host memory. A prefilling request frees its blocks, and later prefills again from the shared part of its prompt. A
prompt may be open: its tokens arrive while it is read, and a chunk is planned when a token after it is known.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lowlat.engine.memory.host_space import HostSpace
from lowlat.engine.scheduling.pace import PrefillPace
from lowlat.engine.scheduling.placement import Placement
from lowlat.engine.scheduling.prefill_order import PrefillOrder
from lowlat.engine.scheduling.queue import RequestQueue
from lowlat.engine.scheduling.records import Departure, HeldUp, Phase, PrefillChunk, ScheduledRequest, Slot, StepPlan
from lowlat.errors import CapacityError, ConfigError, RequestError
from lowlat.sequence.book import InvariantError

if TYPE_CHECKING:  # lowlat.graphs loads torch, which this module does not need
    from lowlat.graphs.buckets import Bucket
    from lowlat.sequence.kvcache import KVCache
    from lowlat.step.ladder import StepLadder

__all__ = ["Scheduler"]


class Scheduler:
    """The queue and the slots of one runtime.

    ladder              the buckets; its largest batch must be at least max_batch
    kvcache             the book of requests' state between steps
    max_queue           requests that may wait beyond those that free slots take; more raise CapacityError
    max_prefill_chunks  the most chunks of one prompt that run at once
    max_stall_ms        the time that chunks may take while others decode; `pace` learns how many chunks fit
    num_overprovision   positions that a step may write after a request's total; None: the ladder's most rows
    space               host memory for requests that have left their slot; None: no request leaves it
    num_written         returns the positions that a decoding request may have written, by its id; the engine sets it

    Not safe for use by several threads. Raises ConfigError for sizes that do not fit each other.
    """

    def __init__(
        self,
        ladder: "StepLadder",
        kvcache: "KVCache",
        max_batch: int,
        max_queue: int,
        prefill_chunk: int,
        *,
        max_prefill_chunks: int = 1,
        max_stall_ms: float = 25.0,
        num_overprovision: int | None = None,
        space: HostSpace | None = None,
    ) -> None:
        if not 1 <= max_batch <= ladder.batches[-1]:
            raise ConfigError(f"max_batch must be from 1 to the largest bucket, {ladder.batches[-1]}, got {max_batch}")
        if prefill_chunk != kvcache.prefill_chunk:
            raise ConfigError(f"prefill_chunk {prefill_chunk} differs from the KV cache's {kvcache.prefill_chunk}")
        self.ladder = ladder
        self.kvcache = kvcache
        self.max_batch = max_batch
        self.max_queue = max_queue
        self.prefill_chunk = prefill_chunk
        self.pace = PrefillPace(max_stall_ms)
        self.num_overprovision = max(ladder.rows_of.values()) if num_overprovision is None else num_overprovision
        self.space = HostSpace(0) if space is None else space
        self.num_written: Callable[[str], int] = lambda request_id: 1 << 62
        self._queue = RequestQueue(prefill_chunk)
        self._slots: list[Slot | None] = [None] * max_batch
        self._order = PrefillOrder(self._slots, self._queue.open, self.pace, prefill_chunk, max_prefill_chunks)
        self._requests: dict[str, Slot | None] = {}  # None: without a slot
        self._placement = Placement(
            kvcache=kvcache,
            queue=self._queue,
            slots=self._slots,
            requests=self._requests,
            space=self.space,
            num_overprovision=self.num_overprovision,
            num_written=lambda request_id: self.num_written(request_id),
        )
        self._kept = self._placement.kept
        self._pending: PrefillChunk | None = None

    @property
    def num_active(self) -> int:
        """Slots that decode."""
        return sum(slot is not None and slot.phase is Phase.DECODING for slot in self._slots)

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused, since the queue and the free slots are taken."""
        return self.num_queued >= self.max_queue + self._slots.count(None)

    @property
    def num_queued(self) -> int:
        """Requests without a slot."""
        return len(self._queue.queued)

    @property
    def busy(self) -> bool:
        """Whether any request may go on by itself.

        Requests that wait for `resume`, or for more of their prompt, may not; nor requests that wait for their blocks.
        """
        if self.ready:
            return True
        tiers = self.kvcache.tiers
        if tiers is None or self._all_wait:
            return False
        return tiers.under_way or self.ready  # asked again: what has ended since made it ready

    @property
    def ready(self) -> bool:
        """Whether any request may go on now; unlike in `busy`, a head that waits for copies or files may not."""
        return not self._all_wait and (not self._queue.queued or self.num_active > 0 or self.has_work)

    @property
    def _all_wait(self) -> bool:
        """Whether every request waits for `resume`, or for more of its prompt."""
        return len(self._requests) <= len(self._queue.aside) + self._num_starved

    @property
    def is_held_up(self) -> bool:
        """Whether nothing runs and the head of the queue waits for blocks of requests that wait for their callers."""
        return bool(self._queue.queued) and not self.busy

    @property
    def retry_at(self) -> float | None:
        """The time at which host memory for the head of the queue is requested again; None: never."""
        return self._placement.retry_at if self._queue.queued else None

    def held_up(self) -> HeldUp | None:
        """The blocks that the queue's head needs, and the requests that hold them; None: it may go on. Time: blocks."""
        if not self.is_held_up:
            return None
        head, kvcache, stats = self._queue.queued[0], self.kvcache, self.kvcache.stats()
        paused = [name for name in self._queue.aside if name in self._kept and self._kept[name].moved is None]
        return HeldUp(
            request_id=head.request_id,
            num_needed=kvcache.num_needed(head.max_total_tokens, self.num_overprovision),
            num_available=stats.num_free + stats.num_evictable,
            paused=tuple(paused),
            num_paused_blocks=kvcache.num_held(paused),
            open_prompts=tuple(opened := [name for name in self._queue.open if self._requests[name] is not None]),
            num_open_blocks=kvcache.num_held(opened),
            has_slot=None in self._slots,
        )

    @property
    def num_paused(self) -> int:
        """Requests that wait for `resume`."""
        return self._queue.num_paused

    @property
    def _num_starved(self) -> int:
        """Open prompts in slots whose known chunks have all been run."""
        open_ones = (self._requests[name] for name in self._queue.open)
        return sum(slot is not None and not self._order.num_left(slot) for slot in open_ones)

    @property
    def has_work(self) -> bool:
        """Whether `plan` may have work now: a chunk to prefill, or a slot for the head of the queue."""
        return bool(self._order.waiting()) or self._placement.may_admit()

    def phase(self, request_id: str) -> Phase:
        """The phase of a request. Raises RequestError for one that is unknown or has ended."""
        slot = self._find(request_id)
        if slot is not None:
            return slot.phase
        return Phase.PAUSED if self._queue.is_paused(request_id) else Phase.QUEUED

    def slot(self, request_id: str) -> int | None:
        """The slot of a request; None: it has none. Raises RequestError as `phase` does."""
        slot = self._find(request_id)
        return None if slot is None else slot.number

    def enqueue(self, request: ScheduledRequest, *, is_open: bool = False, arrival: int | None = None) -> None:
        """Queue a request after earlier ones of its priority. Raises the errors of `check`.

        is_open  whether its prompt grows, see `grow`: it is then queued when more than a chunk of it is known
        arrival  its earlier number of `arrival`; it is then queued even if the queue is full
        """
        if arrival is None:
            self.check(request, is_open=is_open)
        self._requests[request.request_id] = None
        self._queue.arrive(request, is_open=is_open, arrival=arrival)

    def arrival(self, request_id: str) -> int:
        """The number of a live request in the order of arrival."""
        self._find(request_id)
        return self._queue.arrivals[request_id]

    def grow(self, request_id: str) -> None:
        """Take note of new tokens in an open prompt's list. Raises RequestError for a prompt that is not open."""
        self._check_open(request_id)
        if request_id in self._queue.aside:
            self._queue.put(self._queue.take(request_id))
        elif request_id in self.kvcache:
            self.kvcache.grow(request_id)

    def complete(self, request_id: str, max_total_tokens: int) -> None:
        """Mark an open prompt as complete; its total must not be larger than before. Raises RequestError as `grow`."""
        self._check_open(request_id)
        self._queue.open.remove(request_id)
        slot = self._requests[request_id]
        if slot is None:
            self._queue.put(replace(self._queue.take(request_id), max_total_tokens=max_total_tokens))
        else:
            slot.request = replace(slot.request, max_total_tokens=max_total_tokens)
            self.kvcache.grow(request_id)

    def is_open(self, request_id: str) -> bool:
        """Whether a request's prompt may still grow."""
        return request_id in self._queue.open

    def _check_open(self, request_id: str) -> None:
        if request_id not in self._queue.open:
            raise RequestError(f"request {request_id} has no open prompt: it was finished, is unknown or has ended")

    def pause(self, request_id: str) -> Departure | None:
        """Take a request out of its slot, or of the queue, until `resume`; returns its departure, if it had a slot.

        The caller must read the slot's state of a decoding request before it launches anything.
        Raises RequestError for a request that is unknown, paused already or whose prompt is open; CapacityError if its
        state does not fit in host memory.
        """
        slot = self._find(request_id)
        if request_id in self._queue.open:
            raise RequestError(f"request {request_id} has an open prompt: finish it, or cancel it")
        if request_id in self._queue.aside:
            raise RequestError(f"request {request_id} is paused already")
        departure = None if slot is None else self._placement.depart(slot)
        self._queue.aside[request_id] = self._queue.unqueue(request_id) if slot is None else slot.request
        return departure

    def resume(self, request_id: str) -> None:
        """Queue a paused request again, by its priority and arrival. Raises RequestError if it is not paused."""
        self._find(request_id)
        if not self._queue.is_paused(request_id):
            raise RequestError(f"request {request_id} is not paused")
        self._queue.put(self._queue.take(request_id))

    def check(self, request: ScheduledRequest, *, is_open: bool = False) -> None:
        """Refuse a request that cannot be queued now.

        Raises CapacityError when the queue is full; RequestError for an id in use, an empty prompt, a total
        that leaves no room for a token, or a worst case larger than the KV pool.
        """
        name, num_tokens = request.request_id, len(request.prompt_token_ids)
        if name in self._requests:
            raise RequestError(f"request {name} exists already")
        if not num_tokens and not is_open:
            raise RequestError(f"request {name} has an empty prompt")
        if request.max_total_tokens <= num_tokens:
            raise RequestError(
                f"request {name}: max_total_tokens {request.max_total_tokens} leaves no token after a prompt "
                f"of {num_tokens}"
            )
        self.kvcache.check(name, request.max_total_tokens, self.num_overprovision)
        if self.is_full:
            raise CapacityError(
                f"{self.num_queued} requests wait already, all {self.max_batch} slots counted; "
                f"the limit is {self.max_queue} (max_queue)"
            )

    def plan(self) -> StepPlan:
        """Admit the requests that fit, and choose one chunk. Time: slots, and the book's `admit`.

        Raises InvariantError if the last plan's chunk was not reported by `prefill_done`.
        """
        if self._pending is not None:
            raise InvariantError(f"request {self._pending.request_id}: its last chunk was not reported as done")
        admitted = self._placement.admit()
        departed, moved_out = self._placement.take_moves()
        self._pending = chunk = self._order.next_chunk(decodes=self.num_active > 0)
        if chunk is not None:
            self.kvcache.append(chunk.request_id, chunk.start, chunk.start + chunk.num_tokens)
        return StepPlan(tuple(admitted), self._pending, departed, moved_out)

    def prefill_done(self, chunk: PrefillChunk) -> None:
        """Report that the planned chunk is launched: its KV may be shared, and after a last chunk the slot decodes.

        Raises InvariantError for any other chunk.
        """
        slot = self._requests.get(chunk.request_id)
        if chunk != self._pending or slot is None:
            raise InvariantError(f"request {chunk.request_id}: the chunk at {chunk.start} was not planned")
        self._pending = None
        slot.next_start = chunk.start + chunk.size
        self.kvcache.mark_prefilled(chunk.request_id, chunk.start + chunk.num_tokens)
        if chunk.last:
            slot.phase = Phase.DECODING

    def cancel(
        self,
        request_id: str,
        token_ids: Sequence[int] | None = None,
        *,
        num_written: int | None = None,
        poisoned: bool = False,
        completed: bool = True,
    ) -> Phase:
        """Remove a request from slot or queue, ended or not; return its phase.

        The other arguments are those of `KVCache.release`. The device must not write to its blocks after this call.
        Raises RequestError for a request that is unknown or was removed.
        """
        slot = self._find(request_id)
        phase, kept = self.phase(request_id), self._kept.get(request_id)
        holder = slot if slot is not None or kept is None else kept.slot
        owner = None if holder is None else holder.request.owner
        if slot is not None:
            self._slots[slot.number] = None
            if self._pending is not None and self._pending.request_id == request_id:
                self._pending = None
        else:
            self._queue.take(request_id)
        if request_id in self.kvcache:
            self.kvcache.release(
                request_id, token_ids, num_written=num_written, poisoned=poisoned, owner=owner, completed=completed
            )
        self._placement.forget(request_id)
        del self._requests[request_id]
        self._queue.forget(request_id)
        return phase

    def choose_bucket(self, num_speculative_tokens: int) -> "Bucket":
        """The smallest bucket for the decoding slots. Raises ConfigError for a draft length without a bucket."""
        return self.ladder.choose(self.num_active, num_speculative_tokens)

    def invariants(self) -> None:
        """Check slots, queue and KV against each other. Raises InvariantError naming what does not fit."""
        problems, queue, order = [], self._queue, self._order
        queued = [request.request_id for request in queue.queued]
        slotted = [slot.request.request_id for slot in self._slots if slot is not None]
        every = [*queued, *slotted, *queue.aside]
        if len(set(every)) != len(every) or set(every) != set(self._requests) or set(every) != set(queue.arrivals):
            problems.append(
                f"{len(self._requests)} requests: {len(queued)} queued, {len(slotted)} in slots, and "
                f"{len(queue.aside)} aside"
            )
        elif (places := list(map(queue.place, queue.queued))) != sorted(places):
            problems.append(f"the queue is out of order: {places}")
        if set(self._kept) - {*queued, *queue.aside}:
            problems.append(f"{len(self._kept)} requests are kept, not all of which are queued or paused")
        if set(self.space.held) != set(self._kept) or self.space.num_bytes > self.space.max_bytes:
            problems.append(f"{len(self.space.held)} requests take {self.space.num_bytes} bytes of host memory")
        for number, slot in enumerate(self._slots):
            if slot is None:
                continue
            name = slot.request.request_id
            if slot.number != number or self._requests.get(name) is not slot:
                problems.append(f"slot {number} and request {name} do not point at each other")
            if (slot.phase is Phase.PREFILLING) != (order.num_left(slot) > 0) and name not in queue.open:
                problems.append(f"request {name} is {slot.phase} with {order.num_left(slot)} chunks left")
            if slot.passed_over > order.max_passed_over + self.max_batch:
                problems.append(f"request {name} was passed over {slot.passed_over} times")
        holders = {*slotted, *(name for name, kept in self._kept.items() if kept.moved is None)}
        if holders != {name for name in self._requests if name in self.kvcache} or len(self.kvcache) != len(holders):
            problems.append(f"{len(holders)} requests in slots or kept, {len(self.kvcache)} hold KV blocks")
        if problems:
            raise InvariantError("; ".join(problems))
        self.kvcache.invariants()

    def _find(self, request_id: str) -> Slot | None:
        if request_id not in self._requests:
            raise RequestError(f"request {request_id} is unknown or has ended")
        return self._requests[request_id]
