"""This module converts the fields of OpenAI and vLLM that constrain an answer to sampling options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from lowlat.errors import RequestError
from lowlat.options.tools import bound_calls, document_of, shown_tools
from lowlat.serving.http.errors import ApiError, invalid, missing
from lowlat.serving.http.openai.schema import (
    AllowedTools,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    StructuredOutputs,
    Tool,
    unsupported,
)

__all__ = ["FORMAT_FIELDS", "STRUCTURED_FIELDS", "Calling", "format_options", "structured_options"]

STRUCTURED_FIELDS = {
    "json_schema": "structured_outputs.json",
    **{name: f"structured_outputs.{name}" for name in ("json_object", "regex", "grammar", "choice")},
}  # by the resulting options
FORMAT_FIELDS = {"json_schema": "response_format.json_schema.schema", "json_object": "response_format"}


def structured_options(asked: StructuredOutputs | None) -> dict[str, Any]:
    """Return the options of vLLM's field. Raises ApiError unless exactly one of them is given."""
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
        raise missing(schema)
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise ApiError(400, f"{schema} stands with type 'json_schema' alone", param=schema, code="invalid_value")
    if asked.json_schema is not None:
        return _schema_options(asked.json_schema)
    return {"json_object": True} if asked.type == "json_object" else {}


def _schema_options(asked: JsonSchema) -> dict[str, Any]:
    """Return the option of a schema; without strict, keywords that cannot be enforced are ignored, as at OpenAI."""
    schema = dict(asked.schema or {})
    return {"json_schema": schema if asked.strict else {**schema, "x-guidance": {"lenient": True}}}


@dataclass(frozen=True)
class Calling:
    """The tools that an answer may call.

    tools     those that may be called
    forced    whether one of them must be
    parallel  whether several may be
    """

    tools: Sequence[Tool]
    forced: bool
    parallel: bool

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: str | NamedTool | AllowedTools | None, parallel: bool | None) -> Self:
        """The tools of a request, by its fields tools, tool_choice and parallel_tool_calls.

        Raises ApiError for a choice that is none of the tools.
        """
        several = parallel is not False
        if choice == "none":
            return cls((), False, several)
        if not tools and choice not in (None, "auto"):
            raise _bad_choice("there are no tools to choose from")
        if isinstance(choice, NamedTool):
            return cls(_named(tools, [choice]), True, False)
        if isinstance(choice, AllowedTools):
            allowed = choice.allowed_tools
            return cls(_named(tools, allowed.tools), allowed.mode == "required", several)
        if choice not in (None, "auto", "required"):
            raise unsupported("tool_choice", f"{choice!r:.80}; 'none', 'auto', 'required' and a function are served")
        return cls(tools, choice == "required", several)

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as a chat template takes them."""
        return shown_tools(self._plain())

    def options(self, bound: Mapping[str, Any], param: str) -> dict[str, Any]:
        """The fields that bind the answer: a format of its text, or calls that are forced or strict; {} where none do.

        bound  the format, by the field param: that of the text where nothing is called
        Raises ApiError for a format of answers that may also be calls, unless it is JSON.
        """
        if not self.tools:
            return dict(bound)
        try:
            document = None if self.forced else document_of(bound)
        except RequestError as error:
            raise unsupported(param, str(error)) from error
        calls = bound_calls(self._plain(), required=self.forced, parallel=self.parallel, document=document)
        return {} if calls is None else {"tool_calls": calls}

    def _plain(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(tool) for tool in self.tools]


def _named(tools: Sequence[Tool], choices: Sequence[NamedTool]) -> list[Tool]:
    names = {choice.function.name for choice in choices}
    missing = names - {tool.function.name for tool in tools}
    if missing or not names:
        raise _bad_choice(f"{min(missing, default='')!r:.80} is none of the tools")
    return [tool for tool in tools if tool.function.name in names]


def _bad_choice(why: str) -> ApiError:
    return invalid("tool_choice", f"tool_choice: {why}")
