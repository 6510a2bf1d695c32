"""This protocol is the position of one request in its grammar, as the host's pipeline uses it."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

__all__ = ["GrammarState"]


class GrammarState(Protocol):
    """One request's position in its grammar, after its last committed token."""

    def fill(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """Write which tokens may follow each row of a step; the state is unchanged after the call.

        tokens   [T]                 drafted tokens; tokens[0] is the last committed one and is not looked at
        parents  [T]                 the row above each row, parents[i] < i, parents[0] = -1
        masks    [T, ceil(V / 32)]   int32, out: bit 1 = allowed, little end first
        Row 0 is what may follow the last committed token, row i > 0 what may follow the path from the root to i. A row
        whose path the grammar forbids is filled with ones: it is never reached, as its parent's mask excludes its
        token. After termination a row allows the request's end ids alone.
        """

    def advance(self, tokens: Sequence[int]) -> None:
        """Take committed tokens, in order. Raises GrammarError on a token that the grammar forbids."""

    @property
    def active(self) -> bool:
        """False before a reasoning part has ended: then masks restrict nothing; it may end inside a draft path."""

    @property
    def terminated(self) -> bool:
        """Whether the grammar is complete and nothing but an end may follow."""

    def forced(self, limit: int) -> list[int]:
        """The tokens that the grammar forces next (jump-forward), at most limit of them."""
