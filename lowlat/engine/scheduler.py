"""Admission, slots, prefill order and choice of buckets: pure Python, no device.

A request is queued, then prefilling in a slot, then decoding in it, then gone. The order is first come, first
served: nothing overtakes the head of the queue, not even a smaller request that would fit, because every
admitted request ends within its reserved worst case and so the head is served in bounded time. Only a request whose
next chunk is being prefilled for another, as those of several answers to one prompt, waits until it can share it. Among
the slots that prefill, the one with the fewest chunks left goes first (the best mean time to first token), but
one that was passed over MAX_PASSED_OVER times goes before it, oldest first, so that no prompt starves.

"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from lowlat.engine.pace import PrefillPace
from lowlat.errors import CapacityError, ConfigError, RequestError
from lowlat.sequence.book import Allocation, InvariantError, SequenceBook
from lowlat.step.chunks import chunk_counts, chunks_at_once

if TYPE_CHECKING:  # lowlat.graphs loads torch, of which this module needs nothing
    from lowlat.graphs.buckets import Bucket
    from lowlat.step.ladder import StepLadder

__all__ = [
    "MAX_PASSED_OVER",
    "Admission",
    "Phase",
    "PrefillChunk",
    "ScheduledRequest",
    "Scheduler",
    "StepPlan",
]

MAX_PASSED_OVER = 8


class Phase(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True)
class ScheduledRequest:
    """The properties of a request that scheduling needs; max_total_tokens counts prompt and completion.

    Only requests of the same cache_salt share cached prefixes. One that does not read the cache has all of its prompt
    prefilled. Its owner, where it has one, keeps its prefix when it has ended.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_total_tokens: int
    cache_salt: str = ""
    reads_cache: bool = True
    owner: Hashable = None


@dataclass(frozen=True)
class Admission:
    """A request that got a slot, its blocks by position, and how much of its prompt they hold already."""

    request_id: str
    slot: int
    table: list[int]
    num_cached_tokens: int


@dataclass(frozen=True)
class PrefillChunk:
    """One chunk to run, or several of one prompt: positions [start, start + num_tokens), of `size` in whole chunks.

    last  the prompt ends with it: its first token comes out of it
    """

    request_id: str
    slot: int
    start: int
    size: int
    num_tokens: int
    last: bool


@dataclass(frozen=True)
class StepPlan:
    """The work before the next decode step, in this order.

    admitted   requests that got a slot
    prefill    chunks of one request at most; call `Scheduler.prefill_done` with them when they are launched
    """

    admitted: tuple[Admission, ...]
    prefill: PrefillChunk | None

    def __bool__(self) -> bool:
        return bool(self.admitted or self.prefill)


@dataclass(eq=False, slots=True)
class _Slot:
    request: ScheduledRequest
    number: int
    order: int
    table: list[int]
    next_start: int
    phase: Phase = Phase.PREFILLING
    passed_over: int = 0


