"""The mailbox is the host's side of a step's two rings: it writes commands, and reads publications."""

from collections.abc import Mapping, Sequence

import torch

from lowlat.engine.mailbox.failed_checks import FailedCheck
from lowlat.engine.mailbox.grammar_words import NEVER, GrammarWords
from lowlat.engine.mailbox.host_view import HostView, fill
from lowlat.engine.mailbox.prefill_inputs import PrefillInputs
from lowlat.engine.mailbox.publications import FINISH_REASONS, Entry, SlotPublication
from lowlat.kernels.reference.step import publish, slot_record
from lowlat.kernels.reference.step.checks import CODE
from lowlat.kernels.reference.step.slots import CANCEL, JOIN, NO_SOURCE, REWIND, SET_DRAFT_LIMIT
from lowlat.options.request import FinishReason, SamplingParams, TokenLogprobs

__all__ = ["Mailbox"]

STAGED = tuple(
    f"staged_{part}" for part in ("ints", "floats", "tokens", "table", "stop_ids", "bias_ids", "bias_values")
)
TEXTS = ("draft_texts", "draft_text_lens")  # where requests may name texts to draft from
READ = ("ring_records", "ring_tokens", "ring_logprob_values", "ring_logprob_ids", "ring_head")
CHECKS = "ring_checks"  # where steps are checked


