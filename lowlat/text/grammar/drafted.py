"""A request's second matcher, which goes along drafted paths and comes back in time proportional to what it took.

A copy of a matcher has all of its document, so that copies for each step would cost ever more. A rollback costs what it
takes back, with two faults of the library that are mended here:

- It keeps the last mask of a place whose next byte is free, and takes it for another path's where that looks alike by
  the number of its lexemes and the state of its lexer. So before another path is taken than the one on which that place
  lies, the mask of a place above both is computed anew.
- It takes back the bytes of a token, where a grammar that names the token by its number took others. Such grammars, and
  those that cannot be rolled back at all, have a copy of the request's own matcher, which is never rolled back.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import llguidance

__all__ = ["DraftedPaths"]

Step = list[int]  # tokens that are taken and taken back together


class DraftedPaths:
    """The place of a matcher below the committed tokens.

    committed   the request's own matcher, behind its committed tokens
    num_words   of a mask
    rolls_back  whether the grammar's tokens are text
    """

    def __init__(self, committed: "llguidance.LLMatcher", num_words: int, *, rolls_back: bool) -> None:
        self._committed, self._rolls_back = committed, rolls_back
        self._scratch = np.empty(num_words, np.int32)
        self._own: llguidance.LLMatcher | None = None
        self._path: list[Step] = []  # from the base, a committed place, to where it is
        self._num_committed = 0  # of these steps
        self._is_free = [False]  # of the base and of the place behind each step: its mask is one that is kept
        self._kept = 0  # the place of the mask that is kept, by steps from the base; it may lie above that
        self._astray: list[Step] = []  # the steps from here to that place, where it is not on the path

    @property
    def matcher(self) -> "llguidance.LLMatcher":
        """The matcher at its place."""
        if self._own is None:
            self._own = self._committed.deep_copy()
            self._own.consume_tokens(_joined(self._path))
        return self._own

    def commit(self, tokens: Step) -> None:
        """Follow the request's own matcher, which has taken these tokens. No step is drafted then."""
        if self._is_free[-1]:
            self._kept -= len(self._path)
            self._path, self._is_free = [], [True]
        self._look_ahead(tokens)
        own = self._own
        if own is None or own.is_error() or own.try_consume_tokens(tokens) < len(tokens):
            self.let_go([])
            return
        self._go(tokens)
        self._num_committed = len(self._path)

    def push(self, tokens: Step) -> bool:
        """Take a step; where the grammar forbids it, nothing changes."""
        self._look_ahead(tokens)
        num_taken = self.matcher.try_consume_tokens(tokens)
        if num_taken < len(tokens):
            self._roll_back(tokens[:num_taken])
            return False
        self._go(tokens)
        return True

    def pop(self) -> None:
        """Take the last step back."""
        step = self._path.pop()
        self._is_free.pop()
        if self._astray or self._kept > len(self._path):
            self._astray.insert(0, step)
        self._roll_back(step)

    def mask(self, row: np.ndarray) -> None:
        """Write the library's mask of the place; the matcher neither is at its end nor has failed."""
        is_free = not self.matcher.compute_ff_bytes()
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if is_free:
            self._is_free[-1], self._kept = True, len(self._path)
            self._astray.clear()

    def let_go(self, drafted: list[Step]) -> None:
        """Take another copy when one is needed, behind these steps."""
        self._own = None
        self._path, self._num_committed, self._kept = drafted, 0, 0
        self._is_free = [False] * (len(drafted) + 1)
        self._astray.clear()

    def _go(self, step: Step) -> None:
        del self._astray[:1]
        self._path.append(step)
        self._is_free.append(False)

    def _look_ahead(self, step: Step) -> None:
        """Before a step that leads away from the mask that is kept: let that be one of the path, the nearest."""
        if self._own is None or not self._astray or self._astray[0] == step:
            return
        place = next((place for place in range(len(self._path), -1, -1) if self._is_free[place]), None)
        if place is None:
            self.let_go(self._path[self._num_committed :])
            return
        again = _joined(self._path[place:])
        self._roll_back(again)
        if self._own is None:
            return
        self._own.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        if self._own.consume_tokens(again):
            self._kept = place
            self._astray.clear()
        else:
            self.let_go(self._path[self._num_committed :])

    def _roll_back(self, tokens: Step) -> None:
        """Take back tokens that are no part of the path any more, or will be taken again."""
        own = self._own
        if own is not None and tokens and (not self._rolls_back or own.is_error() or not own.rollback(len(tokens))):
            self.let_go(self._path[self._num_committed :])


def _joined(steps: list[Step]) -> Step:
    return [token for step in steps for token in step]
