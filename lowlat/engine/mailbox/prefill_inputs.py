"""This module writes the inputs of prefill, and reads the prompt logprobs that its passes compute."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lowlat.engine.mailbox.host_view import HostView, fill
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.kernels.reference.step.slot_record import NUM_LOGPROBS
from lowlat.sequence.snapshot_book import PREFILL_STATES
from lowlat.step.state import PASS_ROWS

__all__ = ["PrefillInputs"]

PREFILL = tuple(
    f"prefill_{part}"
    for part in ("tokens", "chunk", "live", "draft_live", "positions", "draft_positions", "slot", "count")
)
PARTIAL = ("prefill_span", "prefill_shifts", "prefill_start")  # with SpecPV
ASKED = ("prompt_targets", "prompt_ints")  # where requests may ask for the logprobs of their prompts
ANSWERED = ("prompt_logprob_values", "prompt_logprob_ids", "prompt_ranks")


class PrefillInputs:
    """Writes the inputs of prefill into an executor's state; `view` counts copies."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._partial = tuple(name for name in PARTIAL if name in state)
        self._commands = tuple(name for name in state if name.startswith(("prefill_table", PREFILL_STATES)))
        optional = (name for name in (*PARTIAL, *ASKED, *ANSWERED) if name in state)
        self.view = self._host = HostView(state, (*PREFILL, *self._commands, *optional))
        self._arrays = self.view.arrays

    def write_partial(self, span: tuple[int, int], shifts: Sequence[int], start: int) -> None:
        """Write SpecPV's inputs for a chunk from position `start` on; without SpecPV write nothing.

        span    the new keys' first position, and the one after their last
        shifts  for each slot the positions that its list leaves out
        """
        for name, values in zip(self._partial, (span, shifts, start), strict=False):
            self._arrays[name][:] = values
        self._host.send(*self._partial)

    def write_chunk(self, slot: int, tokens: Sequence[int], start: int, commands: Mapping[str, Sequence[int]]) -> None:
        """Write the inputs of a chunk: `tokens` from position `start` on, all of them live rows.

        commands  values for the slot from the books of its states, by buffer; the slot's steps use the tables, too
        """
        arrays, count = self._arrays, len(tokens)
        for name in self._commands:
            fill(arrays[name][0], commands[name], 0)
        self._host.send(*self._commands)
        fill(arrays["prefill_tokens"], tokens, 0)
        arrays["prefill_chunk"][:] = (start, count)
        arrays["prefill_slot"][0], arrays["prefill_count"][0] = slot, count
        rows = np.arange(len(arrays["prefill_tokens"]))
        arrays["prefill_live"][:] = rows < count
        # row i of a draft model takes token i and the target's feature at i - 1
        arrays["prefill_draft_live"][:] = (rows < count) & (rows + start >= 1)
        arrays["prefill_positions"][:] = rows + start
        arrays["prefill_draft_positions"][:] = np.maximum(rows + start - 1, 0)
        self._host.send(*PREFILL)

    def ask_prompt(self, prompt: Sequence[int], start: int, count: int, num_top: int | None) -> int:
        """Write what passes over `count` positions from `start` on read; returns how many passes that takes.

        num_top  likeliest tokens that are wanted; None: nothing is, which takes none
        """
        if num_top is None:
            return 0
        targets = self._arrays["prompt_targets"]
        fill(targets, prompt[start + 1 : start + count + 1], -1)
        self._arrays["prompt_ints"][0, NUM_LOGPROBS] = num_top
        self._host.send(*ASKED)
        return -(-count // min(PASS_ROWS, len(targets)))

    def read_prompt(self, prompt: Sequence[int], start: int, count: int, num_top: int | None) -> PromptLogprobs | int:
        """Read the logprobs of the tokens after these positions.

        If logits were not finite, returns the first such position instead, counted from `start`.
        """
        self._host.fetch(*ANSWERED)
        count, top = min(count, len(prompt) - start - 1), slice(1, 1 + (num_top or 0))
        values, ids, ranks = (self._arrays[name][:count] for name in ANSWERED)
        broken = np.flatnonzero(ids[:, 0] < 0)
        if len(broken):
            return int(broken[0])
        own = (_packed(ids[:, 0]), _packed(values[:, 0]), _packed(ranks), _packed(ids[:, top]), _packed(values[:, top]))
        return PromptLogprobs(num_top or 0, own)


def _packed(numbers: np.ndarray[Any, Any]) -> bytes:
    """Numbers, little-endian, in order."""
    return numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()
