"""This module is SpecPV's schedule: it decides when each slot's list of blocks is chosen again.

A slot attends to all positions until its text reaches the threshold. Then a refresh chooses its blocks. The next
refresh comes when the slot's partial steps are used up, or when the next step might write past the positions that a
refresh can recompute. If partial steps only propose (lossless), the refresh comes after the verification that follows.
Each decision depends only on the slot's own published tokens and steps. So it does not depend on how far the host runs
ahead, nor on other slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lowlat.models.partial_kv import PartialKV

__all__ = ["PartialSlots", "Refresh"]

MOST_STEPS = 64  # the most steps that the schedule looks ahead


@dataclass(frozen=True)
class Refresh:
    """A refresh runs positions [start, start + count) over the whole cache; keys from `span` on have no summary yet."""

    start: int
    count: int
    span: int


@dataclass
class _Slot:
    """The state of a slot that decodes; num_exact is None before its first refresh, while all positions are exact."""

    num_summarised: int
    num_exact: int | None = None
    num_steps: int = 0
    proposed: list[int] = field(default_factory=list)  # tokens of partial steps that are to be verified
    has_ended: bool = False  # a proposed token ends the request


@dataclass
class _Counts:
    refreshes: int = 0
    refreshed_tokens: int = 0
    partial_steps: int = 0
    full_steps: int = 0
    verified_tokens: int = 0
    accepted_tokens: int = 0


class PartialSlots:
    """The partial state of every slot of one runtime.

    sizes     sizes of lists, and limits after which they are chosen again
    max_rows  rows that a step may write for a slot
    shifts    positions that each slot's lists leave out; 0: it attends to all; undefined for a slot without a request
    """

    def __init__(self, sizes: PartialKV, max_batch: int, max_rows: int) -> None:
        self.sizes = sizes
        self.max_rows = max_rows
        self.shifts = [0] * max_batch
        self._slots: dict[int, _Slot] = {}
        self._counts = _Counts()

    def join(self, slot: int, num_prompt: int) -> None:
        """Begin a request in a slot: prefill summarises the keys of its prompt, and its lists have all blocks."""
        self.shifts[slot] = 0
        self._slots[slot] = _Slot(num_prompt)

    def take_out(self, slot: int) -> object:
        """Remove the state of a slot whose request leaves it, and return it for `put_in`."""
        state = self._slots.pop(slot, None)
        return None if state is None else (state, self.shifts[slot])

    def put_in(self, slot: int, taken: object) -> None:
        """Give a slot a state that `take_out` returned. Raises ValueError for anything else."""
        match taken:
            case (_Slot() as state, int(shift)):
                self._slots[slot], self.shifts[slot] = state, shift
            case _:
                raise ValueError(f"no state of a slot: {taken!r:.80}")

    def count_step(self, slot: int) -> bool:
        """Count a published step of a slot; returns whether it was a partial step."""
        state = self._slots[slot]
        is_partial = state.num_exact is not None
        state.num_steps += is_partial
        self._counts.partial_steps += is_partial
        self._counts.full_steps += not is_partial
        return is_partial

    def propose(self, slot: int, tokens: Sequence[int], *, ended: bool) -> bool:
        """Keep a step's tokens for a slot as proposals; returns False if they need no verification and are not kept."""
        state = self._slots[slot]
        if not self.sizes.lossless or state.num_exact is None:
            return False
        state.proposed += tokens
        state.has_ended = ended
        return True

    def proposals(self) -> dict[int, tuple[int, ...]]:
        """Return the proposals that are not verified yet, by slot."""
        waiting = ((slot, state) for slot, state in self._slots.items() if state.proposed or state.has_ended)
        return {slot: tuple(state.proposed) for slot, state in waiting}

    def must_verify(self, slot: int, most: int) -> bool:
        """Whether a slot's proposals must be verified before a step that may add `most` tokens."""
        state = self._slots[slot]
        return bool(state.proposed or state.has_ended) and self._is_full(state, len(state.proposed) + most)

    def verified(self, slot: int, num_accepted: int) -> None:
        """Record that a slot's proposals were verified, and how many of their tokens were accepted."""
        state = self._slots[slot]
        self._counts.verified_tokens += len(state.proposed)
        self._counts.accepted_tokens += num_accepted
        self._counts.full_steps += 1
        state.proposed.clear()
        state.has_ended = False

    def is_due(self, slot: int, length: int) -> bool:
        """Whether a slot whose text has `length` tokens must be refreshed before its next step."""
        state = self._slots[slot]
        if self.sizes.lossless and state.num_exact is not None:
            return not state.proposed and state.num_steps >= self.sizes.num_refresh_steps
        return self._is_due(state, length, 0)

    def _is_full(self, state: _Slot, num_proposed: int) -> bool:
        """Whether a step must wait for a verification, if it brings the proposals to `num_proposed` tokens."""
        return state.has_ended or num_proposed > self.sizes.buffer

    def num_certain(self, lengths: Mapping[int, int], most: int, num_under_way: int) -> int:
        """Return how many more steps may be launched, after those under way, before a refresh can be due.

        lengths        tokens of each slot's text, without those of steps under way
        most           the most tokens that a step adds to a slot
        num_under_way  steps that were launched and not counted yet
        """
        each = (self._num_certain(self._slots[slot], lengths[slot], most, num_under_way) for slot in lengths)
        return min(each, default=MOST_STEPS)

    def _num_certain(self, state: _Slot, length: int, most: int, ahead: int) -> int:
        certain = 0
        if self.sizes.lossless and state.num_exact is not None:
            length = len(state.proposed) + most
        while certain < MOST_STEPS and not self._is_due(state, length + most * ahead, ahead):
            certain, ahead = certain + 1, ahead + 1
        return certain

    def _is_due(self, state: _Slot, length: int, num_more: int) -> bool:
        if state.num_exact is None:
            return length - 1 >= self.sizes.threshold
        if self.sizes.lossless:
            return self._is_full(state, length)
        too_many = length - state.num_exact + self.max_rows > self.sizes.buffer
        return too_many or state.num_steps + num_more >= self.sizes.num_refresh_steps

    def refresh(self, slot: int, length: int) -> Refresh:
        """Begin new lists for a slot whose text has `length` tokens; returns the positions that the caller must run."""
        state = self._slots[slot]
        start = length - 1 if state.num_exact is None else state.num_exact
        found = Refresh(start, length - start, min(start, state.num_summarised))
        if self.sizes.lossless:  # these rows only choose blocks: the cache is exact already
            count = min(self.sizes.num_queries, length - 1)
            found = Refresh(length - 1 - count, count, state.num_summarised)
        self.shifts[slot] = self.sizes.shift(length - 1)
        state.num_exact = state.num_summarised = length - 1
        state.num_steps = 0
        self._counts.refreshes += 1
        self._counts.refreshed_tokens += found.count
        return found

    def report(self) -> dict[str, Any]:
        """Return a block `specpv` of counts since the load, as JSON, over all slots, and whether drafting is lossy."""
        return {"specpv": {"lossy": not self.sizes.lossless, **asdict(self._counts)}}
