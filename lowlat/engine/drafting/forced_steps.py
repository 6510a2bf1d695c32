"""This module chooses wide steps when a request's grammar forces a long text.

If a grammar allows only one text, as between two values of JSON, its tokens are the slot's drafts. A step of the usual
draft length verifies the first of them; a wide one verifies 15 or 31. A step's tokens decide which text is forced next.
So while a grammar may force a long text, the engine launches no step before it has seen the last one's outcome:
otherwise the step would have the usual rows. The engine does not wait for a request whose grammar has forced no long
text for some steps, or which still reasons.
"""

from typing import Any

from lowlat.engine.drafting.proposer import Proposer
from lowlat.engine.mailbox.publications import Entry, SlotPublication
from lowlat.engine.requests.request import Request
from lowlat.graphs import Bucket
from lowlat.kernels.reference.step.publish import ACCEPTED, FINISH, LENGTH_AFTER, SLOT, VERIFIED, VERIFIED_SOURCE
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS
from lowlat.step.variants import PROPOSED, WIDE

__all__ = ["ForcedSteps"]

# Llama-8B's shape on one H200: a step of 32 rows takes a third longer than one of 16. One of 16 takes no longer than
# one of 8 that drafts 7. A slot gets 3 to 5 tokens from a usual step: two more should pay for either.
GAIN = 2  # further tokens that a wider step must verify for each slot
PATIENCE = 16  # after so many steps of a slot without a long forced text, steps are launched ahead again
SHARE = 0.5  # least accepted share of a long forced text; below it, the slot causes no wide step for PATIENCE steps


class ForcedSteps(Proposer):
    """Chooses wide steps by forced text; leaves all other choices to another proposer of the same runtime."""

    def __init__(self, other: Proposer) -> None:
        super().__init__(other.parts)
        self._other = other
        ladder = self.parts.scheduler.ladder
        self._variant = WIDE if ladder.wide_steps(1, WIDE) else PROPOSED
        self._lengths: dict[int, int] = {}  # by running slot: its committed tokens
        self._idle: dict[int, int] = {}  # by slot: its steps since a long text was forced
        self._refused: dict[int, int] = {}  # by slot: further steps that it may not make wide
        self._steps = self._slot_steps = self._tokens = 0

    def prefill(self, request: Request, start: int, count: int) -> None:
        """See `Proposer`; forget the slot's earlier request."""
        self._forget(request.slot)
        self._other.prefill(request, start, count)

    def observe(self, entry: Entry) -> None:
        """Record the slots' committed lengths, and how much of their forced text was accepted."""
        bucket = self.parts.launches.in_flight.bucket
        is_wide = bucket is not None and bucket.variant in (WIDE, PROPOSED)
        found = 0
        for record in self.parts.outcomes(entry):
            slot = record[SLOT]
            self._lengths[slot] = record[LENGTH_AFTER]
            if record[FINISH]:
                self._forget(slot)
                continue
            accepted, verified = record[ACCEPTED], record[VERIFIED]
            self._refused[slot] = max(0, self._refused.get(slot, 0) - 1)
            if record[VERIFIED_SOURCE] != FORCED_DRAFTS or verified < GAIN:
                self._idle[slot] = self._idle.get(slot, 0) + 1
                continue
            self._idle[slot] = 0
            if accepted < SHARE * verified:
                self._refused[slot] = PATIENCE
            found += is_wide
            self._tokens += (accepted + 1) * is_wide
        self._slot_steps += found
        self._steps += found > 0
        self._other.observe(entry)

    def bucket(self, depth: int, num_active: int) -> Bucket:
        """The widest bucket whose rows pay for the forced tokens; else the other proposer's."""
        best = self._other.bucket(depth, num_active)
        if best.variant or not self._may_widen(depth):
            return best
        forced = self._forced()
        for wide in self.parts.scheduler.ladder.wide_steps(num_active, self._variant) if forced else ():
            gain = _verified(forced, wide) - _verified(forced, best)
            lost = max(0, best.num_speculative_tokens - wide.num_speculative_tokens)  # drafts that the next step lacks
            if gain >= (GAIN + lost) * num_active:
                best = wide
        return best

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """0 if a long text may be forced and the last step's outcome is unknown; else the other proposer's answer."""
        in_flight = self.parts.launches.in_flight
        if in_flight.under_way and self._may_widen(depth):
            bucket = in_flight.bucket
            if any(map(self._may_force, self._lengths)) or (bucket is not None and bucket.variant == self._variant):
                return 0
        return self._other.num_certain(depth, num_unread)

    def committed(self, request: Request, publication: SlotPublication) -> SlotPublication | None:
        """Return the other proposer's answer."""
        return self._other.committed(request, publication)

    def leave(self, request: Request) -> object:
        """Forget the slot, and return what the other proposer keeps; the count of idle steps begins again."""
        self._forget(request.slot)
        return self._other.leave(request)

    def enter(self, request: Request, kept: object) -> None:
        """See `Proposer`; the length is that of the committed tokens."""
        self._lengths[request.slot] = len(request.committed)
        self._other.enter(request, kept)

    def end(self, request: Request) -> None:
        """See `Proposer`; forget the slot."""
        self._forget(request.slot)
        self._other.end(request)

    def report(self) -> dict[str, Any]:
        """The other proposer's blocks, and a block `forced_verification` of wide steps with forced text, as JSON."""
        if not self._steps:
            return self._other.report()
        found = {"steps": self._steps, "slot_steps": self._slot_steps, "tokens": self._tokens}
        return {**self._other.report(), "forced_verification": found}

    def _may_widen(self, depth: int) -> bool:
        """Whether the draft length allows wide steps: 0, where drafts were possible, asks for steps of one row."""
        return depth > 0 or max(self.parts.scheduler.ladder.rows_of) == 0

    def _may_force(self, slot: int) -> bool:
        """Whether a grammar may force a long text after the slot's next tokens."""
        request = self.parts.slots.get(slot)
        if request is None or request.grammar is None or request.draft_limit == 0 or self._refused.get(slot, 0):
            return False
        if self._idle.get(slot, 0) >= PATIENCE and self._num_forced(slot) < GAIN:
            return False
        return request.grammar.active and not request.grammar.terminated

    def _forced(self) -> list[int]:
        """The number of forced tokens of each slot that has a long forced text."""
        counts = (self._num_forced(slot) for slot in self._lengths if not self._refused.get(slot, 0))
        return [count for count in counts if count >= GAIN]

    def _num_forced(self, slot: int) -> int:
        """The number of a slot's forced tokens, as far as its request's draft limit allows."""
        request = self.parts.slots.get(slot)
        if request is None:
            return 0
        count, limit = self.parts.mailbox.grammars.num_forced(slot, self._lengths[slot]), request.draft_limit
        return count if limit is None else min(count, limit)

    def _forget(self, slot: int) -> None:
        self._lengths.pop(slot, None)
        self._idle.pop(slot, None)
        self._refused.pop(slot, None)


def _verified(forced: list[int], bucket: Bucket) -> int:
    """The number of forced tokens that a step of the bucket verifies."""
    return sum(min(count, bucket.rows - 1) for count in forced)
