"""This module counts the publications of steps, and checks them in strict mode."""

from collections import Counter
from typing import Any

from lowlat.engine.mailbox.publications import SlotPublication
from lowlat.engine.requests.request import Request
from lowlat.errors import DeviceError

__all__ = ["PublishedSteps", "StepChecks"]

REQUEST_LIMIT, LAST_TOKEN, NO_DRAFTS, CHOSEN = "max_draft_tokens", "last_token", "no_drafts", "chosen_width"


class StepChecks:
    """Checks what a step publishes for a slot, in strict mode.

    max_drafts   the most draft tokens that a step can verify
    vocab_size   token ids are below it
    must_draft   whether every step but a slot's last must have drafts, as with a draft model
    """

    def __init__(self, max_drafts: int, vocab_size: int, *, must_draft: bool) -> None:
        self._max_drafts, self._vocab_size, self._must_draft = max_drafts, vocab_size, must_draft

    def check(self, publication: SlotPublication, num_committed: int, *, first: bool, num_remaining: int) -> None:
        """Raise DeviceError if a publication is inconsistent, or lacks drafts though several tokens were to come.

        num_committed  tokens of prompt and completion before the step
        first          whether it is a prompt's first token, which verifies nothing
        num_remaining  tokens that the request may still get
        """
        tokens, p = publication.token_ids, publication
        problem = None
        if not 0 <= p.accepted <= p.verified_depth <= p.verified <= self._max_drafts:
            problem = (
                f"accepted {p.accepted} of {p.verified} drafts, {p.verified_depth} deep, "
                f"and {self._max_drafts} can be verified"
            )
        elif len(tokens) > min(p.accepted + 1, num_remaining):
            problem = f"gave {len(tokens)} tokens, having accepted {p.accepted} with {num_remaining} to go"
        elif p.length != num_committed + len(tokens):
            problem = f"ended at length {p.length}, and {num_committed} and {len(tokens)} tokens were committed"
        elif any(not 0 <= token < self._vocab_size for token in tokens):
            problem = f"gave tokens {list(tokens)}, of a vocabulary of {self._vocab_size}"
        elif self._must_draft and not first and p.verified == 0 and num_remaining > 1:
            problem = f"verified no draft with {num_remaining} tokens to go"
        if problem is not None:
            raise DeviceError(f"perf_mode 'strict': a step of slot {p.slot} {problem}")


class ActiveSlots:
    """Counts the slots that got tokens in each decode step: the minimum, mean and maximum."""

    def __init__(self) -> None:
        self.num_steps = self.total = self.most = 0
        self.fewest: int | None = None

    def count(self, active: int) -> None:
        """Count a step with `active` slots, at least one."""
        self.num_steps += 1
        self.total += active
        if active > self.most:
            self.most = active
        if self.fewest is None or active < self.fewest:
            self.fewest = active

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; before the first step only the number of steps."""
        if not self.num_steps:
            return {"steps": 0}
        mean = round(self.total / self.num_steps, 4)
        return {"steps": self.num_steps, "min": self.fewest, "mean": mean, "max": self.most}


class PublishedSteps:
    """Counts and checks slots' publications: `undrafted` has those without drafts, by reason; `active` the slots.

    checks       of strict mode; None: there are none
    adaptive     whether steps choose their draft length
    speculating  whether drafts are expected; it may change between requests
    """

    def __init__(self, checks: StepChecks | None, *, adaptive: bool = False, speculating: bool = False) -> None:
        self.undrafted: Counter[str] = Counter()
        self.speculating = speculating
        self.active = ActiveSlots()
        self._adaptive = adaptive
        self._checks = checks

    def describe(self) -> str:
        """Return a line for a log: the active slots, and the reasons of steps without drafts."""
        active = self.active
        slots = f"{active.fewest} active slot{'' if active.fewest == 1 else 's'} each"
        if active.fewest != active.most:
            slots = f"{active.fewest} to {active.most} active slots, {active.total / active.num_steps:.2f} on average"
        line = f"{active.num_steps} step{'' if active.num_steps == 1 else 's'}, {slots}"
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.undrafted.items()))
        return f"{line}; slots without drafts: {reasons}" if reasons else line

    def report(self) -> dict[str, Any]:
        """Return, as JSON, the active slots of steps, and the slots' steps without drafts by reason."""
        disabled = {"disabled_slots": dict(self.undrafted)} if self.speculating else {}
        return {"active_slots": self.active.to_dict(), **disabled}

    def record(self, request: Request, publication: SlotPublication) -> None:
        """Count and check one publication, before its request takes it. Raises DeviceError in strict mode."""
        if self.speculating and request.has_begun and not publication.verified:
            limit = request.params.max_draft_tokens
            self.undrafted[_reason_for_no_drafts(limit, request.num_remaining, adaptive=self._adaptive)] += 1
        if self._checks is not None:
            self._checks.check(
                publication,
                len(request.committed),
                first=not request.has_begun,
                num_remaining=request.num_remaining,
            )


def _reason_for_no_drafts(max_draft_tokens: int | None, num_remaining: int, *, adaptive: bool) -> str:
    """Say why a step verified no draft; see `PerfCounters.undrafted_steps`."""
    if max_draft_tokens == 0:
        return REQUEST_LIMIT
    if num_remaining <= 1:
        return LAST_TOKEN
    return CHOSEN if adaptive else NO_DRAFTS
