"""The host's side of a step: the commands that it writes, and the publications that it reads.

It knows the layout of the slot records, the command ring and the publication ring. Host memory is written and read
through numpy, whose scalars cost a tenth of torch's: all of this lies between two steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from lowlat.engine.mailbox.failed_checks import FailedCheck
from lowlat.engine.mailbox.publications import FINISH_REASONS, Entry, SlotPublication
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.kernels.reference.step.checks import CODE
from lowlat.kernels.reference.step.publish import (
    ACCEPTED,
    COMMITTED,
    FINISH,
    LENGTH_AFTER,
    SLOT,
    VERIFIED,
    VERIFIED_DEPTH,
    VERIFIED_SOURCE,
)
from lowlat.kernels.reference.step.slot_record import (
    DRAFT_LIMIT,
    FREQUENCY,
    HAS_GRAMMAR,
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
from lowlat.kernels.reference.step.slots import CANCEL, JOIN, NO_SOURCE, REWIND, SET_DRAFT_LIMIT
from lowlat.options.request import FinishReason, SamplingParams, TokenLogprobs
from lowlat.sequence.snapshot_book import PREFILL_STATES
from lowlat.step.state import PASS_ROWS

__all__ = ["NEVER", "Mailbox"]

STAGED = tuple(
    f"staged_{part}" for part in ("ints", "floats", "tokens", "table", "stop_ids", "bias_ids", "bias_values")
)
PREFILL = ("tokens", "chunk", "live", "draft_live", "positions", "draft_positions", "slot", "count")
PARTIAL = ("prefill_span", "prefill_shifts", "prefill_start")  # with SpecPV
ASKED = ("prompt_targets", "prompt_ints")  # where requests may ask for the logprobs of their prompts
ANSWERED = ("prompt_logprob_values", "prompt_logprob_ids", "prompt_ranks")
TEXTS = ("draft_texts", "draft_text_lens")  # where requests may name texts to draft from
MASKS = ("grammar_masks", "grammar_ready")
FORCED = ("grammar_forced", "grammar_decided")
ROWS = ("grammar_tokens", "grammar_paths", "grammar_lengths")
WRITTEN = (*STAGED, *MASKS, *FORCED, "command_ring", "command_tail", *(f"prefill_{part}" for part in PREFILL))
READ = ("ring_records", "ring_tokens", "ring_logprob_values", "ring_logprob_ids", "ring_head")
CHECKS = "ring_checks"  # where steps are checked
NEVER = 1 << 62  # longer than any request


class Mailbox:
    """Writes commands and staged records into an executor's state, and reads its publications in order.

    `num_seen` counts the entries that `poll` has given, `num_unread` those of them that `read` was not given yet:
    until then the step must not write over them.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], max_draft_tokens: int) -> None:
        self._partial = tuple(name for name in PARTIAL if name in state)
        optional = (*ASKED, *ANSWERED, *TEXTS, "length_bounds", CHECKS)
        held = (*WRITTEN, *READ, *ROWS, *self._partial, *(name for name in optional if name in state))
        self._chunk_commands = tuple(name for name in state if name.startswith(("prefill_table", PREFILL_STATES)))
        held = (*held, *self._chunk_commands)
        self._host = _HostView({name: state[name] for name in held})
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
        """Copies to and from the device so far: none where it reads and writes the host's memory itself."""
        return self._host.num_copies

    @property
    def num_unread(self) -> int:
        """Entries that were seen and must stay as they are."""
        return self.num_seen - self._num_read

    @property
    def has_unseen(self) -> bool:
        """Whether a step has published an entry that `poll` has not given yet."""
        self._host.fetch(READ[-1:])
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
        """Stage a slot's record and command it to join at the next step, or first token; none may be under way.

        has_grammar  the masks of its first token were sent, and those of each step will be
        """
        arrays = self._arrays
        ints = arrays["staged_ints"][slot]
        limit = self._draft_limit(params.max_draft_tokens)
        for column, value in (
            (LENGTH, len(prompt)),
            (MAX_LENGTH, max_length),
            (PROMPT_LENGTH, len(prompt)),
            (MIN_TOKENS, params.min_tokens),
            (TOP_K, params.top_k),
            (SEED, seed),
            (DRAFT_LIMIT, limit),
            (NUM_LOGPROBS, -1 if params.logprobs is None else params.logprobs),
            (HAS_GRAMMAR, has_grammar),
        ):
            ints[column] = value
        floats = arrays["staged_floats"][slot]
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
        _fill(arrays["staged_tokens"][slot], prompt, 0)
        _fill(arrays["staged_table"][slot], table, 0)
        _fill(arrays["staged_stop_ids"][slot], stop_ids, -1)
        _fill(arrays["staged_bias_ids"][slot], list(biases), -1)
        _fill(arrays["staged_bias_values"][slot], list(biases.values()), 0.0)
        self._host.send(STAGED)
        self._command(JOIN, slot)

    def cancel(self, slot: int) -> None:
        """Command a slot to leave; the next step to begin sees it, in a loop too."""
        self._command(CANCEL, slot)

    def set_draft_limit(self, slot: int, limit: int | None) -> None:
        """Command a slot that decodes to verify so many drafts in a step from now on; the next step sees it.

        limit  as in SamplingParams; None: as many as there can be
        """
        self._command(SET_DRAFT_LIMIT, slot, self._draft_limit(limit))

    def rewind(self, slot: int, length: int) -> None:
        """Command a slot to go back to so many committed tokens; see `force_drafts` for what it then verifies."""
        self._command(REWIND, slot, length)

    def name_texts(self, slot: int, tokens: Sequence[int]) -> None:
        """Write the texts that a slot drafts from next to its own, -1 after each; nothing where none may be named.

        None of its steps may be under way.
        """
        if TEXTS[0] not in self._arrays or not (tokens or self._arrays[TEXTS[1]][slot]):
            return
        self._arrays[TEXTS[0]][slot, : len(tokens)] = tokens
        self._arrays[TEXTS[1]][slot] = len(tokens)
        self._host.send(TEXTS)

    def bound_draft_lengths(self, least: int, most: int) -> None:
        """Bound the draft lengths that steps choose from the next one on; where none is chosen, nothing is written.

        A request's own limit of drafts takes precedence over `least`.
        """
        if (least, most) == self._draft_lengths or "length_bounds" not in self._arrays:
            return
        self._draft_lengths = least, most
        self._arrays["length_bounds"][:] = least, most
        self._host.send(("length_bounds",))

    def _draft_limit(self, limit: int | None) -> int:
        return self.max_draft_tokens if limit is None else limit

    def _command(self, opcode: int, slot: int, value: int = 0) -> None:
        ring = self._arrays["command_ring"]
        ring[self._num_commands % len(ring)] = (opcode, slot, value, 0)
        self._num_commands += 1
        self._host.send(("command_ring",))
        self._arrays["command_tail"][0] = self._num_commands  # the last: a step may be reading
        self._host.send(("command_tail",))

    def write_partial(self, span: tuple[int, int], shifts: Sequence[int], start: int) -> None:
        """Write what SpecPV adds to a chunk from position `start` on: positions of new keys, and what the lists of all
        slots leave out; nothing without it."""
        for name, values in zip(self._partial, (span, shifts, start), strict=False):
            self._arrays[name][:] = values
        self._host.send(self._partial)

    def masks_wanted(self, slot: int, length: int) -> bool:
        """Whether the masks of a slot's rows after so many committed tokens were not sent yet."""
        return bool(self._arrays["grammar_ready"][slot] < length)

    def rows_told(self, slot: int, length: int) -> bool:
        """Whether the device has told the rows that the slot's step verifies after so many committed tokens."""
        self._host.fetch(ROWS)
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
        self._host.send(MASKS[:1])
        self._arrays["grammar_ready"][slot] = length  # the last: a draw may be waiting
        self._host.send(MASKS[1:])

    def force_drafts(self, slot: int, tokens: Sequence[int], length: int) -> None:
        """Let a slot's step after so many committed tokens begin, and verify these in place of its drafts, if any."""
        forced = self._arrays["grammar_forced"]
        if tokens:
            forced[slot, 1 : len(tokens) + 1] = tokens
        if tokens or forced[slot, 0]:
            forced[slot, 0] = len(tokens)
            self._host.send(FORCED[:1])
        self._arrays["grammar_decided"][slot] = length  # the last: a step may be waiting to begin
        self._host.send(FORCED[1:])

    def num_forced(self, slot: int, length: int) -> int:
        """Tokens that were forced of a slot after so many committed tokens; 0 where that was not said yet."""
        decided = self._arrays["grammar_decided"][slot] == length
        return int(self._arrays["grammar_forced"][slot, 0]) if decided else 0

    def release(self, slot: int) -> None:
        """Let a slot's steps wait for its grammar no more: their tokens are dropped.

        Its masks and forced tokens stay as they are: some GPUs may have read them, and others still will.
        """
        released = (*MASKS[1:], *FORCED[1:])
        for name in released:
            self._arrays[name][slot] = NEVER
        self._host.send(released)

    def take_over(self, slot: int, table: Sequence[int]) -> None:
        """A request comes into a slot by its rows: commands to who had the slot before have no effect any more.

        table  its blocks by position, by which steps are checked
        Its steps wait for nothing of the host's, until it says otherwise. None may be under way.
        """
        ring = self._arrays["command_ring"]
        ring[ring[:, 1] == slot] = 0
        _fill(self._arrays["staged_table"][slot], table, 0)
        self._host.send(("command_ring", "staged_table"))
        self.force_drafts(slot, (), NEVER)
        self.release(slot)

    def want_masks(self, slot: int) -> None:
        """Let a slot's steps wait for the masks of its rows."""
        self._arrays["grammar_ready"][slot] = 0
        self._host.send(MASKS[1:])

    def write_chunk(
        self,
        slot: int,
        tokens: Sequence[int],
        start: int,
        commands: Mapping[str, Sequence[int]],
    ) -> None:
        """Write what prefill reads: `tokens` from position `start` on, all of which are live rows.

        commands  what the books of the slot's states say of it, by buffer; steps of the slot go on with the tables
        """
        arrays, count = self._arrays, len(tokens)
        for name in self._chunk_commands:
            _fill(arrays[name][0], commands[name], 0)
        self._host.send(self._chunk_commands)
        _fill(arrays["prefill_tokens"], tokens, 0)
        arrays["prefill_chunk"][:] = (start, count)
        arrays["prefill_slot"][0], arrays["prefill_count"][0] = slot, count
        rows = np.arange(len(arrays["prefill_tokens"]))
        arrays["prefill_live"][:] = rows < count
        # row i of a draft model takes token i and the target's feature at i - 1
        arrays["prefill_draft_live"][:] = (rows < count) & (rows + start >= 1)
        arrays["prefill_positions"][:] = rows + start
        arrays["prefill_draft_positions"][:] = np.maximum(rows + start - 1, 0)
        self._host.send(tuple(f"prefill_{part}" for part in PREFILL))

    def ask_prompt(self, prompt: Sequence[int], start: int, count: int, num_top: int | None) -> int:
        """Write what passes over `count` positions from `start` on read; returns how many passes that takes.

        num_top  likeliest tokens that are wanted; None: nothing is, which takes none
        """
        if num_top is None:
            return 0
        targets = self._arrays["prompt_targets"]
        _fill(targets, prompt[start + 1 : start + count + 1], -1)
        self._arrays["prompt_ints"][0, NUM_LOGPROBS] = num_top
        self._host.send(ASKED)
        return -(-count // min(PASS_ROWS, len(targets)))

    def read_prompt(self, prompt: Sequence[int], start: int, count: int, num_top: int | None) -> PromptLogprobs | int:
        """The logprobs of the tokens after the positions, by these passes; where logits were not finite, the first such
        position, from `start` on."""
        self._host.fetch(ANSWERED)
        count, top = min(count, len(prompt) - start - 1), slice(1, 1 + (num_top or 0))
        values, ids, ranks = (self._arrays[name][:count] for name in ANSWERED)
        broken = np.flatnonzero(ids[:, 0] < 0)
        if len(broken):
            return int(broken[0])
        own = (_packed(ids[:, 0]), _packed(values[:, 0]), _packed(ranks), _packed(ids[:, top]), _packed(values[:, top]))
        return PromptLogprobs(num_top or 0, own)

    def poll(self) -> list[Entry]:
        """The entries of the ring that were not seen yet, in order; `read` them in this order, too."""
        self._host.fetch(READ if CHECKS not in self._arrays else (*READ, CHECKS))
        head = int(self._head[0])
        entries = []
        for number in range(self.num_seen, head):
            entries.append(Entry(number, self._records[number % self.num_entries].tolist(), self._failed(number)))
        self.num_seen = head
        return entries

    def _failed(self, number: int) -> tuple[FailedCheck, ...]:
        """The checks that failed in an entry's step, by slot, last those of no slot."""
        if CHECKS not in self._arrays:
            return ()
        rows = self._arrays[CHECKS][number % self.num_entries]
        slots = (*range(len(rows) - 1), -1)
        found = ((slot, rows[slot].tolist()) for slot in slots if rows[slot, CODE])
        return tuple(FailedCheck.of(slot, row) for slot, row in found)

    def read(self, entry: Entry) -> list[SlotPublication]:
        """The publication of each slot in an entry; the step may then write over it."""
        place = entry.number % self.num_entries
        rows = enumerate(entry.records)
        publications = [self._read_slot(place, row, record) for row, record in rows if record[SLOT] >= 0]
        self._num_read = entry.number + 1
        return [*publications, *map(_of_failure, (each for each in entry.failed if each.slot >= 0))]

    def _read_slot(self, place: int, row: int, record: list[int]) -> SlotPublication:
        arrays, count = self._arrays, record[COMMITTED]
        ids = arrays["ring_logprob_ids"][place, row]
        logprobs = None
        if count and ids[0, 0] >= 0:
            values = arrays["ring_logprob_values"][place, row, :count].tolist()
            logprobs = tuple(_token_logprobs(i, v) for i, v in zip(ids[:count].tolist(), values, strict=True))
        return SlotPublication(
            slot=record[SLOT],
            token_ids=tuple(arrays["ring_tokens"][place, row, :count].tolist()),
            finish_reason=FINISH_REASONS.get(record[FINISH]),
            verified=record[VERIFIED],
            verified_depth=record[VERIFIED_DEPTH],
            verified_source=record[VERIFIED_SOURCE],
            accepted=record[ACCEPTED],
            length=record[LENGTH_AFTER],
            logprobs=logprobs,
        )


def _of_failure(failure: FailedCheck) -> SlotPublication:
    """The publication of a slot of which a step gives nothing but a failed check."""
    reason: FinishReason | None = "error" if failure.ends else None
    return SlotPublication(failure.slot, (), reason, 0, 0, NO_SOURCE, 0, 0, None, failure)


class _HostView:
    """Buffers as numpy arrays: views of host memory, copies of what lies on a device.

    A copy goes to the device by `send`, and comes from there by `fetch`; both wait for it.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor]) -> None:
        held = {name: tensor if tensor.device.type == "cpu" else tensor.cpu() for name, tensor in buffers.items()}
        self.arrays: dict[str, np.ndarray[Any, Any]] = {name: tensor.numpy() for name, tensor in held.items()}
        self._copied = {name: (buffers[name], held[name]) for name in held if held[name] is not buffers[name]}
        self.num_copies = 0

    def send(self, names: Sequence[str]) -> None:
        """Bring what was written to the device."""
        if self._copied:
            for name in names:
                if name in self._copied:
                    there, here = self._copied[name]
                    there.copy_(here)
                    self.num_copies += 1

    def fetch(self, names: Sequence[str]) -> None:
        """Bring what the device has written."""
        if self._copied:
            for name in names:
                if name in self._copied:
                    there, here = self._copied[name]
                    here.copy_(there)
                    self.num_copies += 1


def _token_logprobs(ids: list[int], values: list[float]) -> TokenLogprobs:
    top = tuple((token, value) for token, value in zip(ids[1:], values[1:], strict=True) if token >= 0)
    return TokenLogprobs(ids[0], values[0], top)


def _packed(numbers: np.ndarray[Any, Any]) -> bytes:
    """Numbers, little-endian, in order."""
    return numbers.astype(numbers.dtype.newbyteorder("<")).tobytes()


def _fill(target: np.ndarray[Any, Any], values: Sequence[float], pad: float) -> None:
    target[: len(values)] = values
    target[len(values) :] = pad
