"""A request's second matcher follows drafted paths, and rolls back in time proportional to the tokens taken.

A copy of a matcher has all of its document, so that copies for each step would cost ever more. A rollback costs what it
takes back, but the library has two faults there, which are worked around here:

- The library caches the last mask of a place whose next byte is free, and reuses it on another path whose lexeme count
  and lexer state are equal. So before the matcher leaves the path of that place, the mask of a place above both paths
  is computed again.
- Its rollback takes back the bytes of a token, where a grammar that names the token by its number took others. Such
  grammars, and those that cannot be rolled back at all, get fresh copies of the request's own matcher instead.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import llguidance

__all__ = ["DraftedPaths"]

Step = list[int]  # tokens that are taken and taken back together


class DraftedPaths:
    """The place of a matcher below the committed tokens.

    committed   the request's own matcher, after its committed tokens
    num_words   of a mask
    rolls_back  whether the grammar's tokens are text
    """

    def __init__(self, committed: "llguidance.LLMatcher", num_words: int, *, rolls_back: bool) -> None:
        self._committed, self._rolls_back = committed, rolls_back
        self._scratch = np.empty(num_words, np.int32)
        self._own: llguidance.LLMatcher | None = None
        self._path: list[Step] = []  # all steps, the committed ones first
        self._num_committed = 0
        self._kept = 0  # the steps above the place of the mask that is kept, or more: it may lie above that
        self._astray: list[Step] = []  # the steps from here to that place, where it is not on the path

    @property
    def matcher(self) -> "llguidance.LLMatcher":
        """The matcher at its place."""
        if self._own is None:
            self._own = self._committed.deep_copy()
            self._own.consume_tokens(_joined(self._path[self._num_committed :]))
        return self._own

    def commit(self, tokens: Step) -> None:
        """Follow the request's own matcher, which has taken these tokens. No step is drafted then."""
        self._look_ahead(tokens)
        if self._own is not None and self._own.try_consume_tokens(tokens) < len(tokens):
            self._let_go()
        self._go(tokens)
        self._num_committed = len(self._path)

    def push(self, tokens: Step) -> bool:
        """Take a step; where the grammar forbids it, nothing changes."""
        if self._astray and self._astray[0] != tokens and self.matcher.validate_tokens(tokens) < len(tokens):
            return False
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
        if self._astray or self._kept > len(self._path):
            self._astray.insert(0, step)
        self._roll_back(step)

    def mask(self, row: np.ndarray) -> None:
        """Write the library's mask of the place; the matcher neither is at its end nor has failed."""
        is_kept = not self.matcher.compute_ff_bytes()
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if is_kept:
            self._kept = len(self._path)
            self._astray.clear()

    def forget(self) -> None:
        """Go back to the committed tokens, wherever it is; what was begun may not have ended."""
        del self._path[self._num_committed :]
        self._let_go()

    def _go(self, step: Step) -> None:
        del self._astray[:1]
        self._path.append(step)

    def _look_ahead(self, step: Step) -> None:
        """Before a step that leads away from the mask that is kept: let that be one of the path, the nearest."""
        if self._own is None or not self._astray or self._astray[0] == step:
            return
        place = len(self._path)
        while self._own.compute_ff_bytes():  # its mask would not be kept
            place -= 1
            if place >= 0:
                self._roll_back(self._path[place])
            else:
                self._let_go()
            if self._own is None:
                return
        self._own.unsafe_compute_mask_ptr(self._scratch.ctypes.data, self._scratch.nbytes)
        if self._own.consume_tokens(_joined(self._path[place:])):
            self._kept = place
            self._astray.clear()
        else:
            self._let_go()

    def _roll_back(self, tokens: Step) -> None:
        """Take tokens back."""
        own = self._own
        if own is not None and tokens and (not self._rolls_back or own.is_error() or not own.rollback(len(tokens))):
            self._let_go()

    def _let_go(self) -> None:
        """Take another copy when one is needed. What it keeps is of a committed place."""
        self._own, self._kept = None, self._num_committed
        self._astray.clear()


def _joined(steps: list[Step]) -> Step:
    return [token for step in steps for token in step]
