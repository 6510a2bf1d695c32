"""A step publishes one entry of the ring, with its outcome for each slot; this module has their types."""

from dataclasses import dataclass
from typing import NamedTuple

from lowlat.engine.mailbox.failed_checks import FailedCheck
from lowlat.kernels.reference.speculation.accept import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from lowlat.kernels.reference.step.publish import FINISH, SLOT
from lowlat.options.request import FinishReason, TokenLogprobs

__all__ = ["FINISH_REASONS", "Entry", "SlotPublication"]

FINISH_REASONS: dict[int, FinishReason] = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ERROR: "error"}


class SlotPublication(NamedTuple):
    """The outcome of one step for one slot; `accepted` counts committed drafts, `length` committed tokens after it.

    failed  a check that failed for the slot; the step then has no other outcome for it
    """

    slot: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    verified: int
    verified_depth: int
    verified_source: int
    accepted: int
    length: int
    logprobs: tuple[TokenLogprobs, ...] | None
    failed: FailedCheck | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One step's entry of the ring; only its records have been read.

    number   steps published before it
    records  one for each row of the entry; SLOT is -1 if no slot took part
    failed   the failed checks of the step
    """

    number: int
    records: list[list[int]]
    failed: tuple[FailedCheck, ...] = ()

    @property
    def ended(self) -> list[int]:
        """Slots that the step ended."""
        ended = [record[SLOT] for record in self.records if record[SLOT] >= 0 and record[FINISH] in FINISH_REASONS]
        return [*ended, *(failure.slot for failure in self.failed if failure.ends)]
