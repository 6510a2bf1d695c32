"""SpecPV's part of a runtime: refreshes where they are due, and how many steps may be launched before one can be.

A refresh runs a slot's last tokens over all of its cache. It knows the schedule of
`lowlat.sequence.partial`, and nothing of what a list holds. Where SpecPV is off nothing here does anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowlat.engine.mailbox import NEVER, Mailbox, SlotPublication
from lowlat.engine.run_ahead import Launches
from lowlat.engine.scheduler import Phase, Scheduler
from lowlat.engine.session import FROM_PART, Session
from lowlat.graphs import Bucket
from lowlat.sequence.partial import PartialSlots
from lowlat.step.state import StepGeometry

__all__ = ["Refreshes"]


class Refreshes:
    """Refreshes of one runtime's slots; `sessions` are its requests by slot, those that prefill among them."""

    def __init__(
        self,
        geometry: StepGeometry,
        scheduler: Scheduler,
        mailbox: Mailbox,
        launches: Launches,
        sessions: Mapping[int, Session],
    ) -> None:
        self.slots = PartialSlots(geometry.partial, geometry.max_batch, geometry.max_rows)
        self._is_on = geometry.partial is not None
        self._is_lossless = geometry.partial is not None and geometry.partial.lossless
        self._verifying: set[int] = set()  # slots whose proposals the step that was launched last verifies
        self._geometry, self._scheduler = geometry, scheduler
        self._mailbox, self._launches, self._sessions = mailbox, launches, sessions

    def prefill(self, session: Session, tokens: Sequence[int], start: int) -> None:
        """Write a prompt's chunk, from position `start` on, and what SpecPV adds: its slot attends to everything."""
        self._mailbox.write_chunk(session.slot, tokens, start, session.table, session.window_tables)
        if self._is_on:
            self.slots.join(session.slot, len(session.prompt))
            self._mailbox.write_partial((start, start + len(tokens)), self.slots.shifts, start)

    def _run(self, depth: int) -> int | None:
        """Refresh the slots for which that is due; nothing may be under way. Returns `num_certain`, which is then 1 at
        the least. Raises DeviceError."""
        for slot, length in self._lengths().items():
            if self.slots.is_due(slot, length):
                session, found = self._sessions[slot], self.slots.refresh(slot, length)
                tokens = session.committed[found.start : found.start + found.count]
                self._mailbox.write_chunk(slot, tokens, found.start, session.table, session.window_tables)
                span = found.span, found.start + found.count
                self._mailbox.write_partial(span, self.slots.shifts, found.start)
                self._launches.prefill(self._geometry.refresh_size, None)
        return self.num_certain(depth)

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """Steps of a depth that may be launched now before a refresh can be due; None: any number.

        num_unread  steps that were seen, of which no request has taken its tokens yet
        """
        if not self._is_on:
            return None
        if self._verifying:
            return 0
        return self.slots.num_certain(self._lengths(), self._most(depth), num_unread + self._launches.num_under_way)

    def next_step(self, depth: int) -> tuple[Bucket, int | None]:
        """The bucket of the next step, and how many like it are certain; nothing may be under way. Raises DeviceError.

        Where a slot's proposals must be verified, the step verifies all slots'; else slots that are due are refreshed.
        """
        self._verifying.clear()
        if self._verify(self._most(depth)):
            return self._scheduler.ladder.verifier(self._scheduler.num_active), 1
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
                if self._sessions[slot].params.max_draft_tokens is not None:
                    self._mailbox.set_draft_limit(slot, None)  # its own is of drafts, and not of what is proposed
                self._mailbox.rewind(slot, lengths[slot])
                self._mailbox.force_drafts(slot, tokens, NEVER)
                self._verifying.add(slot)
        return True

    def judge(self, session: Session, publication: SlotPublication) -> SlotPublication | None:
        """A request's publication as its session takes it; None where its tokens are proposals, yet to be verified."""
        slot = session.slot
        if not self._is_lossless or not session.has_begun:
            return publication
        if slot in self._verifying:
            self._mailbox.force_drafts(slot, (), NEVER)
            if session.params.max_draft_tokens is not None:
                self._mailbox.set_draft_limit(slot, session.params.max_draft_tokens)
            self.slots.verified(slot, publication.accepted)
            return publication._replace(verified_source=FROM_PART)
        ended = publication.finish_reason is not None
        if self.slots.propose(slot, publication.token_ids, ended=ended):
            self.slots.count_step(slot)
            return None
        return publication

    def count_step(self, session: Session) -> None:
        """Count the step of a publication that is about to be taken; a request's first token is not counted."""
        if self._is_lossless and session.has_begun and session.slot not in self._verifying:
            self.slots.count_step(session.slot)
        elif self._is_on and not self._is_lossless and session.has_begun:
            session.num_partial_steps += self.slots.count_step(session.slot)

    def report(self) -> dict[str, Any]:
        """A block `specpv` of counts, as JSON; empty where it is off."""
        return self.slots.report()

    def _lengths(self) -> dict[int, int]:
        """Tokens of the requests that decode, by slot."""
        if not self._is_on:
            return {}
        phase, sessions = self._scheduler.phase, self._sessions.items()
        return {slot: len(each.committed) for slot, each in sessions if phase(each.request_id) is Phase.DECODING}
