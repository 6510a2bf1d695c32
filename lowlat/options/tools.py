"""This module converts the tools of a chat for the template, and for the grammar that constrains calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from lowlat.errors import RequestError

__all__ = ["bound_calls", "checked_tools", "document_of", "shown_tools"]


def checked_tools(tools: object) -> list[dict[str, Any]]:
    """Tools of a Python caller: {"type": "function", "function": {"name": ..., "parameters": ...}}.

    Raises RequestError for the first invalid tool, and for a name given twice.
    """
    if not isinstance(tools, (list, tuple)):
        raise RequestError(f"tools must be a list of functions, got {type(tools).__name__}")
    names = set()
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(
                f"tools[{place}] must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, "
                f"got {tool!r:.80}"
            )
        if name in names:
            raise RequestError(f"tools[{place}]: there are two functions of the name {name!r:.80}")
        names.add(name)
    return [dict(tool) for tool in tools]


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools as a chat template takes them: `strict` is the runtime's business, not the model's."""
    return [
        {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
        for tool in tools
    ]


def document_of(bound: Mapping[str, Any]) -> dict[str, Any] | None:
    """A format of the answer's text as the document that an answer is where it calls nothing; None without one.

    bound  the option that binds the text: json_object, or json_schema as a mapping
    Raises RequestError for a format that is not JSON.
    """
    if not bound:
        return None
    if bound.get("json_object"):
        return {"schema": {"type": "object"}}
    if not isinstance(bound.get("json_schema"), Mapping):
        raise RequestError("an answer that may call tools can be bound to JSON alone; give tool_choice 'none'")
    schema = dict(bound["json_schema"])
    lenient = schema.pop("x-guidance", {}).get("lenient", False)
    return {"schema": schema, "strict": not lenient}


def bound_calls(
    tools: Sequence[Mapping[str, Any]], *, required: bool, parallel: bool, document: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The option tool_calls of an answer that may call these tools; None where nothing binds it.

    required  it must call one
    parallel  it may call several
    document  what it is where it calls nothing
    """
    if not required and not document and not any(tool["function"].get("strict") for tool in tools):
        return None
    functions = [
        {
            "name": tool["function"]["name"],
            "parameters": tool["function"].get("parameters") or {"type": "object"},
            "strict": bool(tool["function"].get("strict")),
        }
        for tool in tools
    ]
    calls: dict[str, Any] = {"functions": functions, "required": required, "parallel": parallel}
    return calls | ({"document": document} if document else {})
