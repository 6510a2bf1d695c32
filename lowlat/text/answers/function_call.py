"""Some models write tool calls as tags: `<function=name>`, then parameters as tags, or an object of arguments.

Qwen3-Coder and Qwen3.5 write `<parameter=key>`, the value on lines of its own, and `</parameter>`, then `</function>`;
Llama 3 writes `{...}` and `</function>`. A value is text: what it means in JSON the function's schema says. A value
that is a string goes out as it comes, others when they are whole.
"""

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from lowlat.text.answers.base import CallBody, Calls, Parts, Tools, held_suffix
from lowlat.text.answers.json_call import MAX_NAME, ObjectText
from lowlat.text.answers.values import is_string, typed_value
from lowlat.text.templates.tags import END_CALL, END_FUNCTION, END_PARAMETER, PARAMETER, SEED_END_CALL

__all__ = ["FunctionCall"]

# some models leave out the first
VALUE_ENDS = (END_PARAMETER, *(f"\n{END_FUNCTION}\n{tag}" for tag in (END_CALL, SEED_END_CALL)))
HELD = ("\n" + END_PARAMETER, *VALUE_ENDS)


class _At(Enum):
    NAME = auto()
    BETWEEN = auto()
    KEY = auto()
    VALUE_BEGIN = auto()
    VALUE = auto()
    OBJECT = auto()
    CLOSING = auto()


class FunctionCall(CallBody):
    """One call, from what follows `<function=` on.

    raw  text before it that belongs to it
    """

    def __init__(self, raw: str, tools: Tools) -> None:
        super().__init__(raw)
        self._tools = tools
        self._at = _At.NAME
        self._name = self._key = ""
        self._schema: Mapping[str, Any] = {}
        self._is_string = False
        self._value: list[str] = []  # of one that is no string
        self._num_values = 0
        self._object = ObjectText()

    def push(self, text: str, calls: Calls, parts: Parts) -> str:
        """See CallBody."""
        steps = {
            _At.NAME: self._read_name,
            _At.BETWEEN: self._between,
            _At.KEY: self._read_key,
            _At.VALUE: self._read_value,
            _At.OBJECT: self._read_object,
            _At.CLOSING: self._close,
        }
        while text and not self.done and not self.failed:
            if self._at is _At.VALUE_BEGIN:  # the line break after the tag is none of the value's
                text, self._at = text.removeprefix("\n"), _At.VALUE
                continue
            rest = steps[self._at](text, calls, parts)
            if rest is None:
                break
            if not self.begun:
                self.raw += text[: len(text) - len(rest)]
            text = rest
        return text

    # A step takes text and returns the rest of it, or None where it needs more.

    def _read_name(self, text: str, calls: Calls, parts: Parts) -> str | None:
        name, end, rest = text.partition(">")
        self._name += name
        if len(self._name) > MAX_NAME or "\n" in self._name or (end and not self._name.strip()):
            self.failed = True
            return text
        if end:
            self._name = self._name.strip()
            self._schema = self._tools.functions.get(self._name, {})
            self._at = _At.BETWEEN
        return rest

    def _between(self, text: str, calls: Calls, parts: Parts) -> str | None:
        """Before a parameter, the object of all arguments, or the end."""
        found = text.lstrip()
        if any(tag.startswith(found) and tag != found for tag in (PARAMETER, END_FUNCTION)):
            return None
        if found.startswith(PARAMETER):
            self.begin(self._name, calls, parts)
            self._key, self._at = "", _At.KEY
            return found[len(PARAMETER) :]
        if found.startswith("{") and not self._num_values:
            self.begin(self._name, calls, parts)
            self._at = _At.OBJECT
            return found
        if found.startswith(END_FUNCTION) or self.begun:  # some models leave out the tag
            self.begin(self._name, calls, parts)
            calls.arguments("}" if self._num_values else "{}", parts)
            self.done = True
        else:
            self.failed = True
        return found.removeprefix(END_FUNCTION)

    def _read_key(self, text: str, calls: Calls, parts: Parts) -> str | None:
        key, end, rest = text.partition(">")
        self._key += key
        if len(self._key) > MAX_NAME:
            self.failed = True
            return text
        if end:
            self._key = self._key.strip()
            self._is_string = is_string(self._schema, self._key)
            opening = ", " if self._num_values else "{"
            quote = '"' if self._is_string else ""
            calls.arguments(f"{opening}{json.dumps(self._key, ensure_ascii=False)}: {quote}", parts)
            self._num_values += 1
            self._value = []
            self._at = _At.VALUE_BEGIN
        return rest

    def _read_value(self, text: str, calls: Calls, parts: Parts) -> str | None:
        places = [(place, end) for end in VALUE_ENDS if (place := text.find(end)) >= 0]
        if not places:
            keep = held_suffix(text, *HELD)
            self._add(text[: len(text) - keep], calls, parts)
            return None if keep == len(text) else text[len(text) - keep :]
        place, _ = min(places)
        self._add(text[:place].removesuffix("\n"), calls, parts)
        value = '"' if self._is_string else typed_value("".join(self._value), self._schema, self._key)
        calls.arguments(value, parts)
        self._at = _At.BETWEEN
        return text[place:].removeprefix(END_PARAMETER)

    def _add(self, text: str, calls: Calls, parts: Parts) -> None:
        if self._is_string:
            calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1], parts)
        else:
            self._value.append(text)

    def _read_object(self, text: str, calls: Calls, parts: Parts) -> str | None:
        taken = self._object.push(text)
        calls.arguments(text[:taken], parts)
        if self._object.done:
            self._at = _At.CLOSING
        return text[taken:]

    def _close(self, text: str, calls: Calls, parts: Parts) -> str | None:
        """After the object of all arguments."""
        found = text.lstrip()
        if END_FUNCTION.startswith(found) and found != END_FUNCTION:
            return None
        self.done = True
        return found.removeprefix(END_FUNCTION)
