"""This module is SpecPV's proposer: it refreshes slots, and holds back the tokens that partial steps propose.

A refresh runs a slot's last tokens over its whole cache. `lowlat.sequence.partial` decides when it is due. Lossy SpecPV
proposes nothing: its partial steps' tokens are final.
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
    """Refreshes one runtime's slots, by SpecPV's sizes; `slots` is the schedule."""

    def __init__(self, parts: StepParts, sizes: PartialKV) -> None:
        super().__init__(parts)
        geometry = parts.geometry
        self.slots = PartialSlots(sizes, geometry.max_batch, geometry.max_rows)
        self._is_lossless = sizes.lossless
        self._verifying: set[int] = set()  # slots whose proposals the last launched step verifies
        self._geometry, self._scheduler = geometry, parts.scheduler
        self._mailbox, self._launches, self._requests = parts.mailbox, parts.launches, parts.slots

    def prefill(self, request: Request, start: int, count: int) -> None:
        """Write the span of new keys, and the shifts of all slots' lists; this slot's list leaves nothing out yet."""
        self.slots.join(request.slot, len(request.prompt))
        self._mailbox.prefill.write_partial((start, start + count), self.slots.shifts, start)

    def _run(self, depth: int) -> int | None:
        """Refresh the slots for which it is due; no launch may be in flight.

        Returns `num_certain`, which is then at least 1. Raises DeviceError.
        """
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
        """The number of steps that may be launched before a refresh or a verification can be due."""
        if self._verifying:
            return 0
        num_more = num_unread + self._launches.in_flight.num_steps
        return self.slots.num_certain(self._lengths(), self._most(depth), num_more)

    def next_step(self, depth: int) -> tuple[Bucket, int | None]:
        """If one slot's proposals must be verified, verify all slots'; else refresh the slots for which it is due.

        Raises DeviceError when the device has failed.
        """
        self._verifying.clear()
        if self._verify(self._most(depth)):
            return self._scheduler.ladder.choose_wide(self._scheduler.num_active), 1
        return self._scheduler.choose_bucket(depth), self._run(depth)

    def _most(self, depth: int) -> int:
        """The most tokens that a step of a draft length brings a slot."""
        return self._scheduler.ladder.rows_of.get(depth, self._geometry.max_rows)

    def _verify(self, most: int) -> bool:
        lengths = self._lengths() if self._is_lossless else {}
        if not any(self.slots.must_verify(slot, most) for slot in lengths):
            return False
        for slot, tokens in self.slots.proposals().items():
            if slot in lengths:
                if self._requests[slot].params.max_draft_tokens is not None:
                    self._mailbox.set_draft_limit(slot, None)  # the request's limit is for drafts, not for proposals
                self._mailbox.rewind(slot, lengths[slot])
                self._mailbox.grammars.force_drafts(slot, tokens, NEVER)
                self._verifying.add(slot)
        return True

    def committed(self, request: Request, publication: SlotPublication) -> SlotPublication | None:
        """Count a step, hold its tokens back if they are proposals, and record what a verification has accepted."""
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
        """Take out and return the slot's schedule and proposals."""
        self._verifying.discard(request.slot)
        return self.slots.take_out(request.slot)

    def enter(self, request: Request, kept: object) -> None:
        """Give the new slot the schedule of the request's earlier slot."""
        self.slots.put_in(request.slot, kept)

    def report(self) -> dict[str, Any]:
        """A block `specpv` of counts, as JSON."""
        return self.slots.report()

    def _lengths(self) -> dict[int, int]:
        """The number of committed tokens of each decoding request, by slot."""
        phase, requests = self._scheduler.phase, self._requests.items()
        return {slot: len(each.committed) for slot, each in requests if phase(each.request_id) is Phase.DECODING}
