"""The host's side of a step: what it writes for the step to read, and what it reads of the step's publications.

It knows the layout of the slot records, the command ring and the publication ring; it knows no request.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowlat.kernels.reference.accept import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from lowlat.kernels.reference.publish import (
    ACCEPTED,
    COMMITTED,
    FINISH,
    LENGTH_AFTER,
    SLOT,
    VERIFIED,
    VERIFIED_DEPTH,
)
from lowlat.kernels.reference.slot_record import (
    DRAFT_LIMIT,
    FREQUENCY,
    LENGTH,
    MAX_LENGTH,
    MIN_P,
    MIN_TOKENS,
    NUM_LOGPROBS,
    PRESENCE,
    PROMPT_LENGTH,
    REPETITION,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from lowlat.kernels.reference.slots import CANCEL, JOIN
from lowlat.request import FinishReason, SamplingParams, TokenLogprobs

__all__ = ["Mailbox", "SlotPublication"]

FINISH_REASONS: dict[int, FinishReason] = {FINISH_STOP: "stop", FINISH_LENGTH: "length", FINISH_ERROR: "error"}


@dataclass(frozen=True)
class SlotPublication:
    """What one step did to one slot; `accepted` counts committed drafts, `length` committed tokens after it."""

    slot: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    verified: int
    verified_depth: int
    accepted: int
    length: int
    logprobs: tuple[TokenLogprobs, ...] | None


class Mailbox:
    """Writes commands and staged records into an executor's state, and reads its publications in order."""

    def __init__(self, state: Mapping[str, torch.Tensor], max_draft_tokens: int) -> None:
        self._state = state
        self._max_draft_tokens = max_draft_tokens
        self._read = 0
        self._written = 0

    def join(
        self,
        slot: int,
        prompt: Sequence[int],
        table: Sequence[int],
        max_length: int,
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
    ) -> None:
        """Stage a slot's record and command it to join at the next step."""
        state = self._state
        ints = state["staged_ints"][slot]
        limit = self._max_draft_tokens if params.max_draft_tokens is None else params.max_draft_tokens
        for column, value in (
            (LENGTH, len(prompt)),
            (MAX_LENGTH, max_length),
            (PROMPT_LENGTH, len(prompt)),
            (MIN_TOKENS, params.min_tokens),
            (TOP_K, params.top_k),
            (SEED, seed),
            (DRAFT_LIMIT, limit),
            (NUM_LOGPROBS, -1 if params.logprobs is None else params.logprobs),
        ):
            ints[column] = value
        floats = state["staged_floats"][slot]
        for column, number in (
            (TEMPERATURE, params.temperature),
            (TOP_P, params.top_p),
            (MIN_P, params.min_p),
            (REPETITION, params.repetition_penalty),
            (PRESENCE, params.presence_penalty),
            (FREQUENCY, params.frequency_penalty),
        ):
            floats[column] = number
        biases = params.logit_bias or {}
        _fill(state["staged_tokens"][slot], prompt, 0)
        _fill(state["staged_table"][slot], table, 0)
        _fill(state["staged_stop_ids"][slot], stop_ids, -1)
        _fill(state["staged_bias_ids"][slot], list(biases), -1)
        _fill(state["staged_bias_values"][slot], list(biases.values()), 0.0)
        self._command(JOIN, slot)

    def cancel(self, slot: int) -> None:
        """Command a slot to leave at the next step."""
        self._command(CANCEL, slot)

    def _command(self, opcode: int, slot: int) -> None:
        ring = self._state["command_ring"]
        ring[self._written % ring.shape[0]] = torch.tensor([opcode, slot, 0, 0])
        self._written += 1
        self._state["command_tail"].fill_(self._written)

    def write_chunk(
        self, tokens: Sequence[int], start: int, table: Sequence[int], num_target: int, num_head: int
    ) -> None:
        """Write one chunk of prefill: `tokens` from position `start` on, live rows of target and head."""
        state = self._state
        size = state["prefill_tokens"].shape[0]
        _fill(state["prefill_tokens"], tokens[:size], 0)
        _fill(state["prefill_table"][0], table, 0)
        state["prefill_chunk"].copy_(torch.tensor([start, num_target], dtype=torch.int32))
        rows = torch.arange(size)
        state["prefill_live"].copy_(rows < num_target)
        state["prefill_head_live"].copy_((rows < num_head) & (rows + start >= 1))
        state["prefill_positions"].copy_(rows + start)
        state["prefill_head_positions"].copy_((rows + start - 1).clamp(min=0))

    def publications(self) -> Iterator[list[SlotPublication]]:
        """The entries of the ring that have not been read yet, one list a step."""
        head = int(self._state["ring_head"])
        while self._read < head:
            entry = self._read % self._state["ring_records"].shape[0]
            self._read += 1
            records = self._state["ring_records"][entry].tolist()
            yield [self._read_slot(entry, row, record) for row, record in enumerate(records) if record[SLOT] >= 0]

    def _read_slot(self, entry: int, row: int, record: list[int]) -> SlotPublication:
        count = record[COMMITTED]
        tokens = self._state["ring_tokens"][entry, row, :count].tolist()
        ids = self._state["ring_logprob_ids"][entry, row, :count].tolist()
        logprobs = None
        if count and ids[0][0] >= 0:
            values = self._state["ring_logprob_values"][entry, row, :count].tolist()
            logprobs = tuple(_token_logprobs(i, v) for i, v in zip(ids, values, strict=True))
        return SlotPublication(
            slot=record[SLOT],
            token_ids=tuple(tokens),
            finish_reason=FINISH_REASONS.get(record[FINISH]),
            verified=record[VERIFIED],
            verified_depth=record[VERIFIED_DEPTH],
            accepted=record[ACCEPTED],
            length=record[LENGTH_AFTER],
            logprobs=logprobs,
        )


def _token_logprobs(ids: list[int], values: list[float]) -> TokenLogprobs:
    top = tuple((token, value) for token, value in zip(ids[1:], values[1:], strict=True) if token >= 0)
    return TokenLogprobs(ids[0], values[0], top)


def _fill(target: torch.Tensor, values: Sequence[float], pad: float) -> None:
    target.fill_(pad)
    target[: len(values)] = torch.tensor(values, dtype=target.dtype)
