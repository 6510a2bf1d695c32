"""This module is SpecPV's schedule: it says when each slot's list of blocks is chosen again.

A slot attends to everything until its text reaches the threshold. Then a refresh chooses its blocks, and again when
its partial steps are used up, or the next step might write past what a refresh can recompute; where partial steps only
propose, after the verification that follows. Each decision rests on
the slot's own published tokens and steps alone, never on what is under way: so it does not depend on how far the host
runs ahead, nor on other slots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lowlat.models.partial_kv import PartialKV

__all__ = ["PartialSlots", "Refresh"]

MOST_STEPS = 64  # that are looked ahead


@dataclass(frozen=True)
class Refresh:
    """The positions [start, start + count) to run over all of the cache; from `span` on keys have no summary yet."""

    start: int
    count: int
    span: int


@dataclass
class _Slot:
    """The state of a slot that decodes; num_exact is None until its first refresh: then all positions are exact."""

    num_summarised: int
    num_exact: int | None = None
    num_steps: int = 0
    proposed: list[int] = field(default_factory=list)  # by partial steps, where they are to be verified
    has_ended: bool = False  # by what was proposed


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

    sizes     of lists, and when they are chosen again
    max_rows  rows that a step may write for a slot
    `shifts` has the positions that each slot's lists leave out, 0 where it attends to everything; of a slot without a
    request they mean nothing.
    """

    def __init__(self, sizes: PartialKV, max_batch: int, max_rows: int) -> None:
        self.sizes = sizes
        self.max_rows = max_rows
        self.shifts = [0] * max_batch
        self._slots: dict[int, _Slot] = {}
        self._counts = _Counts()

    def join(self, slot: int, num_prompt: int) -> None:
        """A request begins in a slot; prefill summarises the keys of its prompt, and makes its lists whole."""
        self.shifts[slot] = 0
        self._slots[slot] = _Slot(num_prompt)

    def take_out(self, slot: int) -> object:
        """The state of a slot whose request leaves it, for `put_in`."""
        state = self._slots.pop(slot, None)
        return None if state is None else (state, self.shifts[slot])

    def put_in(self, slot: int, taken: object) -> None:
        """Give a slot the state that another had. Raises ValueError for what `take_out` did not give."""
        match taken:
            case (_Slot() as state, int(shift)):
                self._slots[slot], self.shifts[slot] = state, shift
            case _:
                raise ValueError(f"no state of a slot: {taken!r:.80}")

    def count_step(self, slot: int) -> bool:
        """A step of a slot was published; returns whether it was a partial one."""
        state = self._slots[slot]
        is_partial = state.num_exact is not None
        state.num_steps += is_partial
        self._counts.partial_steps += is_partial
        self._counts.full_steps += not is_partial
        return is_partial

    def propose(self, slot: int, tokens: Sequence[int], *, ended: bool) -> bool:
        """Keep a step's tokens for a slot as proposals; False where they need no verification, and are not kept."""
        state = self._slots[slot]
        if not self.sizes.lossless or state.num_exact is None:
            return False
        state.proposed += tokens
        state.has_ended = ended
        return True

    def proposals(self) -> dict[int, tuple[int, ...]]:
        """Proposals that are not verified yet, by slot."""
        waiting = ((slot, state) for slot, state in self._slots.items() if state.proposed or state.has_ended)
        return {slot: tuple(state.proposed) for slot, state in waiting}

    def must_verify(self, slot: int, most: int) -> bool:
        """Whether what is proposed for a slot must be verified before a step that brings it up to `most` tokens."""
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
        """Whether a step with which so many tokens are proposed must wait for a verification."""
        return state.has_ended or num_proposed > self.sizes.buffer

    def num_certain(self, lengths: Mapping[int, int], most: int, num_under_way: int) -> int:
        """Steps that may be launched after those under way before a refresh can be due.

        lengths        tokens of each slot's text, without those under way
        most           tokens that a step brings a slot, at most
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
        """Begin new lists for a slot whose text has `length` tokens, where that is due; the caller runs the positions
        that it returns."""
        state = self._slots[slot]
        start = length - 1 if state.num_exact is None else state.num_exact
        found = Refresh(start, length - start, min(start, state.num_summarised))
        if self.sizes.lossless:  # its rows choose blocks alone: all that is in the cache is exact
            count = min(self.sizes.num_queries, length - 1)
            found = Refresh(length - 1 - count, count, state.num_summarised)
        self.shifts[slot] = self.sizes.shift(length - 1)
        state.num_exact = state.num_summarised = length - 1
        state.num_steps = 0
        self._counts.refreshes += 1
        self._counts.refreshed_tokens += found.count
        return found

    def report(self) -> dict[str, Any]:
        """A block `specpv` of counts since the load, as JSON, labelled lossy, of steps by slot."""
        return {"specpv": {"lossy": not self.sizes.lossless, **asdict(self._counts)}}
