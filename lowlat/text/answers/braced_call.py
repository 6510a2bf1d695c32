"""Gemma 4 writes tool calls as `call:name{key:value,...}`: keys bare, strings between marks, the rest as in JSON.

Arguments go out as JSON while they come. A string is literal: nothing in it is escaped.
"""

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from lowlat.text.answers.base import CallBody, Calls, Parts, Tools, held_suffix
from lowlat.text.answers.json_call import MAX_NAME
from lowlat.text.answers.values import is_string
from lowlat.text.templates.tags import CALL_HEAD, STRING_MARK

__all__ = ["BracedCall"]

PLAIN = ("true", "false", "null")
CLOSERS = {"{": "}", "[": "]"}


class _At(Enum):
    HEAD = auto()
    KEY = auto()
    VALUE = auto()
    STRING = auto()
    JSON_STRING = auto()
    BARE = auto()
    AFTER = auto()


class BracedCall(CallBody):
    """One call; what stands before its first brace is held, which is short.

    raw  text before it that belongs to it
    """

    def __init__(self, raw: str, tools: Tools) -> None:
        super().__init__(raw)
        self._tools = tools
        self._schema: Mapping[str, Any] = {}
        self._at = _At.HEAD
        self._open: list[str] = []  # braces and brackets that are not closed yet
        self._counts: list[int] = []  # of values in each
        self._wants_string = False
        self._escaped = False

    def push(self, text: str, calls: Calls, parts: Parts) -> str:
        """See CallBody."""
        steps = {
            _At.HEAD: self._read_head,
            _At.KEY: self._read_key,
            _At.VALUE: self._begin_value,
            _At.STRING: self._read_string,
            _At.JSON_STRING: self._read_json_string,
            _At.BARE: self._read_bare,
            _At.AFTER: self._after_value,
        }
        while text and not self.done and not self.failed:
            rest = steps[self._at](text, calls, parts)
            if rest is None:
                break
            text = rest
        return text

    # A step takes text and returns the rest of it, or None where it needs more.

    def _read_head(self, text: str, calls: Calls, parts: Parts) -> str | None:
        found = text.lstrip()
        head, brace, rest = found.partition("{")
        name = head.removeprefix(CALL_HEAD).strip()
        is_call = head.startswith(CALL_HEAD) or (not brace and CALL_HEAD.startswith(head))
        if not is_call or len(name) > MAX_NAME or any(map(str.isspace, name)) or (brace and not name):
            self.failed = True
            return text
        if not brace:
            return None
        self.begin(name, calls, parts)
        self._schema = self._tools.functions.get(name, {})
        self._enter("{", calls, parts)
        return rest

    def _enter(self, opening: str, calls: Calls, parts: Parts) -> None:
        self._open.append(opening)
        self._counts.append(0)
        self._at = _At.KEY if opening == "{" else _At.VALUE
        calls.arguments(opening, parts)

    def _leave(self, calls: Calls, parts: Parts) -> None:
        calls.arguments(CLOSERS[self._open.pop()], parts)
        self._counts.pop()
        self._at = _At.AFTER
        self.done = not self._open

    def _count(self, calls: Calls, parts: Parts) -> None:
        """A value of the innermost braces or brackets begins."""
        if self._counts[-1]:
            calls.arguments(", ", parts)
        self._counts[-1] += 1

    def _read_key(self, text: str, calls: Calls, parts: Parts) -> str | None:
        found = text.lstrip()
        if found.startswith("}"):
            self._leave(calls, parts)
            return found[1:]
        key, colon, rest = found.partition(":")
        if not colon:
            self.failed = len(key) > MAX_NAME
            return None
        key = key.replace(STRING_MARK, "").strip().strip('"')
        self._count(calls, parts)
        calls.arguments(f"{json.dumps(key, ensure_ascii=False)}: ", parts)
        self._wants_string = len(self._open) == 1 and is_string(self._schema, key)
        self._at = _At.VALUE
        return rest

    def _begin_value(self, text: str, calls: Calls, parts: Parts) -> str | None:
        found = text.lstrip()
        if not found or (STRING_MARK.startswith(found) and found != STRING_MARK):
            return None
        in_list = self._open[-1] == "["
        if in_list and found[0] == "]":
            self._leave(calls, parts)
            return found[1:]
        if in_list:
            self._wants_string = False
            self._count(calls, parts)
        if found.startswith(STRING_MARK) or found[0] == '"':
            is_marked = found[0] != '"'
            self._at, self._escaped = (_At.STRING if is_marked else _At.JSON_STRING), False
            calls.arguments('"', parts)
            return found[len(STRING_MARK) if is_marked else 1 :]
        if found[0] in CLOSERS:
            self._enter(found[0], calls, parts)
            return found[1:]
        self._at = _At.BARE
        return found

    def _read_string(self, text: str, calls: Calls, parts: Parts) -> str | None:
        body, mark, rest = text.partition(STRING_MARK)
        keep = 0 if mark else held_suffix(body, STRING_MARK)
        calls.arguments(json.dumps(body[: len(body) - keep], ensure_ascii=False)[1:-1], parts)
        if not mark:
            return body[len(body) - keep :] if len(body) > keep else None
        calls.arguments('"', parts)
        self._at = _At.AFTER
        return rest

    def _read_json_string(self, text: str, calls: Calls, parts: Parts) -> str | None:
        """A string in quotes, as JSON has it."""
        for place, character in enumerate(text):
            if character == '"' and not self._escaped:
                calls.arguments(text[: place + 1], parts)
                self._at = _At.AFTER
                return text[place + 1 :]
            self._escaped = character == "\\" and not self._escaped
        calls.arguments(text, parts)
        return ""

    def _read_bare(self, text: str, calls: Calls, parts: Parts) -> str | None:
        """A number or a word; another text is a string without its marks."""
        ends = [place for end in ",}]" if (place := text.find(end)) >= 0]
        if not ends:
            return None
        value = text[: min(ends)].strip()
        is_json = not self._wants_string and (value in PLAIN or _is_number(value))
        calls.arguments(value if is_json else json.dumps(value, ensure_ascii=False), parts)
        self._at = _At.AFTER
        return text[min(ends) :]

    def _after_value(self, text: str, calls: Calls, parts: Parts) -> str | None:
        found = text.lstrip()
        if not found:
            return None
        if found[0] == ",":
            self._at = _At.KEY if self._open[-1] == "{" else _At.VALUE
        elif found[0] == CLOSERS[self._open[-1]]:
            self._leave(calls, parts)
        else:
            self.failed = True
            return found
        return found[1:]


def _is_number(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, int | float) and value - value == 0
