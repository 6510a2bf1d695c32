"""This module is the state machine of launches under way: how many there are, and what may follow them.

It counts entries of the ring, of which every step publishes one. What it decides is carried out by
`lowlat.engine.launches.launches`. All launches run on one stream, one after the other.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Generic, TypeVar

from lowlat.errors import DeviceError, LowlatError

__all__ = ["MAX_LAUNCHES", "Action", "InFlight", "is_step_certain"]

Kind = TypeVar("Kind", bound=Hashable)
MAX_LAUNCHES = 2  # under way: with one more queued after the step that runs, the device never waits for the host


class Action(Enum):
    """An action on the launches under way."""

    LAUNCH = "launch"  # queue the step that is wanted, if it is certain, then wait
    WAIT = "wait"  # for the next entry
    DRAIN = "drain"  # end a loop, and wait for every entry


def is_step_certain(num_remaining: Sequence[int], *, queued: bool) -> bool:
    """Whether another step follows all that is under way, whatever that brings.

    num_remaining  tokens that each request in a slot may still get if all that is under way brings the most it can
    queued         whether other requests wait for a slot
    No step follows where all requests may have ended by their length, or where one has and another waits for its slot.
    A stop id or string cannot be foreseen: where it ends the last request, one step runs for no request.
    """
    return max(num_remaining) > 0 and (min(num_remaining) > 0 or not queued)


class InFlight(Generic[Kind]):
    """The launches whose entries have not all been seen.

    num_entries  entries of the ring; a loop gets half of them at most, so that the next loop can be queued before the
                 host has read all of the last one's
    num_seen     entries seen so far, in all
    bucket       of the last launch; None before the first

    At most two steps or two loops are under way, the second after the first, or a loop after a step. A loop may end
    with fewer steps than it was given. After `close` nothing may be launched, and what is under way can be seen.
    """

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._ends: deque[int] = deque()  # for each launch under way, the entries there are when it has ended, at most
        self._last = 0  # entries seen at the last launch
        self._is_loop = self._is_stopping = self._is_closed = False
        self.num_seen = 0
        self.bucket: Kind | None = None

    @property
    def num_steps(self) -> int:
        """Steps under way; of loops, the most that there can be."""
        return self._ends[-1] - self.num_seen if self._ends else 0

    @property
    def num_launches(self) -> int:
        """Steps or loops under way."""
        return len(self._ends)

    @property
    def under_way(self) -> bool:
        """Whether entries are still to come."""
        return bool(self._ends)

    @property
    def in_loop(self) -> bool:
        """Whether a loop is under way, told to stop or not."""
        return self._is_loop and bool(self._ends)

    @property
    def looping(self) -> bool:
        """Whether a loop is under way that was not told to stop."""
        return self.in_loop and not self._is_stopping

    def may_launch(self, bucket: Kind) -> bool:
        """Whether a launch in this bucket may be queued after what is under way.

        A loop is followed in its own bucket only, in the second half of its steps, and not when it was told to stop.
        """
        if self._is_closed or len(self._ends) >= MAX_LAUNCHES:
            return False
        if not self.in_loop:
            return True
        return not self._is_stopping and bucket == self.bucket and self.num_steps <= self._num_entries // 4

    def action(self, wanted: Kind | None, *, ahead: bool) -> Action:
        """The next action, where something is under way.

        wanted  the bucket of the step that is wanted next; None: none is, or a request must join before
        ahead   whether steps may be launched before the entries of those ahead of them were seen
        """
        if not ahead or (self.in_loop and wanted != self.bucket):
            return Action.DRAIN
        return Action.LAUNCH if wanted is not None and self.may_launch(wanted) else Action.WAIT

    def loop_budget(self, num_unread: int, max_steps: int | None = None) -> int:
        """Steps that a loop launched now may run: half of the ring, and what the ring has capacity for, at most.

        num_unread  entries that were seen and may not be overwritten yet
        max_steps   a bound of the caller's; None: there is none
        """
        budget = min(self._num_entries // 2, self._num_entries - num_unread - self.num_steps)
        return max(0, budget if max_steps is None else min(budget, max_steps))

    def launched(self, bucket: Kind, budget: int = 0) -> None:
        """Record a launch: of a loop of so many steps at most, or of one step, where the budget is 0.

        Raises LowlatError for a launch that `may_launch` refuses, and for a step after a loop.
        """
        if not self.may_launch(bucket) or (self.in_loop and not budget):
            raise LowlatError(f"a launch in {bucket} may not follow {self.num_steps} steps under way in {self.bucket}")
        self._ends.append(self.num_seen + self.num_steps + (budget or 1))
        self._last, self.bucket = self.num_seen, bucket
        self._is_loop, self._is_stopping = budget > 0, False

    def awaited(self, *, every: bool) -> int:
        """The number of entries to wait for: the next one, or every one. What is under way may end with fewer."""
        return self._ends[-1] if every and self._ends else self.num_seen + bool(self._ends)

    def saw(self, num_seen: int, *, ended: bool = False) -> None:
        """Record how many entries were seen in all, and whether all loops have ended with them.

        Raises DeviceError for entries that were not launched, and for a loop that has ended without a step.
        """
        if not self.num_seen <= num_seen <= self.num_seen + self.num_steps:
            raise DeviceError(
                f"{num_seen} entries were published, where {self.num_seen} were seen and {self.num_steps} are under way"
            )
        if ended and num_seen == self._last:
            raise DeviceError(f"a loop on the device has ended without a step ({self.bucket})")
        self.num_seen = num_seen
        while self._ends and (ended or self._ends[0] <= num_seen):
            self._ends.popleft()

    def stop(self) -> bool:
        """End loops soon; returns whether the device must be told. A queued loop still runs a step."""
        must_tell = self.looping
        self._is_stopping = self._is_stopping or must_tell
        return must_tell

    def close(self) -> bool:
        """Refuse launches from here on, and `stop`."""
        self._is_closed = True
        return self.stop()
