"""This module keeps a request's position in a compiled grammar, and fills masks for the rows of a chain or tree.

The library knows the grammar of the document alone. What lies around it is here: the reasoning before it, and the
request's own end tokens, which may follow where the document may end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from lowlat.errors import GrammarError, is_panic
from lowlat.text.grammar.drafted import DraftedPaths
from lowlat.text.grammar.reasoning import AT_ONCE, Gate, Phase, Place
from lowlat.text.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import llguidance

__all__ = ["MAX_MASK_S", "MatchedGrammar"]

MAX_MASK_S = 0.05  # of the library's processor time, for one row
ALL = np.int32(-1)
BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)


@contextmanager
def _named() -> Iterator[None]:
    """Raise GrammarError for a panic of the library, which is no `Exception` and would end the decode thread."""
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise GrammarError("the grammar cannot go on: its library failed") from error


class MatchedGrammar:
    """The GrammarState of one request; see there.

    matcher  its own, at the document's beginning
    end_ids  the request's end tokens; the state is over after one
    gate     None where the document begins at once
    used_up  called when the library gives up: all copies of a matcher share what they may use, and have used it up
    is_text  the grammar names no token by its number
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: "llguidance.LLMatcher",
        end_ids: Sequence[int],
        gate: Gate | None = None,
        used_up: Callable[[], None] | None = None,
        *,
        is_text: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._used_up = used_up
        self._matcher = matcher
        self._gate = gate
        self._place = AT_ONCE if gate is None else gate.begin
        self._end_ids = frozenset(end_ids)
        self._num_words = (vocabulary.vocab_size + 31) // 32
        self._num_committed = 0
        self._mask_s = 0.0  # of the last `fill`
        self._failure = ""
        self._end_row = np.zeros(self._num_words, np.int32)
        for token in self._end_ids:
            self._set(self._end_row, token)
        self._drafted = DraftedPaths(matcher, self._num_words, rolls_back=is_text)

    @property
    def active(self) -> bool:
        """See GrammarState."""
        return self._place.phase is not Phase.THINKING

    @property
    def terminated(self) -> bool:
        """See GrammarState."""
        return self._is_over(self._place)

    @_named()
    def fill(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """See GrammarState. Raises GrammarError where a grammar cannot go on: it came to a limit, or to a dead end."""
        self._mask_s = 0.0
        if len(tokens) == 1:
            failure = self._mask(self._place, masks[0], self._matcher)
        else:
            below: list[list[int]] = [[] for _ in tokens]
            for row in range(1, len(tokens)):
                below[parents[row]].append(row)
            try:
                failure = self._fill_tree(0, self._place, tokens, below, masks)
            except BaseException:  # an interrupt amid a drafted path
                self._drafted.forget()
                raise
        self._fail(failure)
        spent_ms, most_ms = 1000 * self._mask_s, 1000 * MAX_MASK_S
        if spent_ms > most_ms * len(tokens):
            self._fail(f"masks of {len(tokens)} rows took {spent_ms:.0f} ms; at most {most_ms:g} ms each")
        self._check()

    @_named()
    def advance(self, tokens: Sequence[int]) -> None:
        """See GrammarState."""
        for token in tokens:
            self._check()
            place, taken = self._behind(self._place, token, self._matcher)
            if place is None or self._matcher.try_consume_tokens(taken) != len(taken):
                self._fail(self._given_up(self._matcher))
                self._check()
                raise GrammarError(f"token {token}, {self._num_committed} tokens into the answer, is not allowed there")
            if taken:
                self._drafted.commit(taken)
            self._place = place
            self._num_committed += 1

    @_named()
    def forced(self, limit: int) -> list[int]:
        """See GrammarState."""
        if self._failure or limit < 1 or self._place.phase is not Phase.DOCUMENT:
            return []
        if self.terminated:
            return list(self._end_ids) if len(self._end_ids) == 1 else []
        forced = self._matcher.compute_ff_tokens()[:limit]
        return forced[: self._matcher.validate_tokens(forced)]

    def _fill_tree(
        self, row: int, place: Place | None, tokens: Sequence[int], below: Sequence[Sequence[int]], masks: np.ndarray
    ) -> str:
        """Fill the rows below a row, then its own; returns why nothing may follow that, if so.

        below  the rows right below each
        Nothing is drawn after a draft where the grammar cannot go on: that is a failure once the draft is committed.
        """
        for child in below[row]:
            behind, taken = (None, []) if place is None else self._behind(place, tokens[child], self._drafted.matcher)
            if taken and not self._drafted.push(taken):
                behind, taken = None, []
            if self._fill_tree(child, behind, tokens, below, masks):
                masks[child] = 0
            if taken:
                self._drafted.pop()
        return self._mask(place, masks[row], self._drafted.matcher)

    def _behind(self, place: Place, token: int, matcher: "llguidance.LLMatcher") -> tuple[Place | None, list[int]]:
        """The place after a token, None for a forbidden one, and what the matcher has to take for it."""
        phase, gate = place.phase, self._gate
        if phase is Phase.ENDED:
            return (place if token in self._end_ids else None), []
        if phase is Phase.THINKING:
            if gate is None or token in self._end_ids:
                return Place(Phase.ENDED), []
            behind, document = gate.step(place, token)
            return behind, list(self._vocabulary(document)) if document else []
        instead = {} if gate is None else gate.instead(place)
        if token in instead:
            return instead[token], []
        if phase is Phase.BOUND:
            return None, []
        if token in self._end_ids and matcher.is_accepting():
            return Place(Phase.ENDED), []
        return (None, []) if matcher.is_stopped() else (AT_ONCE, [token])

    def _mask(self, place: Place | None, row: np.ndarray, matcher: "llguidance.LLMatcher") -> str:
        """Write what may follow a row; returns why nothing may, if so: then the row allows the request's ends.

        matcher  at that place
        """
        if place is None or place.phase is Phase.THINKING:
            row[:] = ALL
            return ""
        if place.phase is Phase.BOUND:
            row[:] = 0
            for token in () if self._gate is None else self._gate.instead(place):
                self._set(row, token)
            return ""
        row[:] = self._end_row
        if place.phase is Phase.ENDED or (matcher.is_stopped() and matcher.is_accepting()):
            return ""
        if matcher.is_stopped():
            return self._given_up(matcher) or "nothing may follow"
        begin = time.thread_time()  # of the library alone: a collection of garbage around it is nobody's mask
        if matcher is self._matcher:
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        else:
            self._drafted.mask(row)
        self._mask_s += time.thread_time() - begin
        failure = self._given_up(matcher)
        if failure:
            row[:] = self._end_row
            return failure
        if matcher.is_accepting():
            row |= self._end_row
        end_id = self._vocabulary.end_id
        if end_id not in self._end_ids:
            row[end_id >> 5] &= ~BITS[end_id & 31]
        if self._gate is not None:
            for token in self._gate.instead(place):
                self._set(row, token)
        return ""

    def _is_over(self, place: Place) -> bool:
        if place.phase is Phase.DOCUMENT:
            return self._matcher.is_stopped() and not self._matcher.is_error()
        return place.phase is Phase.ENDED

    def _given_up(self, matcher: "llguidance.LLMatcher") -> str:
        """Why the library has given up, if it has."""
        if not matcher.is_error():
            return ""
        if self._used_up is not None:
            self._used_up()
        why = " ".join(matcher.get_error().partition("<non-verbose")[0].split())[:200]
        return "nothing may follow" if why.startswith("NoExtension") else why or "nothing may follow"

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why

    def _check(self) -> None:
        if self._failure:
            raise GrammarError(f"the grammar cannot go on: {self._failure}")

    @staticmethod
    def _set(row: np.ndarray, token: int) -> None:
        row[token >> 5] |= BITS[token & 31]