class Mailbox:
    """Writes commands and staged records into an executor's state, and reads its publications in order.

    `num_seen` counts the entries that `poll` has returned. `num_unread` counts those that were not passed to `read`
    yet; until then the step must not overwrite them.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], max_draft_tokens: int) -> None:
        self.prefill, self.grammars = PrefillInputs(state), GrammarWords(state)
        optional = (*TEXTS, "length_bounds", CHECKS)
        self._checks = (CHECKS,) if CHECKS in state else ()
        held = (*STAGED, "command_ring", "command_tail", *READ, *(name for name in optional if name in state))
        self._host = HostView(state, held)
        self._arrays = self._host.arrays
        self._head, self._records = self._arrays["ring_head"], self._arrays["ring_records"]
        self.max_draft_tokens = max_draft_tokens
        self._num_read = 0
        self._num_commands = 0
        self._draft_lengths: tuple[int, int] | None = None  # as last written
        self.num_seen = 0

    @property
    def num_entries(self) -> int:
        """Entries that the ring holds."""
        return len(self._records)

    @property
    def num_copies(self) -> int:
        """Copies to and from the device so far; none if the device accesses host memory itself."""
        return sum(view.num_copies for view in (self._host, self.prefill.view, self.grammars.view))

    @property
    def num_unread(self) -> int:
        """Entries that were seen and must not be overwritten yet."""
        return self.num_seen - self._num_read

    @property
    def has_unseen(self) -> bool:
        """Whether a step has published an entry that `poll` has not returned yet."""
        self._host.fetch("ring_head")
        return int(self._head[0]) > self.num_seen

    def join(
        self,
        slot: int,
        prompt: Sequence[int],
        table: Sequence[int],
        max_length: int,
        params: SamplingParams,
        seed: int,
        stop_ids: Sequence[int],
        *,
        has_grammar: bool = False,
    ) -> None:
        """Stage a slot's record and command it to join at the next step, or first token; no step may be in flight.

        has_grammar  whether the masks of its first token were sent, and those of each step will be
        """
        arrays = self._arrays
        ints = arrays["staged_ints"][slot]
        limit = self._draft_limit(params.max_draft_tokens)
        for column, value in (
            (slot_record.LENGTH, len(prompt)),
            (slot_record.MAX_LENGTH, max_length),
            (slot_record.PROMPT_LENGTH, len(prompt)),
            (slot_record.MIN_TOKENS, params.min_tokens),
            (slot_record.TOP_K, params.top_k),
            (slot_record.SEED, seed),
            (slot_record.DRAFT_LIMIT, limit),
            (slot_record.NUM_LOGPROBS, -1 if params.logprobs is None else params.logprobs),
            (slot_record.HAS_GRAMMAR, has_grammar),
        ):
            ints[column] = value
        floats = arrays["staged_floats"][slot]
        for column, number in (
            (slot_record.TEMPERATURE, params.temperature),
            (slot_record.TOP_P, params.top_p),
            (slot_record.MIN_P, params.min_p),
            (slot_record.REPETITION, params.repetition_penalty),
            (slot_record.PRESENCE, params.presence_penalty),
            (slot_record.FREQUENCY, params.frequency_penalty),
        ):
            floats[column] = number
        biases = params.logit_bias or {}
        fill(arrays["staged_tokens"][slot], prompt, 0)
        fill(arrays["staged_table"][slot], table, 0)
        fill(arrays["staged_stop_ids"][slot], stop_ids, -1)
        fill(arrays["staged_bias_ids"][slot], list(biases), -1)
        fill(arrays["staged_bias_values"][slot], list(biases.values()), 0.0)
        self._host.send(*STAGED)
        self._command(JOIN, slot)

    def cancel(self, slot: int) -> None:
        """Command a slot to leave; the next step reads it as it begins, in a device loop, too."""
        self._command(CANCEL, slot)

    def set_draft_limit(self, slot: int, limit: int | None) -> None:
        """Command a decoding slot to verify at most `limit` drafts in a step, from the next step on.

        limit  as in SamplingParams; None: no limit
        """
        self._command(SET_DRAFT_LIMIT, slot, self._draft_limit(limit))

    def rewind(self, slot: int, length: int) -> None:
        """Command a slot to go back to a number of committed tokens; `force_drafts` sets what it then verifies."""
        self._command(REWIND, slot, length)

    def name_texts(self, slot: int, tokens: Sequence[int]) -> None:
        """Write the texts that a slot drafts from besides its own, -1 after each; does nothing without this option.

        None of its steps may be in flight.
        """
        if TEXTS[0] not in self._arrays or not (tokens or self._arrays[TEXTS[1]][slot]):
            return
        self._arrays[TEXTS[0]][slot, : len(tokens)] = tokens
        self._arrays[TEXTS[1]][slot] = len(tokens)
        self._host.send(*TEXTS)

    def bound_draft_lengths(self, least: int, most: int) -> None:
        """Bound the draft lengths that the device chooses, from the next step on; does nothing if it chooses none.

        A request's own limit of drafts takes precedence over `least`.
        """
        if (least, most) == self._draft_lengths or "length_bounds" not in self._arrays:
            return
        self._draft_lengths = least, most
        self._arrays["length_bounds"][:] = least, most
        self._host.send("length_bounds")

    def _draft_limit(self, limit: int | None) -> int:
        return self.max_draft_tokens if limit is None else limit

    def _command(self, opcode: int, slot: int, value: int = 0) -> None:
        ring = self._arrays["command_ring"]
        ring[self._num_commands % len(ring)] = (opcode, slot, value, 0)
        self._num_commands += 1
        self._host.send("command_ring")
        self._arrays["command_tail"][0] = self._num_commands  # written last, since a step may be reading
        self._host.send("command_tail")

    def take_over(self, slot: int, table: Sequence[int]) -> None:
        """Prepare a slot whose rows are written by copies: earlier commands to the slot then have no effect.

        table  its blocks by position, for the checks of steps
        Its steps do not wait for the host until a grammar is set. No step may be in flight.
        """
        ring = self._arrays["command_ring"]
        ring[ring[:, 1] == slot] = 0
        fill(self._arrays["staged_table"][slot], table, 0)
        self._host.send("command_ring", "staged_table")
        self.grammars.force_drafts(slot, (), NEVER)
        self.grammars.release(slot)

    def poll(self) -> list[Entry]:
        """The entries of the ring that were not seen yet, in order; pass them to `read` in the same order."""
        self._host.fetch(*READ, *self._checks)
        head = int(self._head[0])
        entries = []
        for number in range(self.num_seen, head):
            entries.append(Entry(number, self._records[number % self.num_entries].tolist(), self._failed(number)))
        self.num_seen = head
        return entries

    def _failed(self, number: int) -> tuple[FailedCheck, ...]:
        """The checks that failed in an entry's step, by slot; the last item has those of no slot."""
        if CHECKS not in self._arrays:
            return ()
        rows = self._arrays[CHECKS][number % self.num_entries]
        slots = (*range(len(rows) - 1), -1)
        found = ((slot, rows[slot].tolist()) for slot in slots if rows[slot, CODE])
        return tuple(FailedCheck.of(slot, row) for slot, row in found)

    def read(self, entry: Entry) -> list[SlotPublication]:
        """The publication of each slot in an entry; a step may then overwrite the entry."""
        place = entry.number % self.num_entries
        rows = enumerate(entry.records)
        publications = [self._read_slot(place, row, record) for row, record in rows if record[publish.SLOT] >= 0]
        self._num_read = entry.number + 1
        return [*publications, *map(_of_failure, (each for each in entry.failed if each.slot >= 0))]

    def _read_slot(self, place: int, row: int, record: list[int]) -> SlotPublication:
        arrays, count = self._arrays, record[publish.COMMITTED]
        ids = arrays["ring_logprob_ids"][place, row]
        logprobs = None
        if count and ids[0, 0] >= 0:
            values = arrays["ring_logprob_values"][place, row, :count].tolist()
            logprobs = tuple(_token_logprobs(i, v) for i, v in zip(ids[:count].tolist(), values, strict=True))
        return SlotPublication(
            slot=record[publish.SLOT],
            token_ids=tuple(arrays["ring_tokens"][place, row, :count].tolist()),
            finish_reason=FINISH_REASONS.get(record[publish.FINISH]),
            verified=record[publish.VERIFIED],
            verified_depth=record[publish.VERIFIED_DEPTH],
            verified_source=record[publish.VERIFIED_SOURCE],
            accepted=record[publish.ACCEPTED],
            length=record[publish.LENGTH_AFTER],
            logprobs=logprobs,
        )


def _token_logprobs(ids: list[int], values: list[float]) -> TokenLogprobs:
    top = tuple((token, value) for token, value in zip(ids[1:], values[1:], strict=True) if token >= 0)
    return TokenLogprobs(ids[0], values[0], top)


def _of_failure(failure: FailedCheck) -> SlotPublication:
    """The publication of a slot with only a failed check."""
    reason: FinishReason | None = "error" if failure.ends else None
    return SlotPublication(failure.slot, (), reason, 0, 0, NO_SOURCE, 0, 0, None, failure)
