"""These records are what scheduling needs to know of a request, and what it decides."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lowlat.sequence.book import MovedIn, MovedOut

__all__ = ["Admission", "Departure", "Phase", "PrefillChunk", "ScheduledRequest", "Slot", "StepPlan"]


class Phase(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    PAUSED = "paused"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True)
class ScheduledRequest:
    """The properties of a request that scheduling needs; max_total_tokens counts prompt and completion.

    Only requests of the same cache_salt share cached prefixes. One that does not read the cache has all of its prompt
    prefilled. A higher priority goes first. The tokens of an open prompt are a list that grows. Its owner, where it has
    one, keeps its prefix when it has ended.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_total_tokens: int
    cache_salt: str = ""
    reads_cache: bool = True
    owner: Hashable = field(default=None, kw_only=True)
    priority: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class Admission:
    """A request that got a slot, its blocks by position, and how much of its prompt they hold already.

    resumes   it has decoded before: its slot's rows are to be written
    moved_in  its blocks had left the device: their contents are to be written to these places
    """

    request_id: str
    slot: int
    table: list[int]
    num_cached_tokens: int
    resumes: bool = False
    moved_in: MovedIn | None = None


@dataclass(frozen=True)
class Departure:
    """A request that left its slot before its end. One that decoded comes back with its slot's rows, which are to be
    read; another one begins again."""

    request_id: str
    slot: int
    decoded: bool


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

    departed   requests that gave their slots to others
    moved_out  requests whose blocks are others' from here on, and which these were: their contents are to be read
    admitted   requests that got a slot
    prefill    chunks of one request at most; call `Scheduler.prefill_done` with them when they are launched
    """

    admitted: tuple[Admission, ...]
    prefill: PrefillChunk | None
    departed: tuple[Departure, ...] = ()
    moved_out: tuple[tuple[str, MovedOut], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.admitted or self.prefill or self.departed or self.moved_out)


@dataclass(eq=False, slots=True)
class Slot:
    """A request in a slot: the blocks by position, where its next chunk starts, and how often it was passed over."""

    request: ScheduledRequest
    number: int
    order: int
    table: list[int]
    next_start: int
    phase: Phase = Phase.PREFILLING
    passed_over: int = 0
