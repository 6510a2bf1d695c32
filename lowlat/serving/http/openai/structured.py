"""The fields of OpenAI and vLLM that bind an answer to a grammar, as sampling options; misfits are refused by name."""

from collections.abc import Mapping
from typing import Any

from lowlat.serving.http.errors import ApiError
from lowlat.serving.http.openai.schema import (
    ChatRequest,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    unsupported,
)

__all__ = ["format_options", "offered_tools", "structured_options", "tool_options"]


def structured_options(asked: StructuredOutputs | None) -> dict[str, Any]:
    """The options of vLLM's field. Raises ApiError for none or several of them."""
    if asked is None:
        return {}
    named = {
        "json_schema": asked.json,
        "json_object": asked.json_object,
        "regex": asked.regex,
        "grammar": asked.grammar,
        "choice": asked.choice,
    }
    given = {name: value for name, value in named.items() if value}
    if asked.json == {}:
        given["json_schema"] = {}
    if len(given) != 1:
        message = "structured_outputs: give one of json, json_object, regex, grammar and choice"
        raise ApiError(400, message, param="structured_outputs", code="invalid_value")
    return given


def format_options(asked: ResponseFormat | None, param: str = "response_format") -> dict[str, Any]:
    """The options of a response format. Raises ApiError for a schema that is missing, or stands where none may."""
    if asked is None:
        return {}
    schema = f"{param}.json_schema"
    if asked.type == "json_schema" and asked.json_schema is None:
        raise ApiError(400, f"Missing required parameter: {schema}", param=schema, code="missing_required_parameter")
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise ApiError(400, f"{schema} stands with type 'json_schema' alone", param=schema, code="invalid_value")
    if asked.json_schema is not None:
        return _schema_options(asked.json_schema)
    return {"json_object": True} if asked.type == "json_object" else {}


def _schema_options(asked: JsonSchema) -> dict[str, Any]:
    """The option of a schema: without strict, keywords that cannot be held are left out, as OpenAI promises none."""
    schema = dict(asked.schema)
    return {"json_schema": schema if asked.strict else {**schema, "x-guidance": {"lenient": True}}}


def offered_tools(asked: ChatRequest) -> list[Tool]:
    """The tools that the answer may call. Raises ApiError for a choice that is none of them."""
    tools = asked.tools or []
    choice = asked.tool_choice
    if choice == "none":
        return []
    if not tools and choice not in (None, "auto"):
        raise ApiError(400, "tool_choice: there are no tools to choose from", param="tool_choice", code="invalid_value")
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            message = f"tool_choice: {choice.function.name!r:.80} is none of the tools"
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
        return named
    if choice not in (None, "auto", "required"):
        raise unsupported("tool_choice", f"{choice!r:.80}; 'none', 'auto', 'required' and a function are served")
    return tools


def tool_options(asked: ChatRequest, offered: list[Tool], others: Mapping[str, Any]) -> dict[str, Any]:
    """The option of calls that are forced, or strict; none for calls that are free.

    others  what else binds the answer
    Raises ApiError where an answer cannot be both.
    """
    forced = asked.tool_choice == "required" or isinstance(asked.tool_choice, NamedTool)
    if offered and others:
        why = "an answer bound to a format can call no tools; give tool_choice 'none'"
        raise unsupported("response_format" if asked.structured_outputs is None else "structured_outputs", why)
    if not offered or not (forced or any(tool.function.strict for tool in offered)):
        return {}
    functions = [
        {
            "name": tool.function.name,
            "parameters": tool.function.parameters or {"type": "object"},
            "strict": bool(tool.function.strict),
        }
        for tool in offered
    ]
    several = asked.parallel_tool_calls is not False and not isinstance(asked.tool_choice, NamedTool)
    return {"tool_calls": {"functions": functions, "required": forced, "parallel": several}}
