"""This module chooses wide steps for a speculator's own proposals, by how many of its drafts were accepted.

If all drafts of a cheap source are accepted step after step, longer proposals of it are likely to be accepted, too. A
wide step makes its proposals at its start, and verifies them. It makes no drafts with the draft model, but extends that
model's KV. While all drafts are accepted, the last step's outcome decides the next bucket, so no step is launched
ahead. A wide step publishes before its draft model's part, so the host launches the next step before it ends.
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

# Measured on replayed edits, quotations and JSON of this repository: tokens a step inside copies are 13.2 with 16 rows,
# 21.5 with 32, and 7.4 at draft length 7. With BEGIN twice or four times as large for 32 rows they are 20.6 and 19.7.
BEGIN = 8  # a wide step should pay once consecutive steps with all drafts accepted have brought a slot so many tokens
SHARE = 0.5  # least accepted share of a wide step's proposals for another wide step to follow


class WideSteps(Proposer):
    """Chooses wide steps for one runtime's slots.

    rows    rows a slot of wide steps, ascending
    source  number in `verified_source` of the drafts whose acceptance counts towards a wide step
    """

    def __init__(self, parts: StepParts, rows: Sequence[int], source: int) -> None:
        super().__init__(parts)
        self._rows, self._source = tuple(rows), source
        self._held: dict[int, int] = {}  # by slot: tokens of its last consecutive steps with all drafts accepted
        self._wide_steps = self._wide_tokens = self._wide_slots = 0

    def prefill(self, request: Request, start: int, count: int) -> None:
        """See `Proposer`; forget the slot's earlier request."""
        self._held.pop(request.slot, None)

    def observe(self, entry: Entry) -> None:
        """Update each slot's count of tokens by what its step accepted."""
        bucket = self.parts.launches.in_flight.bucket
        is_wide = bucket is not None and bucket.variant == PROPOSED
        self._wide_steps += is_wide
        for record in self.parts.outcomes(entry):
            slot, accepted, verified = record[SLOT], record[ACCEPTED], record[VERIFIED]
            self._wide_slots += is_wide
            self._wide_tokens += (accepted + 1) * is_wide
            enough = verified if not is_wide or bucket is None else min(verified, SHARE * (bucket.rows - 1))
            if record[VERIFIED_SOURCE] == FORCED_DRAFTS and accepted >= enough and not record[FINISH]:
                continue  # forced text says nothing about copies
            goes_on = verified > 0 and record[VERIFIED_SOURCE] == self._source and accepted >= enough
            if goes_on and not record[FINISH]:
                self._held[slot] = self._held.get(slot, 0) + accepted + 1
            else:
                self._held.pop(slot, None)

    def bucket(self, depth: int, num_active: int) -> Bucket:
        """The widest bucket for this number of slots if at least half of them copy; else the usual one."""
        num_copying = sum(held >= BEGIN for held in self._held.values())
        if depth and num_copying and 2 * num_copying >= num_active:
            wide = self.parts.scheduler.ladder.choose_proposed(num_active, self._rows[-1])
            if wide is not None:
                return wide
        return super().bucket(depth, num_active)

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """0 while a slot's drafts are all accepted and the last step's outcome is unknown; else None: any number."""
        in_flight = self.parts.launches.in_flight
        waits = in_flight.under_way and (self._held or (in_flight.bucket is not None and _is_wide(in_flight.bucket)))
        return 0 if depth and waits else None

    def leave(self, request: Request) -> object:
        """Take out and return the slot's count of tokens."""
        return self._held.pop(request.slot, 0)

    def enter(self, request: Request, kept: object) -> None:
        """Set the new slot's count to that of the request's earlier slot."""
        if isinstance(kept, int) and kept:
            self._held[request.slot] = kept

    def end(self, request: Request) -> None:
        """Forget the slot."""
        self._held.pop(request.slot, None)

    def report(self) -> dict[str, Any]:
        """A block `wide_verification`, as JSON: wide steps, their slots and tokens; {} before the first wide step."""
        if not self._wide_steps:
            return {}
        found = {"steps": self._wide_steps, "slot_steps": self._wide_slots, "tokens": self._wide_tokens}
        return {"wide_verification": found}


def _is_wide(bucket: Bucket) -> bool:
    return bucket.variant == PROPOSED
