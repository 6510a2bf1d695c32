"""This module proposes wide steps of a speculator's own proposals, by what was accepted of them so far.

Drafts of a cheap source that were all right, step after step, say that what comes next is right as well, further than a
step of the usual draft length reaches. A wide step makes its proposals when it opens, verifies them, and leaves out the
draft model's drafts; that model's keys and values go on. Which step is next depends on what the last one gave: while
drafts are all right nothing is launched ahead of that. A wide step publishes before its draft model's part, so the host
has launched the next one when it ends.
"""

from collections.abc import Sequence
from typing import Any

from lowlat.engine.drafting.proposer import Proposer, StepParts
from lowlat.engine.mailbox.publications import Entry
from lowlat.engine.requests.request import Request
from lowlat.graphs import Bucket
from lowlat.kernels.reference.step.publish import ACCEPTED, FINISH, SLOT, VERIFIED, VERIFIED_SOURCE
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS
from lowlat.step.variants import PROPOSED

__all__ = ["WideSteps"]

# Edits, quotations and JSON of this repository, replayed: 13.2 tokens a step inside copies with 16 rows, 21.5 with 32,
# and 7.4 at draft length 7. With 32 only after twice or four times as many tokens it were 20.6 and 19.7.
BEGIN = 8  # tokens that steps in a row brought, all of whose drafts were right: from there on a wide step should pay
SHARE = 0.5  # of a wide step's proposals, that must be right for another one to follow


class WideSteps(Proposer):
    """The choice of wide steps for one runtime's slots.

    rows    rows a slot of wide steps, ascending
    source  of the drafts that say by being right that such a step pays, by its number in `verified_source`
    """

    def __init__(self, parts: StepParts, rows: Sequence[int], source: int) -> None:
        super().__init__(parts)
        self._rows, self._source = tuple(rows), source
        self._held: dict[int, int] = {}  # by slot: tokens of the last steps, of which all drafts were right
        self._wide_steps = self._wide_tokens = self._wide_slots = 0

    def prefill(self, request: Request, start: int, count: int) -> None:
        """A request begins in a slot, of which nothing is known."""
        self._held.pop(request.slot, None)

    def observe(self, entry: Entry) -> None:
        """Learn from what a step accepted, of the slots whose requests it was about."""
        bucket = self.parts.launches.in_flight.bucket
        is_wide = bucket is not None and bucket.variant == PROPOSED
        self._wide_steps += is_wide
        for record in self.parts.outcomes(entry):
            slot, accepted, verified = record[SLOT], record[ACCEPTED], record[VERIFIED]
            self._wide_slots += is_wide
            self._wide_tokens += (accepted + 1) * is_wide
            enough = verified if not is_wide or bucket is None else min(verified, SHARE * (bucket.rows - 1))
            if record[VERIFIED_SOURCE] == FORCED_DRAFTS and accepted >= enough and not record[FINISH]:
                continue  # which says nothing of a copy
            goes_on = verified > 0 and record[VERIFIED_SOURCE] == self._source and accepted >= enough
            if goes_on and not record[FINISH]:
                self._held[slot] = self._held.get(slot, 0) + accepted + 1
            else:
                self._held.pop(slot, None)

    def bucket(self, depth: int, num_active: int) -> Bucket:
        """The widest for so many slots, where half of them copy, at the least; else the usual one."""
        num_copying = sum(held >= BEGIN for held in self._held.values())
        if depth and num_copying and 2 * num_copying >= num_active:
            wide = self.parts.scheduler.ladder.choose_proposed(num_active, self._rows[-1])
            if wide is not None:
                return wide
        return super().bucket(depth, num_active)

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """None: any number; while drafts are all right no step, until the last one's outcome was seen."""
        in_flight = self.parts.launches.in_flight
        waits = in_flight.under_way and (self._held or (in_flight.bucket is not None and _is_wide(in_flight.bucket)))
        return 0 if depth and waits else None

    def leave(self, request: Request) -> object:
        """The tokens of its last steps."""
        return self._held.pop(request.slot, 0)

    def enter(self, request: Request, kept: object) -> None:
        """Go on where the other slot was."""
        if isinstance(kept, int) and kept:
            self._held[request.slot] = kept

    def end(self, request: Request) -> None:
        """Nothing that it copied speaks for steps of others."""
        self._held.pop(request.slot, None)

    def report(self) -> dict[str, Any]:
        """A block `wide_verification`, as JSON: steps, and their slots and tokens; empty before there was one."""
        if not self._wide_steps:
            return {}
        found = {"steps": self._wide_steps, "slot_steps": self._wide_slots, "tokens": self._wide_tokens}
        return {"wide_verification": found}


def _is_wide(bucket: Bucket) -> bool:
    return bucket.variant == PROPOSED
