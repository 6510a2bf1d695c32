"""This module defines the bodies of chats and completions: the supported fields of OpenAI, and lowlat's own.

A field of the type None is not supported: null is accepted, any other value is refused by name. Unknown fields are
refused, too.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lowlat.ipc.messages import MAX_SALT
from lowlat.options.request import MAX_LOGPROBS
from lowlat.serving.http.errors import ApiError

__all__ = [
    "MAX_CHOICES",
    "AllowedTools",
    "ChatMessage",
    "ChatRequest",
    "Choosing",
    "CompletionRequest",
    "ContentPart",
    "FunctionCall",
    "Generating",
    "GrowingChatRequest",
    "GrowingCompletionRequest",
    "JsonSchema",
    "NamedTool",
    "ResponseFormat",
    "ServiceTier",
    "StreamOptions",
    "StructuredOutputs",
    "Tool",
    "ToolCall",
    "check_growing",
    "unsupported",
]

MAX_CHOICES = 128  # OpenAI's
SEEDS = 1 << 63  # the server's range of seeds; others wrap
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """The parts of a stream next to the answer; obfuscation (random padding against traffic analysis) is never sent.

    continuous_usage_stats  vLLM's: usage in every chunk
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(Struct, forbid_unknown_fields=True):
    """A schema of answers, by a name of the caller's."""

    name: Annotated[str, Meta(max_length=256)] = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """The form of a chat's answer: text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """vLLM's field for answers that are bound to a grammar; one of these."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


class Generating(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that every kind of request has.

    user to metadata            labels for a service's own books; nothing here depends on them
    prompt_cache_*              advice to a cache that needs none
    service_tier                there is one, "default"
    lowlat                      adds `lowlat` to the answer: token ids, which of them were accepted drafts, and in the
                                end the request's metrics
    structured_outputs          as vLLM has it
    cache_salt                  as vLLM has it: a cached prefix is shared only among requests with the same
    top_k to draft_texts        as in lowlat.SamplingParams; a top_k of -1 is vLLM's for all tokens
    """

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    service_tier: ServiceTier | None = None
    store: Literal[False] | None = None
    moderation: None = None
    lowlat: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    max_draft_tokens: int | None = None
    priority: int | None = None
    draft_texts: list[str | list[int]] | None = None

    def sampling(self, advice: Mapping[str, float]) -> dict[str, Any]:
        """Sampling options by the server's names, those that are given; the temperature is OpenAI's where neither the
        request nor the model's advice, `Welcome.advice`, has one."""
        values = {name: getattr(self, name) for name in ("temperature", "top_p", *_OWN)}
        if values["top_k"] == -1:
            values["top_k"] = 0
        if values["top_p"] == 0:  # the smallest set: only the likeliest token
            values |= {"top_p": None, "top_k": 1}
        own = {} if "temperature" in advice else {"temperature": 1.0}
        return own | {name: value for name, value in values.items() if value is not None}


_OWN = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "max_draft_tokens",
    "priority",
    "draft_texts",
)


class Choosing(Generating, kw_only=True):
    """The fields that chats and completions share.

    prompt_logprobs   as vLLM has it
    return_token_ids  as vLLM has it: the token ids of prompt and answer
    """

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether the answer needs the prompt's token ids before it ends."""
        options = self.stream_options
        return bool(self.return_token_ids) or (options is not None and bool(options.continuous_usage_stats))

    def sampling(self, advice: Mapping[str, float]) -> dict[str, Any]:
        """See Generating; adds the fields of this class. Raises ApiError for a logit_bias key that is no token id, and
        for stream_options without `stream`.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs", "an answer that is streamed has none; leave stream out")
        names = ("stop", "presence_penalty", "frequency_penalty", "prompt_logprobs")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.seed is not None:
            values["seed"] = self.seed % SEEDS
        if self.logit_bias:
            values["logit_bias"] = _biases(self.logit_bias)
        return super().sampling(advice) | values


class ContentPart(Struct):
    """A part of a message's content; of kinds other than text only the kind is read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, forbid_unknown_fields=True):
    """The function of a tool call, its arguments as JSON text."""

    name: str
    arguments: str | None = None


class ToolCall(Struct, forbid_unknown_fields=True):
    """A tool call that an earlier answer held."""

    id: str
    function: FunctionCall
    type: Literal["function"] | None = None
    index: int | None = None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """A message; an answer may be sent back as it came, from this server or another of the kind.

    reasoning          another name of reasoning_content
    reasoning_details  reasoning once more, in parts
    annotations        of an earlier answer's text, for its reader
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[Any] | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class Function(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, forbid_unknown_fields=True):
    """The function that must be called."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The tool that must be called."""

    function: FunctionName


class AllowedSet(Struct, forbid_unknown_fields=True):
    """The tools that may be called, of those that are offered, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """A choice among the tools."""

    allowed_tools: AllowedSet


class ChatRequest(Choosing, kw_only=True):
    """The body of /v1/chat/completions.

    chat_template_kwargs  further variables of the model's template, such as enable_thinking
    tool_choice           "auto", "none", "required", the one function to call, or some of the tools
    continue_final_message, add_generation_prompt  as vLLM has them, but that the latter is false by default next to the
                          former: the last message, an assistant's, is left open, and the answer continues its text
    prediction            advice that changes no answer
    verbosity             a variable of the model's template
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: str | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    web_search_options: None = None


class CompletionRequest(Choosing, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None  # editors send it at a text's end


class GrowingChatRequest(ChatRequest, kw_only=True):
    """The first line of a chat whose last message is still being written; its content may hold a beginning.

    max_prompt_tokens  of the whole prompt at most, as in `Client.open_prompt`
    """

    max_prompt_tokens: int | None = None


class GrowingCompletionRequest(CompletionRequest, kw_only=True):
    """The first line of a completion whose prompt is still being written.

    prompt             its beginning
    max_prompt_tokens  of the whole prompt at most, as in `Client.open_prompt`
    """

    prompt: str | list[Any] = ""
    max_prompt_tokens: int | None = None


def check_growing(asked: Choosing) -> None:
    """Refuse fields that a prompt that is still being written does not support. Raises ApiError."""
    if asked.n not in (None, 1):
        raise unsupported("n", "a prompt that is still being written has one answer")
    if asked.needs_prompt_ids:
        name = "return_token_ids" if asked.return_token_ids else "stream_options.continuous_usage_stats"
        raise unsupported(name, "the gateway does not keep a prompt that is still being written")


def unsupported(param: str, why: str = "") -> ApiError:
    """Return the error for a parameter, or a value of it, that lowlat does not support."""
    words = f": {why}" if why else ""
    return ApiError(400, f"Unsupported parameter: {param}{words}", param=param, code="unsupported_parameter")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ApiError(400, f"logit_bias: {token!r:.40} is no token id", param="logit_bias", code="invalid_value")
        biases[int(token)] = bias
    return biases
