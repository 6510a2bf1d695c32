"""The position of a request in a compiled grammar: masks for the rows of a chain or tree, committed tokens, ends.

The library knows the grammar of the document alone. What lies around it is here: the reasoning before it, and the
request's own end tokens, which may follow where the document may end.
"""

import time
from collections.abc import Sequence
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
    """A row of a step: where it is, and how many tokens the matcher took for it; no place where it is forbidden."""

    place: Place | None
    num_taken: int


class MatchedGrammar:
    """The GrammarState of one request; see there.

    matcher  its own, at the document's beginning
    end_ids  the request's end tokens; the state is over behind one
    gate     None where the document begins at once
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: "llguidance.LLMatcher",
        end_ids: Sequence[int],
        gate: Gate | None = None,
    ) -> None:
        self._vocabulary = vocabulary
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
        rows: list[_Row] = [_Row(self._place, 0)]
        children: list[list[int]] = [[] for _ in tokens]
        for row in range(1, len(tokens)):
            children[parents[row]].append(row)
            rows.append(_Row(None, 0))
        path: list[int] = []  # the rows from the root to the one that the matcher is at
        waiting = [0]
        while waiting:
            row = waiting.pop()
            if row:
                self._back_to(parents[row], path, rows)
                rows[row] = self._step(rows[parents[row]].place, tokens[row])
            path.append(row)
            self._mask(rows[row].place, masks[row])
            waiting.extend(reversed(children[row]))
        self._back_to(0, path, rows)
        spent = time.thread_time() - begin
        if spent > MAX_MASK_S * len(tokens):
            self._fail(f"masks of {len(tokens)} rows took {spent * 1000:.0f} ms; at most {MAX_MASK_S * 1000:g} ms each")
        self._check()

    def advance(self, tokens: Sequence[int]) -> None:
        """See GrammarState."""
        for token in tokens:
            self._check()
            place, _ = self._step(self._place, token)
            if place is None:
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

    def _back_to(self, row: int, path: list[int], rows: list[_Row]) -> None:
        num_taken = 0
        while path[-1] != row:
            num_taken += rows[path.pop()].num_taken
        if num_taken:
            self._matcher.rollback(num_taken)

    def _step(self, place: Place | None, token: int) -> _Row:
        """The row behind a token; the matcher has taken what the document has of it."""
        if place is None:
            return _Row(None, 0)
        phase = place.phase
        if phase is Phase.ENDED:
            return _Row(place if token in self._end_ids else None, 0)
        if phase is Phase.THINKING:
            return self._think(place, token)
        if self._gate is not None and token in self._gate.extra.get(phase, ()):
            return _Row(self._gate.extra[phase][token], 0)
        if token in self._end_ids and self._matcher.is_accepting():
            return _Row(Place(Phase.ENDED), 0)
        if self._matcher.is_stopped() or self._matcher.try_consume_tokens([token]) != 1:
            return _Row(None, 0)
        return _Row(AT_ONCE, 1)

    def _think(self, place: Place, token: int) -> _Row:
        if token in self._end_ids:
            return _Row(Place(Phase.ENDED), 0)
        if self._gate is None:
            return _Row(None, 0)
        behind, document = self._gate.step(place, token)
        if not document:
            return _Row(behind, 0)
        begun = list(self._vocabulary(document))
        num_taken = self._matcher.try_consume_tokens(begun)
        if num_taken < len(begun):
            self._matcher.rollback(num_taken)
            return _Row(None, 0)
        return _Row(behind, num_taken)

    def _mask(self, place: Place | None, row: np.ndarray) -> None:
        """Write what may follow a place, at which the matcher is."""
        if place is None or place.phase is Phase.THINKING:
            row[:] = ALL
            return
        matcher, end_id = self._matcher, self._vocabulary.end_id
        if place.phase is Phase.ENDED or self._failure or matcher.is_stopped():
            if place.phase is not Phase.ENDED and not self._failure and not matcher.is_accepting():
                self._fail("nothing may follow")
            row[:] = self._end_row
            return
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, 4 * self._num_words)
        if matcher.is_error():
            self._fail(" ".join(matcher.get_error().partition("<non-verbose")[0].split())[:200])
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

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why

    def _check(self) -> None:
        if self._failure:
            raise GrammarError(f"the grammar cannot go on: {self._failure}")

    @staticmethod
    def _set(row: np.ndarray, token: int) -> None:
        row[token >> 5] |= BITS[token & 31]
