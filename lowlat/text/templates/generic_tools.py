"""This module lists tools in a prompt of its own, for chats whose template takes none.

The prompt asks for Hermes' format, which is parsed and can be forced. It stands in the system's message, or before the
first user's where the template writes no system's message.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lowlat.text.templates.tags import CALL, END_CALL

__all__ = ["generic_messages", "has_calls", "with_short_ids"]

SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
RESULT, END_RESULT = "<tool_response>", "</tool_response>"


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages hold calls of tools, or their results."""
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def generic_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], *, system: bool
) -> list[dict[str, Any]]:
    """Messages of text alone, with a prompt for tools where there are any.

    system  whether the template writes a system's message
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        made = _plain(message)
        last = plain[-1] if plain else {}
        if message["role"] == "tool" and last.get("role") == "user" and last.get("results"):
            last["content"] += "\n" + made["content"]  # results of one turn in one message: turns alternate
        else:
            plain.append(made)
    for made in plain:
        made.pop("results", None)
    return _prompted(plain, _prompt(tools), system=system) if tools else plain


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"{RESULT}\n{_text(content)}\n{END_RESULT}", "results": True}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = "\n".join(f"{CALL}\n{_call(call)}\n{END_CALL}" for call in calls)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{_text(content)}\n{written}" if content else written}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # else as the model wrote it
            arguments = json.loads(arguments or "{}")
    return json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return json.dumps(content, ensure_ascii=False)


def _prompt(tools: Sequence[Any]) -> str:
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = json.dumps({"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}})
    return (
        f"You can call these functions, of which each line describes one in JSON:\n{listed}\n\n"
        "To call a function, write its name and arguments as JSON between tags, and nothing after it:\n"
        f"{CALL}\n{example}\n{END_CALL}\n"
        "Several calls stand one after the other. Results come between "
        f"{RESULT} and {END_RESULT}. Where no function is needed, answer as usual."
    )


def _prompted(messages: list[dict[str, Any]], prompt: str, *, system: bool) -> list[dict[str, Any]]:
    role = "system" if system else "user"
    for place, message in enumerate(messages):
        if message["role"] == role:
            content = _text(message.get("content") or "")
            joined = f"{content}\n\n{prompt}" if system else f"{prompt}\n\n{content}"
            return [*messages[:place], {**message, "content": joined}, *messages[place + 1 :]]
    return [{"role": role, "content": prompt}, *messages]


def with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with ids of calls of nine letters and digits, as Mistral's templates ask; equal ones stay equal."""
    made = dict(message)
    if isinstance(made.get("tool_call_id"), str):
        made["tool_call_id"] = _short(made["tool_call_id"])
    if isinstance(made.get("tool_calls"), Sequence):
        made["tool_calls"] = [
            {**call, "id": _short(call["id"])} if isinstance(call.get("id"), str) else call
            for call in made["tool_calls"]
            if isinstance(call, Mapping)
        ]
    return made


def _short(call_id: str) -> str:
    return call_id if SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
