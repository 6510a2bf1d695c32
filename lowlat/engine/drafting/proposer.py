"""This is the interface of proposers, and the proposer of runtimes that verify drafts of the usual length alone.

A proposer chooses the bucket of the next step, says how far steps may run ahead of what it decides, and keeps back
tokens that are only proposed. `Steps` knows this interface alone; a loaded runtime hands its proposer over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowlat.engine.launches.launches import Launches
from lowlat.engine.mailbox.mailbox import Mailbox
from lowlat.engine.mailbox.publications import Entry, SlotPublication
from lowlat.engine.requests.request import Request
from lowlat.engine.scheduling.scheduler import Scheduler
from lowlat.graphs import Bucket
from lowlat.kernels.reference.step.publish import SLOT
from lowlat.step.state import StepGeometry

__all__ = ["Proposer", "StepParts"]


@dataclass(frozen=True)
class StepParts:
    """The parts of an engine that a proposer works with; `slots` has the requests by slot, those that prefill too."""

    geometry: StepGeometry
    scheduler: Scheduler
    mailbox: Mailbox
    launches: Launches
    slots: Mapping[int, Request]

    def outcomes(self, entry: Entry) -> Iterator[list[int]]:
        """The records of a step that are about the requests which the slots have now."""
        for record in entry.records:
            request = self.slots.get(record[SLOT])
            if request is not None and entry.number >= request.first_entry:
                yield record


class Proposer:
    """A source of proposals for one runtime's slots; this one has none: all steps are of the depth asked for."""

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts

    def prefill(self, request: Request, start: int, count: int) -> None:
        """Write what prefill of a prompt's positions [start, start + count) needs next to the chunk itself."""

    def observe(self, entry: Entry) -> None:
        """Learn from what a step has published, before the step after it is chosen; once for each, in order."""

    def bucket(self, depth: int, num_active: int) -> Bucket:
        """The bucket of the step that is wanted next, of so many slots, by what was observed so far."""
        return self.parts.scheduler.ladder.choose(num_active, depth)

    def next_step(self, depth: int) -> tuple[Bucket, int | None]:
        """The bucket of the next step, and how many steps like it are certain, None: any number; nothing is under way.

        depth  draft tokens that the caller wants
        It may run prefill's programs first. Raises DeviceError when the device has failed.
        """
        return self.bucket(depth, self.parts.scheduler.num_active), None

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """Steps of a depth that may be launched after those under way, whatever these bring; None: any number.

        num_unread  steps that were seen, of which no request has taken its tokens yet
        """
        return None

    def committed(self, request: Request, publication: SlotPublication) -> SlotPublication | None:
        """A publication as its request takes it; None where its tokens are proposals, yet to be verified.

        Called once for each publication of a live request, before the request takes it.
        """
        return publication

    def leave(self, request: Request) -> object:
        """A request gives its slot away before its end; returns what `enter` needs."""
        return None

    def enter(self, request: Request, kept: object) -> None:
        """A request that decoded goes on, in the slot that it has now."""

    def end(self, request: Request) -> None:
        """A request has left its slot for good."""

    def report(self) -> dict[str, Any]:
        """Figures since the load, as JSON, in a block of the source's name; empty where there are none."""
        return {}
