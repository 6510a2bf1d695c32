"""This module chooses the slot whose chunks are prefilled next, and how many run at once.

The slot with the fewest chunks left goes first, which gives the best mean time to first token. So that no prompt
starves, a slot that was passed over MAX_PASSED_OVER times goes before it, oldest first. With more slots than that the
limit is the number of slots, so that long prompts do not take every turn.
"""

from collections.abc import Sequence, Set

from lowlat.engine.scheduling.pace import PrefillPace
from lowlat.engine.scheduling.records import Phase, PrefillChunk, Slot
from lowlat.step.chunks import chunk_counts, chunks_at_once

__all__ = ["MAX_PASSED_OVER", "PrefillOrder"]

MAX_PASSED_OVER = 8


class PrefillOrder:
    """Chooses chunks for the slots of one scheduler.

    slots       by number; None: it is free
    open_names  ids of requests with open prompts
    pace        learns how many chunks may run at once while others decode
    max_chunks  the most chunks of one prompt that run at once
    """

    def __init__(
        self, slots: Sequence[Slot | None], open_names: Set[str], pace: PrefillPace, prefill_chunk: int, max_chunks: int
    ) -> None:
        self._slots, self._open, self._pace = slots, open_names, pace
        self._prefill_chunk, self._max_chunks = prefill_chunk, max_chunks
        self._counts = chunk_counts(max_chunks)
        self.max_passed_over = max(MAX_PASSED_OVER, len(slots))

    def num_left(self, slot: Slot) -> int:
        """Chunks that may run; in an open prompt, those with a known token after them."""
        num_left = len(slot.request.prompt_token_ids) - slot.next_start
        if slot.request.request_id in self._open:
            return max(0, (num_left - 1) // self._prefill_chunk)
        return max(0, -(-num_left // self._prefill_chunk))

    def waiting(self) -> list[Slot]:
        """The slots that have a chunk to run."""
        prefilling = (slot for slot in self._slots if slot is not None and slot.phase is Phase.PREFILLING)
        return [slot for slot in prefilling if slot.request.request_id not in self._open or self.num_left(slot)]

    def next_chunk(self, *, decodes: bool) -> PrefillChunk | None:
        """The chunk to run next; decodes: whether other requests decode."""
        waiting = self.waiting()
        if not waiting:
            return None
        overdue = [slot for slot in waiting if slot.passed_over >= self.max_passed_over]
        if overdue:
            chosen = min(overdue, key=lambda slot: slot.order)
        else:
            chosen = min(waiting, key=lambda slot: (self.num_left(slot), slot.order))
        for slot in waiting:
            slot.passed_over = 0 if slot is chosen else slot.passed_over + 1
        most = min(self._pace.num_chunks, self._max_chunks) if decodes else self._max_chunks
        return self._chunk(chosen, most)

    def _chunk(self, slot: Slot, most: int) -> PrefillChunk:
        start, num_tokens = slot.next_start, len(slot.request.prompt_token_ids)
        size = chunks_at_once(self.num_left(slot), most, self._counts) * self._prefill_chunk
        end = start + size
        return PrefillChunk(
            request_id=slot.request.request_id,
            slot=slot.number,
            start=start,
            size=size,
            num_tokens=min(end, num_tokens) - start,
            last=end >= num_tokens and slot.request.request_id not in self._open,
        )
