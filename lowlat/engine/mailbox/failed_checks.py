"""This module describes and counts the checks of steps that failed on the device.

The device publishes a code and numbers; their texts are here.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lowlat.kernels.reference.step import checks
from lowlat.options.checks import CHECK_KINDS

__all__ = ["FailedCheck", "FailedChecks"]

logger = logging.getLogger("lowlat.engine.checks")

# code -> kind, and a text of the place, the value and the expected value
TEXTS = {
    checks.MAX_LENGTH_BOUNDS: ("lengths", "its longest length is {value}, outside 1 to {expected}"),
    checks.LENGTH_BOUNDS: ("lengths", "its committed length is {value}, outside 1 to {expected}"),
    checks.LENGTH_CHANGED: ("lengths", "its committed length is {value}, and its last step left {expected}"),
    checks.DRAFTS_BOUNDS: ("lengths", "its count of drafts is {value}, outside 0 to {expected}"),
    checks.DRAFT_LIMIT_BOUNDS: ("lengths", "its limit of drafts is {value}, below {expected}"),
    checks.DENSE: ("lengths", "its rows begin at position {value}, and its last token is at {expected}"),
    checks.VERIFIED: ("lengths", "its count of verified drafts is {value}, and it has {expected} live ones"),
    checks.ACCEPTED_LENGTH: ("lengths", "entry {place} accepted {value} rows, outside 1 to {expected}"),
    checks.ACCEPTED_NODE: ("lengths", "accepted row {place} is node {value}, no live child of node {expected}"),
    checks.COMMITTED_LENGTH: ("lengths", "entry {place} committed {value} tokens, outside 0 to {expected}"),
    checks.ADVANCED: ("lengths", "its committed length became {value} in place of {expected}"),
    checks.START: ("spans", "its last token is at position {value}, outside 0 to {expected}"),
    checks.NULL_BLOCK: ("spans", "entry {place} of its block table is the null block, and {expected} is reserved"),
    checks.BLOCK_BOUNDS: ("spans", "entry {place} of its block table is {value}, outside 1 to {expected}"),
    checks.BLOCK_RESERVED: ("spans", "entry {place} of its block table is {value}, and {expected} is reserved"),
    checks.BLOCK_SHARED: ("spans", "entry {place} of its block table is {value}, to be written and another slot's"),
    checks.POSITION: ("spans", "row {place} is at position {value}, outside its own to {expected}"),
    checks.MASK_DEAD: ("masks", "dead row {place} has mask {value:#x}"),
    checks.MASK_SELF: ("masks", "row {place} has mask {value:#x}, which lacks its own bit {expected:#x}"),
    checks.MASK_BEYOND: ("masks", "row {place} has mask {value:#x}, with bits beyond {expected:#x}"),
    checks.MASK_CLOSED: ("masks", "row {place} has mask {value:#x}, which lacks bits of an ancestor's {expected:#x}"),
    checks.MASK_PATH: ("masks", "cell {place} of its paths leads to a row of mask {value:#x} by {expected:#x}"),
    checks.MASK_UNSEEN: ("masks", "row {place}, of mask {value:#x}, is on no path"),
}


class FailedCheck(NamedTuple):
    """A check that failed in a step: the slot, -1 for an entry without one, and the device's numbers.

    ends  whether its request ends; else it goes on without drafts
    """

    slot: int
    code: int
    place: int
    value: int
    expected: int
    ends: bool

    @classmethod
    def of(cls, slot: int, row: Sequence[int]) -> "FailedCheck":
        """Read a failure from the row that a device published; see `lowlat.kernels.reference.step.checks`."""
        code, place, value, expected = (
            row[column] for column in (checks.CODE, checks.PLACE, checks.VALUE, checks.EXPECTED)
        )
        return cls(slot, code, place, value, expected, ends=bool(row[checks.ENDS]))

    @property
    def kind(self) -> str:
        """The kind of check: masks, spans or lengths."""
        return TEXTS[self.code][0]

    def describe(self) -> str:
        """Describe the place, the value and the expected value."""
        masks = self.kind == "masks"
        value, expected = (each & (1 << 64) - 1 if masks else each for each in (self.value, self.expected))
        return TEXTS[self.code][1].format(place=self.place, value=value, expected=expected)


class FailedChecks:
    """Counts and logs a runtime's failed checks of the given kinds; without kinds its report is empty."""

    def __init__(self, kinds: Collection[str]) -> None:
        self._kinds = [kind for kind in CHECK_KINDS if kind in kinds]
        self._failed: Counter[str] = Counter()
        self._num_ended = self._num_single = 0

    def record(self, failure: FailedCheck, request_id: str | None) -> str:
        """Count and log a failure, and return its text; `request_id` is None if it concerns no request."""
        self._failed[failure.kind] += 1
        hurt = "an entry without a request" if request_id is None else f"request {request_id!r} in slot {failure.slot}"
        text = f"check of {failure.kind} failed for {hurt}: {failure.describe()}"
        if request_id is None:
            consequence = "it is dropped"
        elif failure.ends:
            self._num_ended += 1
            consequence = "the request ends"
        else:
            self._num_single += 1
            consequence = "the step is dropped, and the request goes on without drafts"
        logger.warning("%s; %s", text, consequence)
        return text

    def report(self) -> dict[str, Any]:
        """Return a block `checks` of counts, as JSON; {} if no checks are made."""
        if not self._kinds:
            return {}
        failed = {kind: self._failed[kind] for kind in self._kinds}
        counts = {"ended_requests": self._num_ended, "single_token_requests": self._num_single}
        return {"checks": {"failed": failed, **counts}}
