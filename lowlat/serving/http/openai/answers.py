"""Answers in choices, as chats and completions have them: as a stream, and as a whole."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from lowlat.errors import StreamError
from lowlat.ipc.client import Chunk
from lowlat.ipc.messages import TokenLogprob
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.serving.http.openai.logprobs import CompletionLogprobs
from lowlat.serving.http.openai.schema import Choosing
from lowlat.serving.http.streaming import DONE, event

__all__ = ["Choice", "ChoicesAnswer", "finish_reason", "seeded", "usage_of"]


class Choice:
    """One choice, as far as it has come; of a stream, only what its end needs is kept."""

    def __init__(self) -> None:
        self.begun = False
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.num_calls = 0
        self.logprobs: list[TokenLogprob] = []
        self.lists = CompletionLogprobs()
        self.prompt: PromptLogprobs | None = None
        self.echo: str | None = None  # the prompt's text, which goes before the content; "": that of its tokens
        self.token_ids: list[int] = []
        self.accepted: list[bool] = []
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.metrics: dict[str, Any] = {}


class ChoicesAnswer(ABC):
    """An answer in choices.

    kind  of the whole and of a stream's chunks: the field `object`
    """

    def __init__(self, prefix: str, kind: tuple[str, str], asked: Choosing, num_prompts: int = 1) -> None:
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._lowlat = asked.lowlat
        self._num_wanted = asked.n or 1
        self._choices = [Choice() for _ in range(num_prompts * self._num_wanted)]
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind[1 if asked.stream else 0],
            "created": int(time.time()),
            "model": asked.model,
        }

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
        elif not fields and not self._lowlat:
            return b""
        body: dict[str, Any] = {
            **self._head,
            "choices": [{"index": place, "logprobs": None, **fields, "finish_reason": choice.finish_reason}],
        }
        if self._usage:
            body["usage"] = None
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
        choice.content.append(chunk.text)
        choice.logprobs += chunk.logprobs or ()
        choice.prompt = chunk.prompt_logprobs or choice.prompt
        self.take_part(choice, chunk)
        if chunk.finish_reason is not None:
            self._end(choice, chunk)
        elif self._lowlat:
            tokens = _lowlat(chunk)
            choice.token_ids += tokens["token_ids"]
            choice.accepted += tokens["accepted"]

    def body(self) -> dict[str, Any]:
        """See `streaming.Answer`."""
        choices = []
        for place, choice in enumerate(self._choices):
            shown = {"index": place, **self.whole(choice), "finish_reason": choice.finish_reason}
            if self._lowlat:
                shown["lowlat"] = {
                    "token_ids": choice.token_ids,
                    "accepted": choice.accepted,
                    "metrics": choice.metrics,
                }
            choices.append(shown)
        return {**self._head, "choices": choices, "usage": self._used()}

    def _end(self, choice: Choice, chunk: Chunk) -> None:
        choice.metrics = chunk.metrics or {}
        choice.finish_reason = finish_reason(chunk, called=bool(choice.num_calls))

    def _used(self) -> dict[str, Any]:
        prompts = [choice.metrics for choice in self._choices[:: self._num_wanted]]
        return usage_of(prompts, sum(choice.num_tokens for choice in self._choices))


def _lowlat(chunk: Chunk) -> dict[str, Any]:
    """The field `lowlat` of a chunk: its tokens and which of them were accepted drafts; in the last one metrics."""
    if chunk.finish_reason is not None:
        return {"metrics": chunk.metrics}
    return {"token_ids": chunk.token_ids, "accepted": chunk.accepted or (False,) * len(chunk.token_ids)}


def finish_reason(chunk: Chunk, *, called: bool = False) -> str:
    """OpenAI's name for the end of a choice. Raises StreamError for one that was cut off."""
    if chunk.finish_reason == "stop" and called:
        return "tool_calls"
    if chunk.finish_reason in ("stop", "length"):
        return chunk.finish_reason
    raise StreamError("the server cancelled the request", code=chunk.code or "cancelled")


def seeded(sampling: dict[str, Any], place: int) -> dict[str, Any]:
    """Sampling of one of several choices: each has a seed of its own, the first the one that was asked for."""
    return sampling if "seed" not in sampling or not place else sampling | {"seed": sampling["seed"] + place}


def usage_of(prompts: Sequence[Mapping[str, Any]], num_completion: int) -> dict[str, Any]:
    """An answer's `usage`: the metrics of one request a prompt, and the tokens of all requests."""
    num_prompt = sum(metrics.get("prompt_tokens", 0) for metrics in prompts)
    num_cached = sum(metrics.get("cached_prompt_tokens", 0) for metrics in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
