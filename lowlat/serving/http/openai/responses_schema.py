"""This module defines the body of /v1/responses; fields of the type None are not supported, as in `schema.py`."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lowlat.options.request import MAX_LOGPROBS
from lowlat.serving.http.openai.schema import ContentPart, Function, Generating, JsonSchema, StreamOptions

__all__ = ["AllowedFunctions", "FunctionTool", "InputItem", "NamedFunction", "ResponsesRequest"]

Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
ItemType = Literal["message", "function_call", "function_call_output", "reasoning"]


class InputItem(Struct, forbid_unknown_fields=True, rename={"is_async": "async"}):
    """An item of the input: a message, a call of a function, what it returned, or reasoning.

    An answer's items may be sent back as they came. All fields but type, role, content, call_id, name, arguments and
    output are labels.
    """

    type: ItemType | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    phase: str | None = None
    namespace: str | None = None
    created_by: str | None = None
    caller: dict[str, Any] | None = None
    is_async: bool | None = None
    async_: bool | None = None  # as OpenAI's package writes it


class FunctionTool(Function, tag_field="type", tag="function", rename={"async_": "async"}):
    """A function that the model may call; the fields of OpenAI's own machinery must be empty."""

    allowed_callers: list[Literal["direct"]] | None = None
    async_: Literal[False] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: dict[str, Any] | None = None


class NamedFunction(Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: str


class AllowedFunctions(Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    """The functions that may be called, of those that are offered, and whether one of them must be."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class Reasoning(Struct, forbid_unknown_fields=True):
    """How much the model is asked to think; its reasoning is shown as it is, without a summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesFormat(JsonSchema):
    """The form of the answer, where a schema's fields stand next to its type."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class ResponsesText(Struct, forbid_unknown_fields=True):
    """The form of the answer's text; verbosity is a variable of the model's template."""

    format: ResponsesFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(Generating, kw_only=True):
    """The body of /v1/responses: nothing is stored, and the model's tools are functions.

    include         adds logprobs; the other parts are never there
    max_tool_calls  of tools that the server itself would call: there are none
    """

    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    reasoning: Reasoning | None = None
    text: ResponsesText | None = None
    truncation: Literal["disabled"] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: str | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    include: list[Include] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: StreamOptions | None = None
    background: Literal[False] | None = None
    access_programs: None = None
    background_options: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    previous_response_id: None = None
    prompt: None = None
