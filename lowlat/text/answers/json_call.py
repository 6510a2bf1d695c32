"""Some models write a tool call as one JSON object, {"name": ..., "arguments": {...}}; it is read as it comes.

Its arguments are handed on as they were written, before the object has ended. Text that is no such object fails;
nothing is built of nested values, so their depth does not matter.
"""

import json
from collections.abc import Collection
from enum import Enum, auto

from lowlat.text.answers.base import CallBody, Calls, Parts

__all__ = ["CallReader", "ListedCalls", "ObjectText", "PendingCall"]

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"
SCALAR_BEGINS = "-0123456789tfn"
MAX_NAME = 256


class _At(Enum):
    """The place in the object."""

    BEGIN = auto()
    FIRST_KEY = auto()
    NEXT_KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_STRING = auto()
    IN_NESTED = auto()
    IN_SCALAR = auto()
    AFTER = auto()
    DONE = auto()
    FAILED = auto()


class CallReader:
    """Reads one call.

    name              of the function, once it is known
    arguments_needed  an object without them is no call
    """

    def __init__(self, *, arguments_needed: bool) -> None:
        self.name: str | None = None
        self._arguments_needed = arguments_needed
        self._at = _At.BEGIN
        self._key = ""
        self._text: list[str] = []  # of the key or value that is being read
        self._depth = 0
        self._quoted = self._escaped = False
        self._arguments: list[str] = []
        self._have_arguments = False
        self._live = False  # the value that is being read is the arguments

    @property
    def begun(self) -> bool:
        """Whether it is a call: the name has come, and the beginning of its arguments or its end."""
        return self.name is not None and self._have_arguments

    @property
    def done(self) -> bool:
        """Whether the object has ended."""
        return self._at is _At.DONE

    @property
    def failed(self) -> bool:
        """Whether what came is no call."""
        return self._at is _At.FAILED

    def push(self, text: str) -> int:
        """Take more text, up to where something has come to be known; returns how many characters of it were taken.

        All, unless it begun, ended or failed; the character at which it failed is not taken.
        """
        was_begun = self.begun
        for place, character in enumerate(text):
            self._take(character)
            if self.failed:
                return place
            if self.done or self.begun is not was_begun:
                return place + 1
        return len(text)

    def take_arguments(self) -> str:
        """Return the arguments' text that came since the last call; "" before the name is known."""
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _take(self, character: str) -> None:
        at = self._at
        if at is _At.IN_NESTED:
            self._nested(character)
        elif at in (_At.IN_STRING, _At.IN_KEY):
            self._string(character)
        elif at is _At.IN_SCALAR and character not in ",}" + SPACE:
            self._text.append(character)
        else:
            if at is _At.IN_SCALAR:
                self._end_value()
            if character not in SPACE and self._at is not _At.FAILED:
                self._structure(character)

    def _structure(self, character: str) -> None:
        """A character between keys and values."""
        at = self._at
        if at is _At.BEGIN and character == "{":
            self._at = _At.FIRST_KEY
        elif at in (_At.FIRST_KEY, _At.NEXT_KEY) and character == '"':
            self._at, self._text, self._escaped = _At.IN_KEY, [character], False
        elif at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif at is _At.AFTER and character == ",":
            self._at = _At.NEXT_KEY
        elif at in (_At.FIRST_KEY, _At.AFTER) and character == "}":
            self._end()
        elif at is _At.VALUE:
            self._begin_value(character)
        else:
            self._at = _At.FAILED

    def _begin_value(self, character: str) -> None:
        self._text = [character]
        self._live = False
        if character == '"':
            self._at, self._escaped = _At.IN_STRING, False
        elif character in "{[":
            self._at, self._depth, self._quoted = _At.IN_NESTED, 1, False
            if self._key in ARGUMENTS and not self._have_arguments and character == "{":
                self._have_arguments = self._live = True
                self._arguments.append(character)
        elif character in SCALAR_BEGINS:
            self._at = _At.IN_SCALAR
        else:
            self._at = _At.FAILED

    def _nested(self, character: str) -> None:
        if self._live:
            self._arguments.append(character)
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
        elif character == '"':
            self._quoted, self._escaped = True, False
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                if self._key in ARGUMENTS and not self._live:
                    self._at = _At.FAILED  # a list, or arguments a second time
                elif self._key == "name":
                    self._at = _At.FAILED
                else:
                    self._at = _At.AFTER

    def _string(self, character: str) -> None:
        self._text.append(character)
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            if self._at is _At.IN_KEY:
                self._key, self._at = self._decoded() or "", _At.COLON
            else:
                self._end_value()

    def _end_value(self) -> None:
        """A string or a scalar has ended."""
        self._at = _At.AFTER
        if self._key == "name":
            name = self._decoded()
            if self.name is not None or not name or len(name) > MAX_NAME:
                self._at = _At.FAILED
            else:
                self.name = name
        elif self._key in ARGUMENTS:
            value = "{}" if self._text == list("null") else self._decoded()  # some write the object into a string
            if self._have_arguments or value is None:
                self._at = _At.FAILED
            else:
                self._have_arguments = True
                self._arguments.append(value)

    def _end(self) -> None:
        self._at = _At.DONE
        if self.name is None or (self._arguments_needed and not self._have_arguments):
            self._at = _At.FAILED
        elif not self._have_arguments:
            self._have_arguments = True
            self._arguments.append("{}")

    def _decoded(self) -> str | None:
        """The string that was read; None for what is none."""
        try:
            value = json.loads("".join(self._text), strict=False)
        except ValueError:
            return None
        return value if isinstance(value, str) else None


