"""This module lists the functions that a request's answer may call, from its options."""

import json
from collections.abc import Mapping
from typing import Any

from lowlat.options.request import SamplingParams
from lowlat.text.answers.base import Tools
from lowlat.text.schemas import arguments_schema, plain_schema

__all__ = ["tools_of"]


def tools_of(params: SamplingParams) -> Tools:
    """The functions of `tools`, else those of `tool_calls`; what is no function is passed over."""
    bound = _value(params.tool_calls)
    bound = bound if isinstance(bound, Mapping) else {}
    listed = _value(params.tools)
    if not isinstance(listed, list):
        listed = bound.get("functions")
    functions = {}
    for entry in listed if isinstance(listed, list) else []:
        function = entry.get("function", entry) if isinstance(entry, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            parameters = arguments_schema(plain_schema(parameters)) if isinstance(parameters, Mapping) else {}
            functions[function["name"]] = parameters
    return Tools(functions, required=bound.get("required") is True)


def _value(text: object) -> Any:
    """The value of a JSON text; None where it is none."""
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
