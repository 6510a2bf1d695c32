"""`SamplingOptions` names the options of a request with their types, for type checkers and editors."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypedDict

from lowlat.ipc.messages import Parse

__all__ = ["SamplingOptions"]


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen and when the request ends; lowlat.SamplingParams explains each field.

    Several values are a list, tuple or set. Where texts are expected, one text alone is also accepted.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop_token_ids: Collection[int]
    stop: str | Collection[str]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    max_draft_tokens: int | None
    json_schema: str | Mapping[str, Any] | None
    json_object: bool
    regex: str | None
    grammar: str | None
    choice: str | Collection[str]
    tool_calls: str | Mapping[str, Any] | None
    parse: Parse
    tools: str | Sequence[Mapping[str, Any]] | None
    prompt_logprobs: int | None
    priority: int
    draft_texts: str | Collection[str | Sequence[int]]
