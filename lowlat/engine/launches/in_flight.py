"""This module is the state machine of launches in flight: how many there are, and which launch may follow them.

It counts entries of the ring; every step publishes one. `lowlat.engine.launches.launches` carries out its decisions.
All launches run on one stream, one after the other.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Generic, TypeVar

from lowlat.errors import DeviceError, LowlatError

__all__ = ["MAX_LAUNCHES", "Action", "InFlight", "is_step_certain"]

Kind = TypeVar("Kind", bound=Hashable)
MAX_LAUNCHES = 2  # in flight: with one launch queued after the running step, the device never waits for the host


class Action(Enum):
    """An action on the launches in flight."""

    LAUNCH = "launch"  # queue the wanted step, if it is certain, then wait
    WAIT = "wait"  # wait for the next entry
    DRAIN = "drain"  # end a loop, and wait for every entry


def is_step_certain(num_remaining: Sequence[int], *, queued: bool) -> bool:
    """Whether a step follows all launches in flight, whatever their results.

    num_remaining  tokens that each request in a slot may still get after the launches in flight, at least
    queued         whether other requests wait for a slot
    No step is certain if all requests may have ended by their length, or if one may have and another waits for its
    slot. A stop id or string is not known in advance: if it ends the last request, one step runs without a request.
    """
    return max(num_remaining) > 0 and (min(num_remaining) > 0 or not queued)


class InFlight(Generic[Kind]):
    """The launches of which the host has not seen all entries.

    num_entries  entries of the ring; a loop gets at most half of them, so that the next loop can be queued before the
                 host has read all entries of the last one
    num_seen     entries seen since the start
    bucket       of the last launch; None before the first

    At most two launches are in flight: two steps, two loops, or a step and then a loop. A loop may end with fewer steps
    than its budget. After `close` nothing may be launched, but entries of launches in flight can still be seen.
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
        """Steps in flight; loops count with their budgets."""
        return self._ends[-1] - self.num_seen if self._ends else 0

    @property
    def num_launches(self) -> int:
        """Steps and loops in flight."""
        return len(self._ends)

    @property
    def under_way(self) -> bool:
        """Whether any entries are outstanding."""
        return bool(self._ends)

    @property
    def in_loop(self) -> bool:
        """Whether a loop is in flight, asked to stop or not."""
        return self._is_loop and bool(self._ends)

    @property
    def looping(self) -> bool:
        """Whether a loop is in flight that was not asked to stop."""
        return self.in_loop and not self._is_stopping

    def may_launch(self, bucket: Kind) -> bool:
        """Whether a launch in this bucket may be queued after the launches in flight.

        After a loop only its own bucket may be launched, in the second half of its steps, unless it was asked to stop.
        """
        if self._is_closed or len(self._ends) >= MAX_LAUNCHES:
            return False
        if not self.in_loop:
            return True
        return not self._is_stopping and bucket == self.bucket and self.num_steps <= self._num_entries // 4

    def action(self, wanted: Kind | None, *, ahead: bool) -> Action:
        """The next action while launches are in flight.

        wanted  the bucket of the next step; None: no step is wanted, or a request must join before
        ahead   whether a step may be launched before the entries of earlier ones were seen
        """
        if not ahead or (self.in_loop and wanted != self.bucket):
            return Action.DRAIN
        return Action.LAUNCH if wanted is not None and self.may_launch(wanted) else Action.WAIT

    def loop_budget(self, num_unread: int, max_steps: int | None = None) -> int:
        """Steps that a loop launched now may run: at most half of the ring, and the ring's free entries.

        num_unread  entries that were seen and may not be overwritten yet
        max_steps   the caller's limit; None: there is none
        """
        budget = min(self._num_entries // 2, self._num_entries - num_unread - self.num_steps)
        return max(0, budget if max_steps is None else min(budget, max_steps))

    def launched(self, bucket: Kind, budget: int = 0) -> None:
        """Record a launch of a loop with a budget, or of one step if the budget is 0.

        Raises LowlatError for a launch that `may_launch` refuses, and for a step after a loop.
        """
        if not self.may_launch(bucket) or (self.in_loop and not budget):
            raise LowlatError(f"a launch in {bucket} may not follow {self.num_steps} steps under way in {self.bucket}")
        self._ends.append(self.num_seen + self.num_steps + (budget or 1))
        self._last, self.bucket = self.num_seen, bucket
        self._is_loop, self._is_stopping = budget > 0, False

    def awaited(self, *, every: bool) -> int:
        """The number of entries to wait for: the next one, or all. The launches in flight may end with fewer."""
        return self._ends[-1] if every and self._ends else self.num_seen + bool(self._ends)

    def saw(self, num_seen: int, *, ended: bool = False) -> None:
        """Record the total number of entries seen, and whether all loops have ended with them.

        Raises DeviceError for entries that were not launched, and for a loop that ended without a step.
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
        """End loops soon; returns whether the device must be asked. A queued loop still runs a step."""
        must_tell = self.looping
        self._is_stopping = self._is_stopping or must_tell
        return must_tell

    def close(self) -> bool:
        """Refuse later launches, and `stop`."""
        self._is_closed = True
        return self.stop()
