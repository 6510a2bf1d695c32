"""This module proposes steps of a longer draft length while the drafts of the last steps were all accepted.

A speculator that fills a block in one pass makes more drafts for little more. Verifying them costs rows, so a step of
the usual draft length is the rule, and one of the longer is taken while many steps accept all that a usual one could.
Both are plain steps: each verifies what the last one drafted, as far as it has rows. So they follow each other in any
order, are launched ahead, and are repeated on the device.
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

# Of a slot's last steps, each weighing a quarter less than the one after it: the share that accepted all drafts of the
# usual length. A step of 16 rows should take some 5 % longer than one of 8: a few of them with more tokens pay for it.
BEGIN, END = 0.5, 0.25
WEIGHT = 0.25


class LongerDrafts(Proposer):
    """The choice between two draft lengths for one runtime's slots.

    usual  the draft length that requests get by default
    """

    def __init__(self, parts: StepParts, usual: int) -> None:
        super().__init__(parts)
        self._usual = usual
        self._shares: dict[int, float] = {}  # by slot
        self._long: set[int] = set()  # the slots that pay
        self._steps = self._tokens = 0

    def prefill(self, request: Request, start: int, count: int) -> None:
        """A request begins in a slot, of which nothing is known."""
        self.end(request)

    def observe(self, entry: Entry) -> None:
        """Learn from what a step accepted, of the slots whose requests it was about."""
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
        """The longer one where at least half of the slots pay, and the caller wants the usual length or more."""
        longer = self.parts.scheduler.ladder.wide_steps(num_active, PLAIN)
        if longer and depth >= self._usual and self._long and 2 * len(self._long) >= num_active:
            return longer[-1]
        return super().bucket(min(depth, self._usual), num_active)

    def leave(self, request: Request) -> object:
        """Its share."""
        share = self._shares.get(request.slot)
        self.end(request)
        return share

    def enter(self, request: Request, kept: object) -> None:
        """Go on where the other slot was."""
        if isinstance(kept, float):
            self._shares[request.slot] = kept
            if kept >= BEGIN:
                self._long.add(request.slot)

    def end(self, request: Request) -> None:
        """Its drafts say nothing of others."""
        self._shares.pop(request.slot, None)
        self._long.discard(request.slot)

    def report(self) -> dict[str, Any]:
        """A block `longer_drafts`, as JSON: steps that verified more than usual, and the tokens of their slots."""
        return {"longer_drafts": {"steps": self._steps, "tokens": self._tokens}} if self._steps else {}
