"""This module serves /v1/responses, with messages, reasoning and function calls in and out; it stores nothing."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lowlat.serving.http.choices import Choices
from lowlat.serving.http.errors import ApiError, name_fields
from lowlat.serving.http.gateway import gateways_of
from lowlat.serving.http.openai.bodies import decode, decoder_of
from lowlat.serving.http.openai.chat import check_template
from lowlat.serving.http.openai.responses_answer import ResponsesAnswer
from lowlat.serving.http.openai.responses_input import input_messages
from lowlat.serving.http.openai.responses_schema import AllowedFunctions, NamedFunction, ResponsesRequest
from lowlat.serving.http.openai.schema import (
    AllowedSet,
    AllowedTools,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
    unsupported,
)
from lowlat.serving.http.openai.structured import STRUCTURED_FIELDS, Calling, format_options, structured_options
from lowlat.serving.http.sessions import session_of
from lowlat.serving.http.streaming import read_body, respond

__all__ = ["responses"]

_DECODER = decoder_of(ResponsesRequest)
_FORMAT_FIELDS = {"json_schema": "text.format.schema", "json_object": "text.format"}
_FIELDS = {"prompt": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


async def responses(request: Request) -> Response:
    """Answer an input."""
    asked = decode(_DECODER, await read_body(request))
    form = _FORMAT_FIELDS if asked.structured_outputs is None else STRUCTURED_FIELDS
    name_fields(request, {**_FIELDS, **form})
    gateway = await gateways_of(request).of(asked.model)
    server = await gateway.serving(asked.model)
    check_template(server)
    calling = _calling(asked)
    bound = _bound(asked)
    format_field = "text.format" if asked.structured_outputs is None else "structured_outputs"
    sampling = asked.sampling(server.advice) | _logprobs(asked) | calling.options(bound, format_field)
    most = asked.max_output_tokens
    if most is not None:
        sampling["max_tokens"] = most
    generation = gateway.client.generate(
        input_messages(asked),
        template_options=_template_options(asked, calling),
        fit_context=most is None,
        cache_salt=asked.cache_salt or "",
        session=session_of(request),
        parse="tools" if calling.tools else "reasoning",
        **sampling,
    )
    answer = ResponsesAnswer(asked, calling, server.advice)
    return await respond(request, Choices(lambda _: generation), answer, stream=bool(asked.stream))


def _calling(asked: ResponsesRequest) -> Calling:
    """The functions that may be called, in the words of chats."""
    tools = [
        Tool("function", Function(one.name, one.description, one.parameters, one.strict)) for one in asked.tools or ()
    ]
    choice: str | NamedTool | AllowedTools | None
    if isinstance(asked.tool_choice, NamedFunction):
        choice = _named(asked.tool_choice)
    elif isinstance(asked.tool_choice, AllowedFunctions):
        choice = AllowedTools(AllowedSet(asked.tool_choice.mode, [_named(one) for one in asked.tool_choice.tools]))
    else:
        choice = asked.tool_choice
    return Calling.of(tools, choice, asked.parallel_tool_calls)


def _named(function: NamedFunction) -> NamedTool:
    return NamedTool(FunctionName(function.name))


def _template_options(asked: ResponsesRequest, calling: Calling) -> dict[str, Any]:
    named = {
        "tools": calling.for_template() or None,
        "reasoning_effort": None if asked.reasoning is None else asked.reasoning.effort,
        "verbosity": None if asked.text is None else asked.text.verbosity,
    }
    return {name: value for name, value in named.items() if value is not None}


def _logprobs(asked: ResponsesRequest) -> dict[str, int]:
    if asked.top_logprobs or "message.output_text.logprobs" in (asked.include or ()):
        return {"logprobs": asked.top_logprobs or 0}
    return {}


def _bound(asked: ResponsesRequest) -> dict[str, Any]:
    """The option that binds the answer's text, where one does. Raises ApiError for two, or a schema that binds none."""
    form = None if asked.text is None else asked.text.format
    schema = None
    if form is not None and form.type == "json_schema":
        schema = JsonSchema(form.name, form.schema, form.strict)
    elif form is not None and form.schema:
        message, param = "text.format.schema stands with type 'json_schema' alone", "text.format.schema"
        raise ApiError(400, message, param=param, code="invalid_value")
    bound = format_options(None if form is None else ResponseFormat(form.type, schema), "text.format")
    structured = structured_options(asked.structured_outputs)
    if bound and structured:
        raise unsupported("structured_outputs", "text.format binds the answer already; give one of the two")
    return bound or structured
