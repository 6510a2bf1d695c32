"""This module is SpecPV's proposer: it says when a slot is refreshed, and what partial steps have proposed.

A refresh runs a slot's last tokens over all of its cache. When it is due `lowlat.sequence.partial` says. Lossy SpecPV
proposes nothing: tokens of its partial steps are final.
"""

from typing import Any

from lowlat.engine.drafting.proposer import Proposer, StepParts
from lowlat.engine.mailbox.grammar_words import NEVER
from lowlat.engine.mailbox.publications import SlotPublication
from lowlat.engine.requests.request import FROM_PART, Request
from lowlat.engine.scheduling.records import Phase
from lowlat.graphs import Bucket
from lowlat.models.partial_kv import PartialKV
from lowlat.sequence.partial import PartialSlots
from lowlat.step.variants import REFRESH

__all__ = ["Refreshes"]


class Refreshes(Proposer):
    """Refreshes of one runtime's slots, by SpecPV's sizes; `slots` is the schedule."""

    def __init__(self, parts: StepParts, sizes: PartialKV) -> None:
        super().__init__(parts)
        geometry = parts.geometry
        self.slots = PartialSlots(sizes, geometry.max_batch, geometry.max_rows)
        self._is_lossless = sizes.lossless
        self._verifying: set[int] = set()  # slots whose proposals the step that was launched last verifies
        self._geometry, self._scheduler = geometry, parts.scheduler
        self._mailbox, self._launches, self._requests = parts.mailbox, parts.launches, parts.slots

    def prefill(self, request: Request, start: int, count: int) -> None:
        """Write the span of new keys, and what the lists of all slots leave out: this slot's nothing."""
        self.slots.join(request.slot, len(request.prompt))
        self._mailbox.prefill.write_partial((start, start + count), self.slots.shifts, start)

    def _run(self, depth: int) -> int | None:
        """Refresh the slots for which that is due; nothing may be under way. Returns `num_certain`, which is then 1 at
        the least. Raises DeviceError."""
        for slot, length in self._lengths().items():
            if self.slots.is_due(slot, length):
                request, found = self._requests[slot], self.slots.refresh(slot, length)
                tokens = request.committed[found.start : found.start + found.count]
                self._mailbox.prefill.write_chunk(slot, tokens, found.start, request.commands)
                span = found.span, found.start + found.count
                self._mailbox.prefill.write_partial(span, self.slots.shifts, found.start)
                self._launches.prefill(REFRESH, None)
        return self.num_certain(depth)

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """Steps that may be launched now before a refresh, or a verification, can be due."""
        if self._verifying:
            return 0
        num_more = num_unread + self._launches.in_flight.num_steps
        return self.slots.num_certain(self._lengths(), self._most(depth), num_more)

    def next_step(self, depth: int) -> tuple[Bucket, int | None]:
        """Verify all slots' proposals where one's must be; elsewhere the slots for which that is due are refreshed.

        Raises DeviceError when the device has failed.
        """
        self._verifying.clear()
        if self._verify(self._most(depth)):
            return self._scheduler.ladder.choose_wide(self._scheduler.num_active), 1
        return self._scheduler.choose_bucket(depth), self._run(depth)

    def _most(self, depth: int) -> int:
        """Tokens that a step of a depth brings a slot, at most."""
        return self._scheduler.ladder.rows_of.get(depth, self._geometry.max_rows)

    def _verify(self, most: int) -> bool:
        lengths = self._lengths() if self._is_lossless else {}
        if not any(self.slots.must_verify(slot, most) for slot in lengths):
            return False
        for slot, tokens in self.slots.proposals().items():
            if slot in lengths:
                if self._requests[slot].params.max_draft_tokens is not None:
                    self._mailbox.set_draft_limit(slot, None)  # its own is of drafts, and not of what is proposed
                self._mailbox.rewind(slot, lengths[slot])
                self._mailbox.grammars.force_drafts(slot, tokens, NEVER)
                self._verifying.add(slot)
        return True

    def committed(self, request: Request, publication: SlotPublication) -> SlotPublication | None:
        """Count a step, keep its tokens back where they are proposals, and record what a verification has accepted."""
        slot = request.slot
        if not request.has_begun:
            return publication
        if not self._is_lossless:
            request.num_partial_steps += self.slots.count_step(slot)
            return publication
        if slot in self._verifying:
            self._mailbox.grammars.force_drafts(slot, (), NEVER)
            if request.params.max_draft_tokens is not None:
                self._mailbox.set_draft_limit(slot, request.params.max_draft_tokens)
            self.slots.verified(slot, publication.accepted)
            return publication._replace(verified_source=FROM_PART)
        ended = publication.finish_reason is not None
        is_proposed = self.slots.propose(slot, publication.token_ids, ended=ended)
        self.slots.count_step(slot)
        return None if is_proposed else publication

    def leave(self, request: Request) -> object:
        """A slot's schedule, with what it proposes."""
        self._verifying.discard(request.slot)
        return self.slots.take_out(request.slot)

    def enter(self, request: Request, kept: object) -> None:
        """Go on by the schedule that another slot had."""
        self.slots.put_in(request.slot, kept)

    def report(self) -> dict[str, Any]:
        """A block `specpv` of counts, as JSON."""
        return self.slots.report()

    def _lengths(self) -> dict[int, int]:
        """Tokens of the requests that decode, by slot."""
        phase, requests = self._scheduler.phase, self._requests.items()
        return {slot: len(each.committed) for slot, each in requests if phase(each.request_id) is Phase.DECODING}
