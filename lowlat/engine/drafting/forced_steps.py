"""This module proposes wide steps where a request's grammar forces a long text, whatever else proposes.

Where a grammar allows one text alone, as between two values of JSON, its tokens are the slot's drafts. A step of the
usual draft length verifies the first of them; a wide one verifies 15 or 31. What a step brings decides what is forced
after it. So while a long text may be forced, no step is launched before the last one's outcome was seen: it would have
the usual rows. A request whose grammar has forced nothing long for some steps holds nobody up, and neither does one
that still reasons.
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

# Llama-8B's shape on one H200: a step of 32 rows takes a third longer than one of 16, and that no longer than one of 8
# which drafts 7. A slot gets 3 to 5 tokens of a usual step: two more should pay for either.
GAIN = 2  # tokens that a wider step must verify more for each slot
PATIENCE = 16  # steps of a slot without a long forced text, from which on steps are launched ahead again
SHARE = 0.5  # of a long forced text, that must be accepted: else so many steps are not made wide for the slot


class ForcedSteps(Proposer):
    """The choice of wide steps by what is forced; other choices are those of a proposer of the same runtime."""

    def __init__(self, other: Proposer) -> None:
        super().__init__(other.parts)
        self._other = other
        ladder = self.parts.scheduler.ladder
        self._variant = WIDE if ladder.wide_steps(1, WIDE) else PROPOSED
        self._lengths: dict[int, int] = {}  # by slot that goes on: its committed tokens
        self._idle: dict[int, int] = {}  # by slot: its steps since a long text was forced
        self._refused: dict[int, int] = {}  # by slot: steps that are not made wide for it
        self._steps = self._slot_steps = self._tokens = 0

    def prefill(self, request: Request, start: int, count: int) -> None:
        """See `Proposer`; what is known of the slot is of a request before this one."""
        self._forget(request.slot)
        self._other.prefill(request, start, count)

    def observe(self, entry: Entry) -> None:
        """Learn how long the texts of slots are, and what was accepted of what was forced."""
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
        """The widest whose rows pay for what is forced; else the other's."""
        best = self._other.bucket(depth, num_active)
        if best.variant or not self._may_widen(depth):
            return best
        forced = self._forced()
        for wide in self.parts.scheduler.ladder.wide_steps(num_active, self._variant) if forced else ():
            gain = _verified(forced, wide) - _verified(forced, best)
            lost = max(0, best.num_speculative_tokens - wide.num_speculative_tokens)  # drafts of the step after it
            if gain >= (GAIN + lost) * num_active:
                best = wide
        return best

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """No step while a long text may be forced, until the last one's outcome was seen; else the other's answer."""
        in_flight = self.parts.launches.in_flight
        if in_flight.under_way and self._may_widen(depth):
            bucket = in_flight.bucket
            if any(map(self._may_force, self._lengths)) or (bucket is not None and bucket.variant == self._variant):
                return 0
        return self._other.num_certain(depth, num_unread)

    def committed(self, request: Request, publication: SlotPublication) -> SlotPublication | None:
        """As the other does."""
        return self._other.committed(request, publication)

    def leave(self, request: Request) -> object:
        """Return what the other keeps; its steps since a long text was forced are counted again."""
        self._forget(request.slot)
        return self._other.leave(request)

    def enter(self, request: Request, kept: object) -> None:
        """Go on with what is committed."""
        self._lengths[request.slot] = len(request.committed)
        self._other.enter(request, kept)

    def end(self, request: Request) -> None:
        """Nothing is forced in its slot."""
        self._forget(request.slot)
        self._other.end(request)

    def report(self) -> dict[str, Any]:
        """The other's blocks, and one `forced_verification`: wide steps that verified forced text, as JSON."""
        if not self._steps:
            return self._other.report()
        found = {"steps": self._steps, "slot_steps": self._slot_steps, "tokens": self._tokens}
        return {**self._other.report(), "forced_verification": found}

    def _may_widen(self, depth: int) -> bool:
        """Whether the caller's draft length allows it: none where there could be some asks for steps of one row."""
        return depth > 0 or max(self.parts.scheduler.ladder.rows_of) == 0

    def _may_force(self, slot: int) -> bool:
        """Whether a slot's next tokens may be followed by a long text that is forced."""
        request = self.parts.slots.get(slot)
        if request is None or request.grammar is None or request.draft_limit == 0 or self._refused.get(slot, 0):
            return False
        if self._idle.get(slot, 0) >= PATIENCE and self._num_forced(slot) < GAIN:
            return False
        return request.grammar.active and not request.grammar.terminated

    def _forced(self) -> list[int]:
        """How many tokens are forced now, of each slot of which a long text is."""
        counts = (self._num_forced(slot) for slot in self._lengths if not self._refused.get(slot, 0))
        return [count for count in counts if count >= GAIN]

    def _num_forced(self, slot: int) -> int:
        """The tokens that are forced of a slot now and that its request's limit of drafts allows."""
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
    """Tokens of what is forced that a step verifies."""
    return sum(min(count, bucket.rows - 1) for count in forced)
