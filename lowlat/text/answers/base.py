"""The parts of an answer, and the interface of the formats that find them."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lowlat.options.request import ToolCallDelta

__all__ = ["AnswerFormat", "Calls", "Parts", "TrimmedText", "held_suffix"]


@dataclass(slots=True)
class Parts:
    """Text that became certain, by the part of the answer that it belongs to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class AnswerFormat(Protocol):
    """Takes one answer apart."""

    def push(self, pieces: Sequence[str], parts: Parts) -> None:
        """Take more of the answer, `Marker`s among its text, and add what is certain now to the parts."""

    def finish(self, parts: Parts) -> None:
        """Add what was held back; nothing follows."""


class Calls:
    """Numbers an answer's tool calls, and gives each a name of its own."""

    def __init__(self) -> None:
        self._num = 0

    def begin(self, name: str, parts: Parts) -> None:
        """Add the beginning of a call."""
        parts.tool_calls.append(ToolCallDelta(self._num, "", f"call_{secrets.token_hex(8)}", name))
        self._num += 1

    def arguments(self, text: str, parts: Parts) -> None:
        """Add to the arguments of the call that began last."""
        if text:
            parts.tool_calls.append(ToolCallDelta(self._num - 1, text))


class TrimmedText:
    """Text without the white space at its ends, as it comes; `leading` keeps that at its beginning."""

    def __init__(self, *, leading: bool = False) -> None:
        self._begun = leading
        self._space = ""

    def push(self, text: str) -> str:
        """Take more; return what is certain to have text behind it."""
        text = self._space + text if self._begun else text.lstrip()
        body = text.rstrip()
        self._begun = self._begun or bool(body)
        self._space = text[len(body) :]
        return body

    def finish(self) -> str:
        """Return the white space at the end, for who wants it."""
        space, self._space = self._space, ""
        return space


def held_suffix(text: str, tag: str) -> int:
    """How many characters at the end of a text could be the beginning of a tag; a whole tag is not looked for."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
