"""SpecPV's part of a runtime: refreshes where they are due, and how many steps may be launched before one can be.

A refresh runs a slot's last tokens over all of its cache. It knows the schedule of
`lowlat.host.memory.partial`, and nothing of what a list holds. Where SpecPV is off nothing here does anything.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lowlat.host.mailbox import Mailbox
from lowlat.host.memory.partial import PartialSlots
from lowlat.host.run_ahead import Launches
from lowlat.host.scheduler import Phase, Scheduler
from lowlat.host.session import Session
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
        self._geometry, self._scheduler = geometry, scheduler
        self._mailbox, self._launches, self._sessions = mailbox, launches, sessions

    def prefill(self, session: Session, tokens: Sequence[int], start: int) -> None:
        """Write a prompt's chunk, from position `start` on, and what SpecPV adds: its slot attends to everything."""
        self._mailbox.write_chunk(session.slot, tokens, start, session.table)
        if self._is_on:
            self.slots.join(session.slot, len(session.prompt))
            self._mailbox.write_partial((start, start + len(tokens)), self.slots.shifts)

    def run(self, depth: int) -> int | None:
        """Refresh the slots for which that is due; nothing may be under way. Returns `num_certain`, which is then 1 at
        the least. Raises DeviceError."""
        for slot, length in self._lengths().items():
            if self.slots.is_due(slot, length):
                session, found = self._sessions[slot], self.slots.refresh(slot, length)
                tokens = session.committed[found.start :]
                self._mailbox.write_chunk(slot, tokens, found.start, session.table)
                self._mailbox.write_partial((found.span, length), self.slots.shifts)
                self._launches.prefill(self._geometry.refresh_size, None)
        return self.num_certain(depth)

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """Steps of a depth that may be launched now before a refresh can be due; None: any number.

        num_unread  steps that were seen, of which no request has taken its tokens yet
        """
        if not self._is_on:
            return None
        most = self._scheduler.ladder.rows_of.get(depth, self._geometry.max_rows)
        return self.slots.num_certain(self._lengths(), most, num_unread + self._launches.num_under_way)

    def count_step(self, session: Session) -> None:
        """A publication of a request is about to be taken; its first token is no step's."""
        if self._is_on and session.has_begun:
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
