"""This module has the parts of an answer, and the interface of the formats that find them."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lowlat.options.request import ToolCallDelta

__all__ = ["AnswerFormat", "CallBody", "Calls", "Parts", "Tools", "TrimmedText", "held_suffix"]

SHORT_ID = 9  # characters of a call's id, as the templates of Mistral want them
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(slots=True)
class Parts:
    """Text that became certain, by the part of the answer that it belongs to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call.

    functions  the JSON schema of each one's parameters, by its name; empty where they are not known
    required   the answer is bound to be calls, and nothing else
    """

    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: bool = False


class AnswerFormat(Protocol):
    """Takes one answer apart."""

    @property
    def thinking(self) -> bool:
        """Whether what comes next goes on with reasoning."""

    def push(self, pieces: Sequence[str], parts: Parts) -> None:
        """Take more of the answer, `Marker`s among its text, and add what is certain now to the parts."""

    def finish(self, parts: Parts) -> None:
        """Add what was held back; nothing follows."""


class Calls:
    """Numbers an answer's tool calls, and gives each an id of its own.

    short  ids are of nine letters and digits
    """

    def __init__(self, *, short: bool = False) -> None:
        self._num = 0
        self._short = short

    def begin(self, name: str, parts: Parts) -> None:
        """Add the beginning of a call."""
        call_id = f"call_{secrets.token_hex(8)}"
        if self._short:
            call_id = "".join(secrets.choice(ALPHABET) for _ in range(SHORT_ID))
        parts.tool_calls.append(ToolCallDelta(self._num, "", call_id, name))
        self._num += 1

    def arguments(self, text: str, parts: Parts) -> None:
        """Add to the arguments of the call that began last."""
        if text:
            parts.tool_calls.append(ToolCallDelta(self._num - 1, text))


class CallBody(ABC):
    """A call, or several, in an answer's text: it reads the text, and gives the call's parts once it is certain.

    raw     the text that belongs to it, as far as it was taken; "" once it has begun
    begun   it is certain to be a call: what is certain of it goes to the parts
    done    it has ended
    failed  what came is no call, or does not go on as one
    """

    def __init__(self, raw: str) -> None:
        self.raw = raw
        self.begun = self.done = self.failed = False

    @abstractmethod
    def push(self, text: str, calls: Calls, parts: Parts) -> str:
        """Take more text; returns what was not taken, which is needed again unless it is done or failed."""

    def begin(self, name: str, calls: Calls, parts: Parts) -> None:
        """Record that it is a call of the function of this name; harmless when repeated."""
        if not self.begun:
            self.begun, self.raw = True, ""
            calls.begin(name, parts)


class TrimmedText:
    """Text without the white space at its ends, as it comes; `leading` keeps that at its beginning."""

    def __init__(self, *, leading: bool = False) -> None:
        self._begun = leading
        self._space = ""

    def push(self, text: str) -> str:
        """Take more; return what is certain to have text after it."""
        text = self._space + text if self._begun else text.lstrip()
        body = text.rstrip()
        self._begun = self._begun or bool(body)
        self._space = text[len(body) :]
        return body

    def finish(self) -> str:
        """Return the white space at the end, for who wants it."""
        space, self._space = self._space, ""
        return space


def held_suffix(text: str, *tags: str) -> int:
    """How many characters at the end of a text could be the beginning of a tag; a whole tag is not looked for."""
    for length in range(min(len(text), max(map(len, tags), default=0) - 1), 0, -1):
        if any(len(tag) > length and text.endswith(tag[:length]) for tag in tags):
            return length
    return 0