class Scheduler:
    """The queue and the slots of one runtime.

    ladder              the buckets; its largest batch must be at least max_batch
    kvcache             the book of what requests keep between steps
    max_queue           requests that may wait beyond those that free slots take; more raise CapacityError
    max_prefill_chunks  chunks of one prompt that run at once, at most
    max_stall_ms        how long chunks may run at once while others decode; `pace` learns how many that are
    num_overprovision   positions that a step may write past a request's total; None: the ladder's most rows

    Not safe for use by several threads. Raises ConfigError for sizes that do not fit each other.
    """

    def __init__(
        self,
        ladder: "StepLadder",
        kvcache: SequenceBook,
        max_batch: int,
        max_queue: int,
        prefill_chunk: int,
        *,
        max_prefill_chunks: int = 1,
        max_stall_ms: float = 25.0,
        num_overprovision: int | None = None,
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
        self.max_prefill_chunks = max_prefill_chunks
        self.pace = PrefillPace(max_stall_ms)
        self._chunk_counts = chunk_counts(max_prefill_chunks)
        self.num_overprovision = max(ladder.rows_of.values()) if num_overprovision is None else num_overprovision
        self._queue: deque[ScheduledRequest] = deque()
        self._slots: list[_Slot | None] = [None] * max_batch
        self._requests: dict[str, _Slot | None] = {}  # None: queued
        self._num_admitted = 0
        self._pending: PrefillChunk | None = None
        self._refused: tuple[ScheduledRequest, int] | None = None  # the head, and the cache it did not fit into

    @property
    def num_active(self) -> int:
        """Slots that decode."""
        return sum(slot is not None and slot.phase is Phase.DECODING for slot in self._slots)

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused: the queue and the free slots are taken."""
        return len(self._queue) >= self.max_queue + self._slots.count(None)

    @property
    def num_queued(self) -> int:
        """Requests without a slot."""
        return len(self._queue)

    @property
    def busy(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `plan` may have anything to do now: a chunk to prefill, or a slot for the head of the queue."""
        if any(slot is not None and slot.phase is Phase.PREFILLING for slot in self._slots):
            return True
        if not self._queue or None not in self._slots:
            return False
        return self._refused != (self._queue[0], self.kvcache.generation)

    def phase(self, request_id: str) -> Phase:
        """Where a request is. Raises RequestError for one that is unknown or has ended."""
        slot = self._find(request_id)
        return Phase.QUEUED if slot is None else slot.phase

    def slot(self, request_id: str) -> int | None:
        """The slot of a request; None while it is queued. Raises RequestError as `phase` does."""
        slot = self._find(request_id)
        return None if slot is None else slot.number

    def enqueue(self, request: ScheduledRequest) -> None:
        """Put a request at the end of the queue. Raises what `check` does."""
        self.check(request)
        self._queue.append(request)
        self._requests[request.request_id] = None

    def check(self, request: ScheduledRequest) -> None:
        """Refuse a request that cannot be queued now.

        Raises CapacityError when the queue is full; RequestError for an id in use, an empty prompt, a total
        that leaves no room for a token, or a worst case larger than the KV pool.
        """
        name, num_tokens = request.request_id, len(request.prompt_token_ids)
        if name in self._requests:
            raise RequestError(f"request {name} exists already")
        if not num_tokens:
            raise RequestError(f"request {name} has an empty prompt")
        if request.max_total_tokens <= num_tokens:
            raise RequestError(
                f"request {name}: max_total_tokens {request.max_total_tokens} leaves no token after a prompt "
                f"of {num_tokens}"
            )
        self.kvcache.check(name, request.max_total_tokens, self.num_overprovision)
        if self.is_full:
            raise CapacityError(
                f"{len(self._queue)} requests wait already, all {self.max_batch} slots counted; "
                f"the limit is {self.max_queue} (max_queue)"
            )

    def plan(self) -> StepPlan:
        """Admit what fits, and choose one chunk. Time: slots, and what the book's `admit` takes.

        Raises InvariantError when the chunk of the plan before was not reported by `prefill_done`.
        """
        if self._pending is not None:
            raise InvariantError(f"request {self._pending.request_id}: its last chunk was not reported as done")
        admitted = self._admit()
        self._pending = chunk = self._next_chunk()
        if chunk is not None:
            self.kvcache.append(chunk.request_id, chunk.start, chunk.start + chunk.num_tokens)
        return StepPlan(tuple(admitted), self._pending)

    def prefill_done(self, chunk: PrefillChunk) -> None:
        """Say that the planned chunk is launched: its KV may be shared, and after the last one its slot
        decodes.

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
    ) -> Phase:
        """Take a request out wherever it is, ended or not; return its phase.

        The other arguments are those of `SequenceBook.release`.
        The device must write to its blocks no more. Raises RequestError for one that is unknown or was taken out.
        """
        slot = self._find(request_id)
        if slot is None:
            self._queue.remove(next(waiting for waiting in self._queue if waiting.request_id == request_id))
            del self._requests[request_id]
            return Phase.QUEUED
        self._leave(slot)
        self.kvcache.release(
            request_id, token_ids, num_written=num_written, poisoned=poisoned, owner=slot.request.owner
        )
        return slot.phase

    def choose_bucket(self, num_speculative_tokens: int) -> "Bucket":
        """The smallest bucket for the decoding slots. Raises ConfigError for a depth without one."""
        return self.ladder.choose(self.num_active, num_speculative_tokens)

    def invariants(self) -> None:
        """Check slots, queue and KV against each other. Raises InvariantError naming what does not fit."""
        problems = []
        queued = [request.request_id for request in self._queue]
        slotted = [slot.request.request_id for slot in self._slots if slot is not None]
        if len({*queued, *slotted}) != len(queued) + len(slotted) or {*queued, *slotted} != set(self._requests):
            problems.append(f"{len(self._requests)} requests: {len(queued)} queued, {len(slotted)} in slots")
        if len(queued) > self.max_queue + self.max_batch:
            problems.append(f"{len(queued)} requests wait; the limit is {self.max_queue}")
        for number, slot in enumerate(self._slots):
            if slot is None:
                continue
            name = slot.request.request_id
            if slot.number != number or self._requests.get(name) is not slot:
                problems.append(f"slot {number} and request {name} do not point at each other")
            if (slot.phase is Phase.PREFILLING) != (self._num_chunks_left(slot) > 0):
                problems.append(f"request {name} is {slot.phase} with {self._num_chunks_left(slot)} chunks left")
            if slot.passed_over > MAX_PASSED_OVER + self.max_batch:
                problems.append(f"request {name} was passed over {slot.passed_over} times")
        if {*slotted} != {name for name in self._requests if name in self.kvcache} or len(self.kvcache) != len(slotted):
            problems.append(f"{len(slotted)} requests in slots, {len(self.kvcache)} hold KV blocks")
        if problems:
            raise InvariantError("; ".join(problems))
        self.kvcache.invariants()

    def _find(self, request_id: str) -> _Slot | None:
        if request_id not in self._requests:
            raise RequestError(f"request {request_id} is unknown or has ended")
        return self._requests[request_id]

    def _leave(self, slot: _Slot) -> None:
        request_id = slot.request.request_id
        self._slots[slot.number] = None
        del self._requests[request_id]
        if self._pending is not None and self._pending.request_id == request_id:
            self._pending = None

    def _admit(self) -> list[Admission]:
        admitted = []
        place = 0  # of the first that may be admitted
        while place < len(self._queue) and None in self._slots:
            request = self._queue[place]
            if request.reads_cache and self.kvcache.is_coming(request.prompt_token_ids, request.cache_salt):
                place += 1  # what it would prefill is being prefilled for another
                continue
            allocation = self._allocate(request)
            if allocation is None:
                break
            del self._queue[place]
            number = self._slots.index(None)
            cached = allocation.num_cached_tokens
            slot = _Slot(request, number, self._num_admitted, allocation.table, next_start=cached)
            self._num_admitted += 1
            self._slots[number] = self._requests[request.request_id] = slot
            admitted.append(Admission(request.request_id, number, allocation.table, cached))
        return admitted

    def _allocate(self, request: ScheduledRequest) -> Allocation | None:
        """Ask the cache, but not again before something changed there: asking digests the prefix."""
        if self._refused is not None and self._refused == (request, self.kvcache.generation):
            return None
        generation = self.kvcache.generation  # before it is asked: what comes meanwhile is worth another try
        allocation = self.kvcache.admit(
            request.request_id,
            request.prompt_token_ids,
            request.max_total_tokens,
            self.num_overprovision,
            request.cache_salt,
            reads=request.reads_cache,
        )
        self._refused = (request, generation) if allocation is None else None
        return allocation

    def _num_chunks_left(self, slot: _Slot) -> int:
        return max(0, -(-(len(slot.request.prompt_token_ids) - slot.next_start) // self.prefill_chunk))

    def _next_chunk(self) -> PrefillChunk | None:
        waiting = [slot for slot in self._slots if slot is not None and slot.phase is Phase.PREFILLING]
        if not waiting:
            return None
        overdue = [slot for slot in waiting if slot.passed_over >= MAX_PASSED_OVER]
        if overdue:
            chosen = min(overdue, key=lambda slot: slot.order)
        else:
            chosen = min(waiting, key=lambda slot: (self._num_chunks_left(slot), slot.order))
        for slot in waiting:
            slot.passed_over = 0 if slot is chosen else slot.passed_over + 1
        return self._chunk(chosen)

    def _chunk(self, slot: _Slot) -> PrefillChunk:
        start, num_tokens = slot.next_start, len(slot.request.prompt_token_ids)
        most = min(self.pace.num_chunks, self.max_prefill_chunks) if self.num_active else self.max_prefill_chunks
        size = chunks_at_once(self._num_chunks_left(slot), most, self._chunk_counts) * self.prefill_chunk
        end = start + size
        return PrefillChunk(
            request_id=slot.request.request_id,
            slot=slot.number,
            start=start,
            size=size,
            num_tokens=min(end, num_tokens) - start,
            last=end >= num_tokens,
        )
