"""This module makes the answers of chats and completions, which have choices: as a stream, and as a whole."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from lowlat.errors import StreamError
from lowlat.ipc.client import Chunk
from lowlat.ipc.messages import TokenLogprob, Welcome
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.serving.http.openai.logprobs import CompletionLogprobs
from lowlat.serving.http.openai.schema import SEEDS, Choosing
from lowlat.serving.http.streaming import DONE, event

__all__ = ["Choice", "ChoicesAnswer", "fingerprint", "finish_reason", "reasoning_tokens", "seeded", "usage_of"]


class Choice:
    """One choice so far; for a stream it keeps only what the end needs."""

    def __init__(self) -> None:
        self.begun = False
        self.named = False  # its role was sent, or its prompt echoed
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.num_calls = 0
        self.logprobs: list[TokenLogprob] = []
        self.lists = CompletionLogprobs()
        self.prompt: PromptLogprobs | None = None
        self.echo: str | None = None  # the prompt's text, which precedes the content; "": use its tokens' text
        self.token_ids: list[int] = []
        self.accepted: list[bool] = []
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.metrics: dict[str, Any] = {}


class ChoicesAnswer(ABC):
    """An answer in choices.

    NOTHING             the fields of a choice in a stream's chunk that adds nothing
    PROMPTS_IN_CHOICES  each choice shows the token ids of its prompt
    kind                of the whole and of a stream's chunks: the field `object`
    prompt_ids          token ids of the prompts, where they are known before the answer
    """

    NOTHING: Mapping[str, Any] = {}
    PROMPTS_IN_CHOICES = False

    def __init__(
        self,
        prefix: str,
        kind: tuple[str, str],
        asked: Choosing,
        fingerprint: str | None,
        num_prompts: int = 1,
        prompt_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        options = asked.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._usages = options is not None and bool(options.continuous_usage_stats)
        self._lowlat = bool(asked.lowlat)
        self._ids = bool(asked.return_token_ids)
        self._prompt_ids = prompt_ids
        self._num_wanted = asked.n or 1
        self._choices = [Choice() for _ in range(num_prompts * self._num_wanted)]
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind[1 if asked.stream else 0],
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": fingerprint,
        }
        if asked.service_tier is not None:
            self._head["service_tier"] = "default"

    @abstractmethod
    def part(self, choice: Choice, chunk: Chunk) -> dict[str, Any]:
        """The fields of a choice in a stream's chunk; {} where the chunk adds nothing."""

    @abstractmethod
    def take_part(self, choice: Choice, chunk: Chunk) -> None:
        """Add to the whole what is particular to this kind of answer."""

    @abstractmethod
    def whole(self, choice: Choice) -> dict[str, Any]:
        """The fields of a choice that has ended."""

    def events(self, place: int, chunk: Chunk) -> bytes:
        """See `streaming.Answer`."""
        choice = self._choices[place]
        choice.num_tokens += len(chunk.token_ids)
        fields = self.part(choice, chunk)
        if chunk.finish_reason is not None:
            self._end(choice, chunk)
        elif not fields and not self._lowlat and not self._ids:
            return b""
        shown = {"index": place, "logprobs": None, **(fields or self.NOTHING), "finish_reason": choice.finish_reason}
        body: dict[str, Any] = {**self._head, "choices": [shown]}
        if self._usages:
            body["usage"] = self._used_until_now()
        elif self._usage:
            body["usage"] = None
        if self._ids:
            shown["token_ids"] = chunk.token_ids
            if not choice.begun:
                self._show_prompt(body, shown, place)
        choice.begun = True
        if self._lowlat:
            body["lowlat"] = _lowlat(chunk)
        return event(body)

    def last_events(self) -> bytes:
        """See `streaming.Answer`."""
        if not self._usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._used()}) + DONE

    def take(self, place: int, chunk: Chunk) -> None:
        """See `streaming.Answer`."""
        choice = self._choices[place]
        choice.num_tokens += len(chunk.token_ids)
        choice.logprobs += chunk.logprobs or ()
        choice.prompt = chunk.prompt_logprobs or choice.prompt
        self.take_part(choice, chunk)
        if self._lowlat or self._ids:
            choice.token_ids += chunk.token_ids
            choice.accepted += chunk.accepted or (False,) * len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._end(choice, chunk)

    def body(self) -> dict[str, Any]:
        """See `streaming.Answer`."""
        body: dict[str, Any] = {**self._head, "choices": [], "usage": self._used()}
        for place, choice in enumerate(self._choices):
            shown = {"index": place, **self.whole(choice), "finish_reason": choice.finish_reason}
            if self._ids:
                shown["token_ids"] = choice.token_ids
                self._show_prompt(body, shown, place)
            if self._lowlat:
                shown["lowlat"] = {
                    "token_ids": choice.token_ids,
                    "accepted": choice.accepted,
                    "metrics": choice.metrics,
                }
            body["choices"].append(shown)
        return body

    def _show_prompt(self, body: dict[str, Any], shown: dict[str, Any], place: int) -> None:
        """Put the prompt's token ids where vLLM has them: next to the choices, or in each where prompts are several."""
        where = shown if self.PROMPTS_IN_CHOICES else body
        where["prompt_token_ids"] = self._prompt_ids[place // self._num_wanted]

    def _end(self, choice: Choice, chunk: Chunk) -> None:
        choice.metrics = chunk.metrics or {}
        choice.finish_reason = finish_reason(chunk, called=bool(choice.num_calls))

    def _used(self) -> dict[str, Any]:
        prompts = [choice.metrics for choice in self._choices[:: self._num_wanted]]
        num_reasoning = sum(map(reasoning_tokens, (choice.metrics for choice in self._choices)))
        return usage_of(prompts, sum(choice.num_tokens for choice in self._choices), num_reasoning)

    def _used_until_now(self) -> dict[str, int]:
        num_prompt = sum(map(len, self._prompt_ids))
        num_completion = sum(choice.num_tokens for choice in self._choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
        }


def _lowlat(chunk: Chunk) -> dict[str, Any]:
    """The field `lowlat` of a chunk: its tokens and which of them were accepted drafts; in the last one metrics."""
    if chunk.finish_reason is not None:
        return {"metrics": chunk.metrics}
    return {"token_ids": chunk.token_ids, "accepted": chunk.accepted or (False,) * len(chunk.token_ids)}


def finish_reason(chunk: Chunk, *, called: bool = False) -> str:
    """Return OpenAI's name for the end of a choice. Raises StreamError for one that was cut off."""
    if chunk.finish_reason == "stop" and called:
        return "tool_calls"
    if chunk.finish_reason in ("stop", "length"):
        return chunk.finish_reason
    raise StreamError("the server cancelled the request", code=chunk.code or "cancelled")


def seeded(sampling: dict[str, Any], place: int) -> dict[str, Any]:
    """Return the sampling of one of several choices: choice i has the request's seed plus i."""
    if "seed" not in sampling or not place:
        return sampling
    return sampling | {"seed": (sampling["seed"] + place) % SEEDS}


def usage_of(prompts: Sequence[Mapping[str, Any]], num_completion: int, num_reasoning: int) -> dict[str, Any]:
    """Return an answer's `usage`, from the metrics of one request for each prompt, and the tokens of all requests."""
    num_prompt = sum(metrics.get("prompt_tokens", 0) for metrics in prompts)
    num_cached = sum(metrics.get("cached_prompt_tokens", 0) for metrics in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }


def reasoning_tokens(metrics: Mapping[str, Any]) -> int:
    """Return the number of a request's reasoning tokens; the server counts them, as a chunk may have text, too."""
    return int(metrics.get("reasoning_tokens", 0))


def fingerprint(server: Welcome) -> str | None:
    """Return system_fingerprint: `fp_` and the runtime's digest of all that decides the bits of results, if it has one.

    With one model, equal fingerprints mean equal tokens for equal prompts, seeds and sampling.
    """
    return None if server.numerics is UNSET else f"fp_{server.numerics}"
