"""This module has the interface of proposers, and the default proposer, whose steps have one draft length.

A proposer chooses the bucket of the next step, limits how far steps run ahead of its decisions, and withholds tokens
that are only proposals. `Steps` knows only this interface.
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
    """A source of proposals for one runtime's slots. This one has none: all steps have the requested draft length."""

    def __init__(self, parts: StepParts) -> None:
        self.parts = parts

    def prefill(self, request: Request, start: int, count: int) -> None:
        """Write further inputs for the prefill of a prompt's positions [start, start + count)."""

    def observe(self, entry: Entry) -> None:
        """Learn from a step's publications, before the next step is chosen; called once for each step, in order."""

    def bucket(self, depth: int, num_active: int) -> Bucket:
        """The bucket of the next step for a number of slots, by the publications observed so far."""
        return self.parts.scheduler.ladder.choose(num_active, depth)

    def next_step(self, depth: int) -> tuple[Bucket, int | None]:
        """The bucket of the next step, and how many steps like it are certain (None: any number).

        depth  the caller's draft length
        No launch is in flight. It may run prefill's programs first. Raises DeviceError when the device has failed.
        """
        return self.bucket(depth, self.parts.scheduler.num_active), None

    def num_certain(self, depth: int, num_unread: int = 0) -> int | None:
        """Steps of a draft length that may follow the launches in flight, whatever their results; None: any number.

        num_unread  steps whose entries were seen, but whose tokens were not given to requests yet
        """
        return None

    def committed(self, request: Request, publication: SlotPublication) -> SlotPublication | None:
        """The publication that its request takes; None if its tokens are proposals, which must be verified first.

        Called once for each publication of a live request, before the request takes it.
        """
        return publication

    def leave(self, request: Request) -> object:
        """Record that a request leaves its slot before its end; returns the argument for `enter`."""
        return None

    def enter(self, request: Request, kept: object) -> None:
        """Record that a request goes on decoding, in its new slot."""

    def end(self, request: Request) -> None:
        """Record that a request has left its slot for good."""

    def report(self) -> dict[str, Any]:
        """Figures since the load, as JSON, in a block with the source's name; empty if there are none."""
        return {}
