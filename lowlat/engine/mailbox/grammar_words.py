"""Host and device share these words about requests with grammars: a step's rows, their masks, forced drafts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lowlat.engine.mailbox.host_view import HostView

__all__ = ["NEVER", "GrammarWords"]

ROWS = ("grammar_tokens", "grammar_paths", "grammar_lengths")
WORDS = ("grammar_ready", "grammar_decided")  # which draws, and steps that begin, wait for
NEVER = 1 << 62  # longer than any request


class GrammarWords:
    """Reads the rows that steps verify, and writes their masks and what is forced; `view` counts copies."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.view = self._host = HostView(state, (*ROWS, *WORDS, "grammar_masks", "grammar_forced"))
        self._arrays = self.view.arrays

    def masks_wanted(self, slot: int, length: int) -> bool:
        """Whether the masks of a slot's rows after so many committed tokens were not sent yet."""
        return bool(self._arrays["grammar_ready"][slot] < length)

    def rows_told(self, slot: int, length: int) -> bool:
        """Whether the device has told the rows that the slot's step verifies after so many committed tokens."""
        self._host.fetch(*ROWS)
        return bool(self._arrays["grammar_lengths"][slot] == length)

    def rows(self, slot: int, num_rows: int) -> tuple[list[int], list[int]]:
        """The told tokens of a slot's first rows, -1 where dead, and their ancestors and themselves as bits."""
        tokens, paths = self._arrays["grammar_tokens"][slot], self._arrays["grammar_paths"][slot]
        return tokens[:num_rows].tolist(), paths[:num_rows].tolist()

    def masks(self, slot: int) -> np.ndarray[Any, Any]:
        """The masks of a slot's rows, [T, ceil(V / 32)] int32, to be written; `send_masks` then lets its draw go on."""
        masks: np.ndarray[Any, Any] = self._arrays["grammar_masks"][slot]
        return masks

    def send_masks(self, slot: int, length: int) -> None:
        """Tell the device that the masks of a slot's rows after so many committed tokens are written."""
        self._host.send("grammar_masks")
        self._arrays["grammar_ready"][slot] = length  # the last: a draw may be waiting
        self._host.send("grammar_ready")

    def force_drafts(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Let a slot's step after so many committed tokens begin, and verify these in place of its drafts, if any."""
        forced = self._arrays["grammar_forced"]
        if tokens:
            forced[slot, 1 : len(tokens) + 1] = tokens
        if tokens or forced[slot, 0]:
            forced[slot, 0] = len(tokens)
            self._host.send("grammar_forced")
        self._arrays["grammar_decided"][slot] = length  # the last: a step may be waiting to begin
        self._host.send("grammar_decided")

    def num_forced(self, slot: int, length: int) -> int:
        """Tokens that were forced of a slot after so many committed tokens; 0 where that was not said yet."""
        decided = self._arrays["grammar_decided"][slot] == length
        return int(self._arrays["grammar_forced"][slot, 0]) if decided else 0

    def release(self, slot: int) -> None:
        """Let a slot's steps wait for its grammar no more: their tokens are dropped.

        Its masks and forced tokens stay as they are: some GPUs may have read them, and others still will.
        """
        for name in WORDS:
            self._arrays[name][slot] = NEVER
        self._host.send(*WORDS)

    def want_masks(self, slot: int) -> None:
        """Let a slot's steps wait for the masks of its rows."""
        self._arrays["grammar_ready"][slot] = 0
        self._host.send("grammar_ready")
