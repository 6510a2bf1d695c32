"""This module chooses steps of a longer draft length while most recent steps accepted all their drafts.

A speculator that fills a block in one pass makes more drafts at little cost, but verifying them costs rows. So most
steps have the usual draft length. A longer one is chosen while many steps accept as many drafts as the usual length
has. Both are plain steps: each verifies the last one's drafts as far as it has rows. So they follow each other in any
order, can be launched ahead, and can be repeated on the device.
"""

from typing import Any

from lowlat.engine.drafting.proposer import Proposer, StepParts
from lowlat.engine.mailbox.publications import Entry
from lowlat.engine.requests.request import Request
from lowlat.graphs import Bucket
from lowlat.kernels.reference.step.publish import ACCEPTED, FINISH, SLOT, VERIFIED, VERIFIED_SOURCE
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS
from lowlat.step.variants import PLAIN

__all__ = ["LongerDrafts"]

# A slot's share is a decaying average over its steps: how many accepted all drafts of the usual length. Each step
# weighs a quarter less than the one after it. Longer drafts pay for a slot from BEGIN on until it falls below END.
# A step of 16 rows should take some 5 % longer than one of 8: a few of them with more tokens pay for it.
BEGIN, END = 0.5, 0.25
WEIGHT = 0.25


class LongerDrafts(Proposer):
    """Chooses between two draft lengths for one runtime's slots.

    usual  the draft length that requests get by default
    """

    def __init__(self, parts: StepParts, usual: int) -> None:
        super().__init__(parts)
        self._usual = usual
        self._shares: dict[int, float] = {}  # by slot
        self._long: set[int] = set()  # slots for which longer drafts pay
        self._steps = self._tokens = 0

    def prefill(self, request: Request, start: int, count: int) -> None:
        """See `Proposer`; forget the slot's earlier request."""
        self.end(request)

    def observe(self, entry: Entry) -> None:
        """Update each slot's share by what its step accepted."""
        found = 0
        for record in self.parts.outcomes(entry):
            slot, accepted, verified = record[SLOT], record[ACCEPTED], record[VERIFIED]
            if verified < self._usual or record[VERIFIED_SOURCE] == FORCED_DRAFTS:
                continue
            self._tokens += (accepted + 1) * (verified > self._usual)
            found += verified > self._usual
            share = self._shares.get(slot, 0.0)
            share += WEIGHT * ((accepted >= self._usual) - share)
            self._shares[slot] = share
            if record[FINISH] or share < END:
                self._long.discard(slot)
            elif share >= BEGIN:
                self._long.add(slot)
        self._steps += found > 0

    def bucket(self, depth: int, num_active: int) -> Bucket:
        """The longer bucket if it pays for at least half of the slots, and the caller allows the usual length."""
        longer = self.parts.scheduler.ladder.wide_steps(num_active, PLAIN)
        if longer and depth >= self._usual and self._long and 2 * len(self._long) >= num_active:
            return longer[-1]
        return super().bucket(min(depth, self._usual), num_active)

    def leave(self, request: Request) -> object:
        """Return the slot's share, and forget the slot."""
        share = self._shares.get(request.slot)
        self.end(request)
        return share

    def enter(self, request: Request, kept: object) -> None:
        """Set the new slot's share to that of the request's earlier slot."""
        if isinstance(kept, float):
            self._shares[request.slot] = kept
            if kept >= BEGIN:
                self._long.add(request.slot)

    def end(self, request: Request) -> None:
        """Forget the slot."""
        self._shares.pop(request.slot, None)
        self._long.discard(request.slot)

    def report(self) -> dict[str, Any]:
        """A block `longer_drafts`, as JSON: steps that verified more than the usual drafts, and their slots' tokens."""
        return {"longer_drafts": {"steps": self._steps, "tokens": self._tokens}} if self._steps else {}
