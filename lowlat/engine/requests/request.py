"""A request has its caller's parameters, its slot and blocks, and its tokens so far.

It turns a step's publication into the caller's output: text, stop strings, ends.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lowlat.engine.mailbox.publications import SlotPublication
from lowlat.engine.metrics import RequestMetrics, SpeculativeDecodingStats
from lowlat.engine.requests.prompt_logprobs import PromptLogprobsSoFar
from lowlat.engine.requests.times import RequestTimes
from lowlat.engine.scheduling.records import ScheduledRequest
from lowlat.engine.sessions.book import SessionRecord
from lowlat.errors import RequestError
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.kernels.reference.step.slots import FORCED_DRAFTS, FROM_METHOD, FROM_TEXT
from lowlat.options.request import ErrorCode, FinishReason, SamplingParams, StepOutput, TokenLogprobs, ToolCallDelta
from lowlat.speculators.base import Speculator
from lowlat.text import AnswerDelta, AnswerStream, TextCodec, tools_of
from lowlat.text.grammar.state import GrammarState

__all__ = ["FROM_PART", "Opening", "Request"]

FROM_PART = 4  # a source of drafts besides the device's own: SpecPV's steps over a part of the cache


@dataclass
class Opening:
    """The part of a request for an open prompt.

    arrival         its arrival number
    scheduled       its record for the scheduler while the prompt is open
    max_prompt      the most tokens of the prompt
    num_certain     tokens of the prompt that later text cannot change; all of them before `finish`
    is_speculative  whether the prompt was finished on trial
    """

    arrival: int
    scheduled: ScheduledRequest
    max_prompt: int
    num_certain: int = 0
    is_speculative: bool = False


class Request:
    """A live request.

    `committed` holds prompt and completion, `num_written` bounds the KV certainly written, and `first_entry` is the
    first entry of the ring that can be about it. `failed_checks` are the kinds of its checks that failed, and `drafts`
    is false after one that it survived. `draft_texts` are those that it drafts from next to its own, -1 after each. The
    prompt of an open request is a list that grows; `opening` says more of it. `withheld` has the outputs of one that
    was finished on trial, and `has_left` says that it has ended with them.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        stop_ids: tuple[int, ...],
        codec: TextCodec | None,
        speculator: Speculator | None,
        simulated: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.seed = seed
        self.stop_ids = stop_ids
        self.grammar: GrammarState | None = None
        self.session: SessionRecord | None = None
        self.slot = -1
        self.table: Sequence[int] = ()
        self.commands: Mapping[str, Sequence[int]] = {}
        self.committed = list(prompt)
        self.num_written = 0  # positions before the last step's: that step may not have extended the draft model's KV
        self.first_entry = 0
        self.num_partial_steps = 0  # with SpecPV
        self.failed_checks: tuple[str, ...] = ()
        self.drafts = True
        self.opening: Opening | None = None
        self.withheld: list[StepOutput] = []
        self.has_left = False
        self.draft_texts: tuple[int, ...] = ()
        self.simulated = simulated
        own = ("", "") if speculator is None else speculator.draft_sources
        numbers = (FROM_METHOD, FROM_TEXT, FORCED_DRAFTS, FROM_PART)
        self._sources = dict(zip(numbers, (*own, "grammar", "specpv"), strict=True))
        self.finish_reason: FinishReason | None = None
        self._num_steps = 0
        self._num_cached = 0
        self._num_reasoning = 0
        self._most_cached: int | None = None  # where what was read of its prompt before was its own
        self._stats = SpeculativeDecodingStats(simulated=simulated)
        self._times = RequestTimes()
        self._prompt_logprobs = PromptLogprobsSoFar(codec)
        self._codec = codec
        self._text: AnswerStream | None = None
        if codec is not None:
            self._text = AnswerStream(
                codec,
                params.parse,
                stop=params.stop,
                prefix_ids=prompt,
                stop_enabled_after=params.min_tokens,
                tools=tools_of(params),
            )

    def place(self, slot: int, table: Sequence[int], num_cached: int) -> None:
        """Record the slot and blocks from the scheduler; the blocks hold num_cached tokens' KV already."""
        self.slot, self.table = slot, table
        self._num_cached = num_cached if self._most_cached is None else min(num_cached, self._most_cached)
        self._times.placed = time.monotonic()

    def take_over_from(self, other: "Request") -> None:
        """Take over the slot and the prefilled part of the prompt from the open request that this one replaces."""
        self.slot, self.table, self._num_cached = other.slot, other.table, other._num_cached
        self._times.placed = None if other._times.placed is None else self._times.submitted
        self._prompt_logprobs = other._prompt_logprobs
        self.commands = other.commands

    def undo_trial(self, other: "Request") -> None:
        """Take the place of a request that was finished on trial: of what that has read nothing counts as cached."""
        self._most_cached = other._most_cached if other._times.placed is None else other._num_cached

    def displace(self, *, decoded: bool) -> None:
        """Record that it lost its slot; a request that did not decode yet prefills its prompt again."""
        self.slot, self.table = -1, ()
        if not decoded:
            self._prompt_logprobs.clear()

    def add_prompt(self, part: PromptLogprobs | int, start: int) -> str | None:
        """Take the logprobs of the prompt's next tokens; returns why it cannot go on, of a position without any."""
        if isinstance(part, int):
            return f"logits at position {start + part + 1} are not finite"
        self._prompt_logprobs.add(part, self.prompt[0])
        return None

    @property
    def has_begun(self) -> bool:
        """Whether it has its first token; later tokens come from decode steps."""
        return self._times.prefilled is not None

    @property
    def num_remaining(self) -> int:
        """Tokens that it may still get."""
        return len(self.prompt) + self.params.max_tokens - len(self.committed)

    @property
    def draft_limit(self) -> int | None:
        """Drafts that its steps may verify, as in SamplingParams."""
        return self.params.max_draft_tokens if self.drafts else 0

    def num_remaining_after(self, num_steps: int, depth: int) -> int:
        """Tokens that it may still get, at least, after a number of steps of a draft length."""
        limit = self.draft_limit
        most = 1 + (depth if limit is None else min(depth, limit))
        remaining = 1 if self.grammar is not None and self.grammar.terminated else self.num_remaining
        return remaining - most * num_steps

    def describe(self, phase: str) -> dict[str, Any]:
        """Its slot, phase, tokens of prompt and completion, and the limit on both, as JSON."""
        return {
            "slot": self.slot,
            "request_id": self.request_id,
            "phase": phase,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.committed) - len(self.prompt),
            "max_tokens": self.params.max_tokens,
        }

    def metrics(self) -> RequestMetrics:
        """Its figures as they stand now; one that was finished on trial has not ended, whatever its answer did."""
        return RequestMetrics(
            request_id=self.request_id,
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.committed) - len(self.prompt),
            reasoning_tokens=self._num_reasoning,
            cached_prompt_tokens=self._num_cached,
            **self._times.durations(),
            num_steps=self._num_steps,
            finish_reason=self.finish_reason if self.opening is None else None,
            seed=self.seed,
            speculation=self._stats,
            num_partial_steps=self.num_partial_steps,
            failed_checks=dict(Counter(self.failed_checks)),
        )

    def take(self, publication: SlotPublication, problem: str | None = None) -> StepOutput:
        """Add a step's tokens; a stop string found in their text drops the tokens after it and ends the request.

        problem  the message, if an error ends it; None: its logits are not finite
        A text that the tokenizer fails to decode ends the request with an error of the code "text".
        """
        tokens, reason = publication.token_ids, publication.finish_reason
        error_code: ErrorCode = "grammar" if problem else "not_finite"
        deltas: list[AnswerDelta] = []
        stopped = None
        try:
            if self._text is not None:
                deltas.append(self._text.push(tokens))
                self._num_reasoning = self._text.num_reasoning_tokens
                stopped = deltas[0].stopped
                if stopped is not None:
                    tokens, reason = tokens[: deltas[0].num_tokens_used], "stop"
                elif reason is not None:
                    deltas.append(self._text.finish())
                    stopped = deltas[1].stopped
                    reason = reason if stopped is None else "stop"
        except RequestError as failure:
            # without text from here on: what is held back cannot be decoded
            self._text, reason, problem, error_code = None, "error", str(failure), "text"
        self.num_written = len(self.committed) - 1
        self.committed.extend(tokens)
        num_accepted = self._count(publication, len(tokens))
        stop_reason: str | int | None = stopped
        if stopped is None and reason == "stop" and tokens and tokens[-1] in self.stop_ids:
            stop_reason = tokens[-1]
        error = None
        if reason == "error":
            error = problem or f"logits at position {len(self.committed)} are not finite"
        logprobs = publication.logprobs
        if logprobs is not None:
            logprobs = tuple(map(self._with_texts, logprobs[: len(tokens)]))
        return self.output(
            tokens,
            reason,
            deltas=deltas,
            stop_reason=stop_reason,
            logprobs=logprobs,
            error=error,
            error_code=None if error is None else error_code,
            num_accepted=num_accepted,
        )

    def _with_texts(self, logprob: TokenLogprobs) -> TokenLogprobs:
        if self._codec is None:
            return logprob
        ids = (logprob.token_id, *(token for token, _ in logprob.top))
        return replace(logprob, texts=tuple(map(self._codec.token_bytes, ids)))

    def _count(self, publication: SlotPublication, num_tokens: int) -> int:
        """Count a step, or a first token; returns how many of its tokens were accepted drafts."""
        now = time.monotonic()
        if not self.has_begun:
            self._times.prefilled = now  # the first token comes from prefill, not from a decode step
        else:
            self._num_steps += 1
        # drafts after a stop string were dropped with their tokens: they count as rewound
        accepted = min(publication.accepted, num_tokens)
        depth, source = publication.verified_depth, self._sources.get(publication.verified_source)
        self._stats.record(publication.verified, accepted, drafted_depth=depth, source=source)
        if num_tokens:
            self._times.saw_tokens(now)
        return accepted

    def output(
        self,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        *,
        deltas: Sequence[AnswerDelta] = (),
        stop_reason: str | int | None = None,
        logprobs: tuple[TokenLogprobs, ...] | None = None,
        error: str | None = None,
        error_code: ErrorCode | None = None,
        num_accepted: int = 0,
    ) -> StepOutput:
        """Make the caller's output. A reason ends the request; a request that is cut off gets the text held back."""
        self.finish_reason = reason
        if reason in ("cancelled", "error") and not deltas and self._text is not None:
            with suppress(RequestError):  # it ends by another reason already
                deltas = (self._text.finish(),)
        tool_calls: tuple[ToolCallDelta, ...] = ()
        for delta in deltas:
            tool_calls += delta.tool_calls
        return StepOutput(
            request_id=self.request_id,
            token_ids=tokens,
            finish_reason=reason,
            text="".join(delta.text for delta in deltas) if deltas else None,
            stop_reason=stop_reason,
            logprobs=logprobs,
            error=error,
            error_code=error_code,
            simulated=self.simulated,
            num_accepted=num_accepted,
            reasoning="".join(delta.reasoning for delta in deltas),
            tool_calls=tool_calls,
            prompt_logprobs=self._prompt_logprobs.take() if self.has_begun else None,
        )
