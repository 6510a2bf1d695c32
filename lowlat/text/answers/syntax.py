"""This module describes, as data, the ways in which models mark tool calls in their text."""

from collections.abc import Callable
from dataclasses import dataclass

from lowlat.text.answers.base import CallBody, Calls, Parts, Tools
from lowlat.text.answers.braced_call import BracedCall
from lowlat.text.answers.function_call import FunctionCall
from lowlat.text.answers.json_call import ListedCalls, PendingCall
from lowlat.text.answers.named_call import NamedCall
from lowlat.text.templates.tags import (
    ARGUMENTS_MARK,
    CALL,
    CALLS,
    CHANNEL_CALL,
    END_CALL,
    END_CHANNEL_CALL,
    END_LISTED,
    FUNCTION,
    ID_MARK,
    LISTED,
    PYTHON_TAG,
    SEED_CALL,
    SEED_END_CALL,
    STRING_MARK,
)

__all__ = ["BRACED_SYNTAX", "LISTED_SYNTAX", "LLAMA3_SYNTAX", "MISTRAL_SYNTAX", "TAGGED_SYNTAX", "CallSyntax"]

Make = Callable[[str, Tools], CallBody]


@dataclass(frozen=True)
class CallSyntax:
    """How calls stand in a text.

    openings  tags that begin a call wherever they stand, and what makes the body of one, of the tag and the tools
    closings  tags that may follow a call
    inner     tags within a call
    bare      characters with which a call may begin where the content begins, or after a call
    short     ids of calls are short
    """

    openings: dict[str, Make]
    closings: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    bare: dict[str, Make] | None = None
    short: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags."""
        return (*self.openings, *self.inner, *self.closings)


class Undecided(CallBody):
    """A call whose first character, white space aside, says which kind it is.

    raw    text before it that belongs to it
    kinds  what makes a body, of the text before it, by the character; "": of any other
    """

    def __init__(self, raw: str, kinds: dict[str, Callable[[str], CallBody]]) -> None:
        super().__init__(raw)
        self._kinds = kinds
        self._body: CallBody | None = None

    def push(self, text: str, calls: Calls, parts: Parts) -> str:
        """See CallBody."""
        if self._body is None:
            found = text.lstrip()
            self.raw += text[: len(text) - len(found)]
            if not found:
                return ""
            if FUNCTION.startswith(found) and found != FUNCTION and FUNCTION in self._kinds:
                return found
            key = next((key for key in self._kinds if key and found.startswith(key)), "")
            make = self._kinds.get(key)
            if make is None:
                self.failed = True
                return found
            if key == FUNCTION:
                self.raw, found = self.raw + FUNCTION, found[len(FUNCTION) :]
            self._body = make(self.raw)
            text = found
        body = self._body
        rest = body.push(text, calls, parts)
        self.raw, self.begun, self.done, self.failed = body.raw, body.begun, body.done, body.failed
        return rest


def _object(raw: str) -> CallBody:
    return PendingCall(raw, arguments_needed=False)


def _tagged(opening: str, tools: Tools) -> CallBody:
    return Undecided(opening, {"{": _object, FUNCTION: lambda raw: FunctionCall(raw, tools)})


def _listed(opening: str, tools: Tools) -> CallBody:
    return Undecided(opening, {"{": _object, "[": ListedCalls})


def _mistral(opening: str, tools: Tools) -> CallBody:
    return Undecided(opening, {"{": _object, "[": ListedCalls, "": NamedCall})


def _bare_object(raw: str, tools: Tools) -> CallBody:
    return PendingCall(raw, arguments_needed=True, names=tools.functions.keys())


def _bare_list(raw: str, tools: Tools) -> CallBody:
    return ListedCalls(raw, arguments_needed=True, names=tools.functions.keys())


def _python(opening: str, tools: Tools) -> CallBody:
    return Undecided(opening, {"{": _object, "[": ListedCalls})


TAGGED_SYNTAX = CallSyntax({CALL: _tagged, SEED_CALL: _tagged, FUNCTION: FunctionCall}, (END_CALL, SEED_END_CALL))
BRACED_SYNTAX = CallSyntax({CHANNEL_CALL: BracedCall}, (END_CHANNEL_CALL,), (STRING_MARK,))
LISTED_SYNTAX = CallSyntax({LISTED: _listed}, (END_LISTED,))
MISTRAL_SYNTAX = CallSyntax({CALLS: _mistral}, inner=(ID_MARK, ARGUMENTS_MARK), short=True)
LLAMA3_SYNTAX = CallSyntax({PYTHON_TAG: _python, FUNCTION: FunctionCall}, bare={"{": _bare_object, "[": _bare_list})