class PendingCall(CallBody):
    """One object.

    raw    text before it that belongs to it
    names  of the functions, if an object that names another one is no call
    """

    def __init__(self, raw: str, *, arguments_needed: bool, names: Collection[str] = ()) -> None:
        super().__init__(raw)
        self._names = names
        self._reader = CallReader(arguments_needed=arguments_needed)

    def push(self, text: str, calls: Calls, parts: Parts) -> str:
        """See CallBody."""
        reader = self._reader
        taken = reader.push(text)
        if not self.begun:
            self.raw += text[:taken]
        is_other = bool(self._names and reader.name is not None and reader.name not in self._names)
        self.done, self.failed = reader.done, reader.failed or is_other
        if reader.begun and not is_other:
            self.begin(reader.name or "", calls, parts)
            calls.arguments(reader.take_arguments(), parts)
        return text[taken:]


class ListedCalls(CallBody):
    """A list of such objects; the options are those of `PendingCall`."""

    def __init__(self, raw: str, *, arguments_needed: bool = False, names: Collection[str] = ()) -> None:
        super().__init__(raw)
        self._arguments_needed, self._names = arguments_needed, names
        self._call: PendingCall | None = None
        self._opened = False

    def push(self, text: str, calls: Calls, parts: Parts) -> str:
        """See CallBody."""
        before = text
        while text and not self.done and not self.failed:
            text = self._between(text) if self._call is None else self._in_call(self._call, text, calls, parts)
        self.raw = "" if self.begun else self.raw + before[: len(before) - len(text)]
        return text

    def _between(self, text: str) -> str:
        if text[0] == "{" and self._opened:
            self._call = PendingCall("", arguments_needed=self._arguments_needed, names=self._names)
            return text
        if text[0] == "]" and self.begun:
            self.done = True
        elif text[0] == "[" and not self._opened:
            self._opened = True
        elif text[0] not in SPACE and (text[0] != "," or not self.begun):
            self.failed = True
            return text
        return text[1:]

    def _in_call(self, call: PendingCall, text: str, calls: Calls, parts: Parts) -> str:
        rest = call.push(text, calls, parts)
        self.begun = self.begun or (call.begun and not call.failed)
        self.failed = call.failed
        if call.done and not call.failed:
            self._call = None
        return rest


class ObjectText:
    """The text of one JSON object, found by its braces; it is handed on as it was written."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False
        self.done = False

    def push(self, text: str) -> int:
        """Take text, the brace that opens the object first; returns how many characters of it are the object's."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted and character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = not self._quoted
            elif not self._quoted and character in "{[":
                self._depth += 1
            elif not self._quoted and character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.done = True
                    return place + 1
        return len(text)
