"""The position of a request in a compiled grammar: masks for the rows of a chain or tree, committed tokens, ends.

The library knows the grammar of the document alone. What lies around it is here: the reasoning before it, and the
request's own end tokens, which may follow where the document may end.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lowlat.errors import GrammarError
from lowlat.text.grammar.reasoning import AT_ONCE, Gate, Phase, Place
from lowlat.text.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance

__all__ = ["MAX_MASK_S", "MatchedGrammar"]

MAX_MASK_S = 0.05  # of processor time, for one row
ALL = np.int32(-1)
BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


class _Row(NamedTuple):
    """A row of a step: where it is, no place where it is forbidden, and a matcher that is there, its own or shared."""

    place: Place | None
    matcher: "llguidance.LLMatcher"
    is_own: bool


class MatchedGrammar:
    """The GrammarState of one request; see there.

    matcher  its own, at the document's beginning
    end_ids  the request's end tokens; the state is over behind one
    gate     None where the document begins at once
    used_up  called when the library gives up: all copies of a matcher share what they may use, and have used it up
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: "llguidance.LLMatcher",
        end_ids: Sequence[int],
        gate: Gate | None = None,
        used_up: Callable[[], None] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._used_up = used_up
        self._matcher = matcher
        self._gate = gate
        self._place = AT_ONCE if gate is None else gate.begin
        self._end_ids = frozenset(end_ids)
        self._num_words = (vocabulary.vocab_size + 31) // 32
        self._num_committed = 0
        self._failure = ""
        self._end_row = np.zeros(self._num_words, np.int32)
        for token in self._end_ids:
            self._set(self._end_row, token)

    @property
    def active(self) -> bool:
        """See GrammarState."""
        return self._place.phase is not Phase.THINKING

    @property
    def terminated(self) -> bool:
        """See GrammarState."""
        return self._is_over(self._place)

    def fill(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """See GrammarState. Raises GrammarError where a grammar cannot go on: it came to a limit, or to a dead end."""
        begin = time.thread_time()
        rows = [_Row(self._place, self._matcher, False)]
        self._mask(rows[0], masks[0])
        for row in range(1, len(tokens)):
            parent = parents[row]
            is_last = parent not in parents[row + 1 :]
            rows.append(self._below(rows[parent], tokens[row], is_alone=is_last and parents.index(parent) == row))
            self._mask(rows[row], masks[row])
        spent = time.thread_time() - begin
        if spent > MAX_MASK_S * len(tokens):
            self._fail(f"masks of {len(tokens)} rows took {spent * 1000:.0f} ms; at most {MAX_MASK_S * 1000:g} ms each")
        self._check()

    def advance(self, tokens: Sequence[int]) -> None:
        """See GrammarState."""
        for token in tokens:
            self._check()
            place, taken = self._behind(self._place, token, self._matcher)
            if place is None or self._matcher.try_consume_tokens(taken) != len(taken):
                self._look_at(self._matcher)
                self._check()
                raise GrammarError(f"token {token}, {self._num_committed} tokens into the answer, is not allowed there")
            self._place = place
            self._num_committed += 1

    def forced(self, limit: int) -> list[int]:
        """See GrammarState."""
        if self._failure or limit < 1 or self._place.phase is not Phase.DOCUMENT:
            return []
        if self.terminated:
            return list(self._end_ids) if len(self._end_ids) == 1 else []
        forced = self._matcher.compute_ff_tokens()[:limit]
        return forced[: self._matcher.validate_tokens(forced)]

    def _below(self, row: _Row, token: int, *, is_alone: bool) -> _Row:
        """The row behind another one; is_alone: no other row lies behind that one.

        Matchers are copied, never rolled back: after a mask the library's rollback leaves parts of the old path behind.
        """
        place, taken = (None, []) if row.place is None else self._behind(row.place, token, row.matcher)
        if not taken:
            return _Row(place, row.matcher, row.is_own and is_alone)
        matcher = row.matcher if row.is_own and is_alone else row.matcher.deep_copy()
        is_allowed = matcher.try_consume_tokens(taken) == len(taken)
        return _Row(place if is_allowed else None, matcher, True)

    def _behind(self, place: Place, token: int, matcher: "llguidance.LLMatcher") -> tuple[Place | None, list[int]]:
        """The place behind a token, None for a forbidden one, and what the matcher has to take for it."""
        phase, gate = place.phase, self._gate
        if phase is Phase.ENDED:
            return (place if token in self._end_ids else None), []
        if phase is Phase.THINKING:
            if gate is None or token in self._end_ids:
                return Place(Phase.ENDED), []
            behind, document = gate.step(place, token)
            return behind, list(self._vocabulary(document)) if document else []
        if gate is not None and token in gate.extra.get(phase, ()):
            return gate.extra[phase][token], []
        if token in self._end_ids and matcher.is_accepting():
            return Place(Phase.ENDED), []
        return (None, []) if matcher.is_stopped() else (AT_ONCE, [token])

    def _mask(self, at: _Row, row: np.ndarray) -> None:
        """Write what may follow a row."""
        place, matcher, end_id = at.place, at.matcher, self._vocabulary.end_id
        if place is None or place.phase is Phase.THINKING:
            row[:] = ALL
            return
        if place.phase is Phase.ENDED or self._failure or matcher.is_stopped():
            if place.phase is not Phase.ENDED and not self._failure and not matcher.is_accepting():
                self._look_at(matcher)
                self._fail("nothing may follow")
            row[:] = self._end_row
            return
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self._num_words)
        if self._look_at(matcher):
            row[:] = self._end_row
            return
        if matcher.is_accepting():
            row |= self._end_row
        if end_id not in self._end_ids:
            row[end_id >> 5] &= ~BITS[end_id & 31]
        if self._gate is not None:
            for token in self._gate.extra.get(place.phase, ()):
                self._set(row, token)

    def _is_over(self, place: Place) -> bool:
        if place.phase is Phase.DOCUMENT:
            return self._matcher.is_stopped() and not self._matcher.is_error()
        return place.phase is Phase.ENDED

    def _look_at(self, matcher: "llguidance.LLMatcher") -> bool:
        """Whether the library has given up, which is a failure."""
        if not matcher.is_error():
            return False
        self._fail(" ".join(matcher.get_error().partition("<non-verbose")[0].split())[:200])
        if self._used_up is not None:
            self._used_up()
        return True

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why

    def _check(self) -> None:
        if self._failure:
            raise GrammarError(f"the grammar cannot go on: {self._failure}")

    @staticmethod
    def _set(row: np.ndarray, token: int) -> None:
        row[token >> 5] |= BITS[token & 31]
