"""The bodies of requests: OpenAI's fields that lowlat serves, and its own; all others are refused by name."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from lowlat.serving.http.errors import ApiError

__all__ = [
    "ChatMessage",
    "ChatRequest",
    "Choosing",
    "CompletionRequest",
    "ContentPart",
    "Generating",
    "JsonSchema",
    "NamedTool",
    "ResponseFormat",
    "ResponsesRequest",
    "StreamOptions",
    "StructuredOutputs",
    "Tool",
    "decode",
    "unsupported",
]

MAX_CHOICES = 16
_AT = re.compile(r" - at (?:`key` in )?`\$\.?([^`]{0,200})`$")
_NAMED = re.compile(r"(unknown|required) field `([^`]{1,64})`")
Body = TypeVar("Body", bound=Struct)


class StreamOptions(Struct, forbid_unknown_fields=True):
    """The parts of a stream beside the answer; obfuscation (random padding against traffic analysis) is never sent."""

    include_usage: bool = False
    include_obfuscation: bool = False


class JsonSchema(Struct, forbid_unknown_fields=True):
    """A schema of answers, by a name of the caller's."""

    name: Annotated[str, Meta(max_length=256)] = ""
    schema: dict[str, Any] = {}
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

    user, safety_identifier, metadata   labels for a service's own books; nothing here depends on them
    lowlat                              adds `lowlat` to the answer: token ids, which of them were accepted drafts, and
                                        in the end the request's metrics
    structured_outputs                  as vLLM has it
    top_k to max_draft_tokens           as in lowlat.SamplingParams
    """

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    lowlat: bool = False
    structured_outputs: StructuredOutputs | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    max_draft_tokens: int | None = None

    def sampling(self, advice: Mapping[str, float]) -> dict[str, Any]:
        """Sampling options by the server's names, those that are given; the temperature is OpenAI's where neither the
        request nor the model's advice, `Welcome.advice`, has one."""
        values = {name: getattr(self, name) for name in ("temperature", "top_p", *_OWN)}
        own = {} if "temperature" in advice else {"temperature": 1.0}
        return own | {name: value for name, value in values.items() if value is not None}


_OWN = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "max_draft_tokens")


class Choosing(Generating, kw_only=True):
    """The fields that chats and completions share.

    prompt_logprobs  as vLLM has it
    """

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None

    def sampling(self, advice: Mapping[str, float]) -> dict[str, Any]:
        """See Generating; adds the fields of this class. Raises ApiError for a logit_bias key that is no token id, and
        for stream_options without `stream`.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs", "an answer that is streamed has none; leave stream out")
        names = ("stop", "seed", "presence_penalty", "frequency_penalty", "prompt_logprobs")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
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
    arguments: str = ""


class ToolCall(Struct, forbid_unknown_fields=True):
    """A tool call that an earlier answer held."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """A message; the last four fields are those of an answer that is sent back, and must be empty."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


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


class NamedTool(Struct, forbid_unknown_fields=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Choosing, kw_only=True):
    """The body of /v1/chat/completions.

    chat_template_kwargs  further variables of the model's template, such as enable_thinking
    tool_choice           "auto", "none", "required", or the one function to call
    """

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Choosing, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None


class InputItem(Struct, forbid_unknown_fields=True):
    """A message of /v1/responses."""

    role: str
    content: str | list[ContentPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    """How much the model is asked to think."""

    effort: str | None = None


class ResponsesFormat(JsonSchema):
    """The form of the answer of /v1/responses, where a schema's fields stand beside its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class ResponsesText(Struct, forbid_unknown_fields=True):
    """The field `text` of /v1/responses: the form of its text."""

    format: ResponsesFormat | None = None


class ResponsesRequest(Generating, kw_only=True):
    """The body of /v1/responses, of which text in and text out is served."""

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    reasoning: Reasoning | None = None
    text: ResponsesText | None = None
    truncation: Literal["disabled"] | None = None
    parallel_tool_calls: bool | None = None
    tools: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[str], Meta(max_length=0)] | None = None


def decode(decoder: "msgspec.json.Decoder[Body]", data: bytes) -> Body:
    """A body, checked. Raises ApiError that names the parameter."""
    try:
        return decoder.decode(data)
    except RecursionError:
        raise ApiError(400, "the body is nested too deep", code="nesting") from None
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no JSON: {error!s:.200}", code="json") from None


def unsupported(param: str, why: str) -> ApiError:
    """The refusal of a parameter, or of a value of it, that lowlat does not serve."""
    return ApiError(400, f"Unsupported parameter: {param}: {why}", param=param, code="unsupported_parameter")


def _refusal(message: str) -> ApiError:
    at = _AT.search(message[-300:])
    path = "" if at is None else at[1]
    named = _NAMED.search(message)
    if named is None:
        reason = message.partition(" - at ")[0][:300]
        return ApiError(400, f"{path or 'the body'}: {reason}", param=path or None, code="invalid_value")
    param = f"{path}.{named[2]}" if path else named[2]
    if named[1] == "required":
        return ApiError(400, f"Missing required parameter: {param}", param=param, code="missing_required_parameter")
    return ApiError(400, f"Unsupported parameter: {param}", param=param, code="unsupported_parameter")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ApiError(400, f"logit_bias: {token!r:.40} is no token id", param="logit_bias", code="invalid_value")
        biases[int(token)] = bias
    return biases
