"""This module accesses the buffers that host and device share for grammars: a step's rows, masks, forced drafts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lowlat.engine.mailbox.host_view import HostView

__all__ = ["NEVER", "GrammarWords"]

ROWS = ("grammar_tokens", "grammar_paths", "grammar_lengths")
WORDS = ("grammar_ready", "grammar_decided")  # a draw waits for the first, a step's start for the second
NEVER = 1 << 62  # longer than any request


class GrammarWords:
    """Reads the rows that steps verify, and writes their masks and the forced tokens; `view` counts copies."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.view = self._host = HostView(state, (*ROWS, *WORDS, "grammar_masks", "grammar_forced"))
        self._arrays = self.view.arrays

    def masks_wanted(self, slot: int, length: int) -> bool:
        """Whether the masks of a slot's rows after `length` committed tokens have not been sent yet."""
        return bool(self._arrays["grammar_ready"][slot] < length)

    def rows_told(self, slot: int, length: int) -> bool:
        """Whether the device has written the rows that the slot's step verifies after `length` committed tokens."""
        self._host.fetch(*ROWS)
        return bool(self._arrays["grammar_lengths"][slot] == length)

    def rows(self, slot: int, num_rows: int) -> tuple[list[int], list[int]]:
        """The tokens of a slot's first rows, -1 for dead ones, and each row's bits of itself and its ancestors."""
        tokens, paths = self._arrays["grammar_tokens"][slot], self._arrays["grammar_paths"][slot]
        return tokens[:num_rows].tolist(), paths[:num_rows].tolist()

    def masks(self, slot: int) -> np.ndarray[Any, Any]:
        """The masks of a slot's rows, [T, ceil(V / 32)] int32, for the caller to write before `send_masks`."""
        masks: np.ndarray[Any, Any] = self._arrays["grammar_masks"][slot]
        return masks

    def send_masks(self, slot: int, length: int) -> None:
        """Send the masks of a slot's rows after `length` committed tokens; the slot's draw then goes on."""
        self._host.send("grammar_masks")
        self._arrays["grammar_ready"][slot] = length  # written last: a draw may be waiting for it
        self._host.send("grammar_ready")

    def force_drafts(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Let a slot's step after `length` committed tokens begin; forced tokens, if any, replace its drafts."""
        forced = self._arrays["grammar_forced"]
        if tokens:
            forced[slot, 1 : len(tokens) + 1] = tokens
        if tokens or forced[slot, 0]:
            forced[slot, 0] = len(tokens)
            self._host.send("grammar_forced")
        self._arrays["grammar_decided"][slot] = length  # written last: a step's start may be waiting for it
        self._host.send("grammar_decided")

    def num_forced(self, slot: int, length: int) -> int:
        """The number of a slot's forced tokens after `length` committed ones; 0 if they are not decided yet."""
        decided = self._arrays["grammar_decided"][slot] == length
        return int(self._arrays["grammar_forced"][slot, 0]) if decided else 0

    def release(self, slot: int) -> None:
        """Stop a slot's steps from waiting for its grammar; their tokens are dropped.

        Its masks and forced tokens do not change: some GPUs may have read them, and the others must read the same.
        """
        for name in WORDS:
            self._arrays[name][slot] = NEVER
        self._host.send(*WORDS)

    def want_masks(self, slot: int) -> None:
        """Make a slot's steps wait for the masks of their rows."""
        self._arrays["grammar_ready"][slot] = 0
        self._host.send("grammar_ready")
