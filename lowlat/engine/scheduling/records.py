"""This module has the scheduler's records: the properties of requests that it reads, and its decisions."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lowlat.sequence.book import MovedIn, MovedOut

__all__ = ["Admission", "Departure", "HeldUp", "Phase", "PrefillChunk", "ScheduledRequest", "Slot", "StepPlan"]

MOST_NAMED = 3  # requests in a line


class Phase(StrEnum):
    """The phases of a request."""

    QUEUED = "queued"
    PAUSED = "paused"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(frozen=True)
class ScheduledRequest:
    """The properties of a request that the scheduler needs; max_total_tokens counts prompt and completion.

    Only requests with the same cache_salt share cached prefixes. A request that does not read the cache prefills its
    whole prompt. Higher priorities go first. The tokens of an open prompt are a list that grows. The owner, if there is
    one, keeps the request's prefix after its end.
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

    resumes   whether it has decoded before: its slot's state must then be written
    moved_in  blocks whose contents were moved to the host, and must be written back here
    """

    request_id: str
    slot: int
    table: list[int]
    num_cached_tokens: int
    resumes: bool = False
    moved_in: MovedIn | None = None


@dataclass(frozen=True)
class Departure:
    """A request that left its slot before its end. The slot's state of a decoding request must be read, for its return;
    another request starts again."""

    request_id: str
    slot: int
    decoded: bool


@dataclass(frozen=True)
class PrefillChunk:
    """One or more chunks of one prompt to run: positions [start, start + num_tokens), or `size` in whole chunks.

    last  whether the prompt ends with it, so that its first token follows
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

    departed   requests whose slots were taken
    moved_out  requests whose blocks were taken, with these blocks: their contents must be read
    admitted   requests that got a slot
    prefill    chunks of one request, or None; call `Scheduler.prefill_done` with them when they are launched
    """

    admitted: tuple[Admission, ...]
    prefill: PrefillChunk | None
    departed: tuple[Departure, ...] = ()
    moved_out: tuple[tuple[str, MovedOut], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.admitted or self.prefill or self.departed or self.moved_out)


@dataclass(frozen=True)
class HeldUp:
    """The head of the queue waits for blocks of requests that wait for their callers, and nothing else runs.

    num_needed         KV blocks of its worst case
    num_available      blocks that are free, or hold unused prefixes
    paused             ids of paused requests with blocks on the device; they hold num_paused_blocks
    open_prompts       ids of requests in slots whose prompts are open; they hold num_open_blocks
    has_slot           whether a slot is free
    """

    request_id: str
    num_needed: int
    num_available: int
    paused: tuple[str, ...]
    num_paused_blocks: int
    open_prompts: tuple[str, ...]
    num_open_blocks: int
    has_slot: bool

    def __str__(self) -> str:
        who = [f"paused requests hold {self.num_paused_blocks} ({_names(self.paused)})"] if self.paused else []
        if self.open_prompts:
            who.append(f"open prompts hold {self.num_open_blocks} ({_names(self.open_prompts)})")
        if self.has_slot:
            lacks = f"it needs {self.num_needed} KV blocks, and {self.num_available} are free or reusable (kv_blocks)"
        else:
            lacks = "no slot is free (max_batch)"
        return f"request {self.request_id} waits, and nothing runs: {lacks}; {' and '.join(who)}"


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


def _names(request_ids: Sequence[str]) -> str:
    """The first of some ids, and how many others there are."""
    more = f" and {len(request_ids) - MOST_NAMED} more" if len(request_ids) > MOST_NAMED else ""
    return ", ".join(request_ids[:MOST_NAMED]) + more
