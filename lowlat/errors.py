"""Every error that lowlat raises on purpose.

LowlatError
├── ConfigError      the model directory, the draft model or an option is wrong; nothing was loaded
│   └── ShapeError   arrays do not have the shapes that a bucket fixes
├── RequestError     one request is wrong; that request alone fails
│   ├── GrammarError a request's grammar forbids what was committed, or cannot go on
│   └── SessionError a session's file is none, torn, altered, of another model, or cannot be written
├── CapacityError    the request is right but there is no capacity for it now; try later
│   └── Busy         a server has none, and says when to try again
├── StreamError      a request broke off; the tokens received before are kept
│   └── ServerGone   because the server ended, was killed, is silent, or was never there
└── DeviceError      the device failed; the process cannot go on

A message names the value, the limit it broke and the knob that moves the limit. This module imports nothing
of lowlat, so that every folder may use it.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "Busy",
    "CapacityError",
    "ConfigError",
    "DeviceError",
    "GrammarError",
    "LowlatError",
    "RequestError",
    "ServerGone",
    "SessionError",
    "ShapeError",
    "StreamError",
    "is_panic",
    "meant",
    "not_unicode",
    "shown_at",
]

NEAR = 0.7  # how much alike two names are, of which one is taken for the other misspelt
_STEP = re.compile(r"([^.\[\]]+)|\[([^\]]*)\]")  # of a path: a field, or a place in a list


class LowlatError(Exception):
    """Base of all errors that lowlat raises on purpose."""


class ConfigError(LowlatError):
    """The model directory, the draft model or an option cannot be used; nothing half-loaded stays after."""


class ShapeError(ConfigError):
    """Arrays handed to an operation do not have the shapes that its bucket fixes."""


class RequestError(LowlatError):
    """The caller's request cannot be served; other requests are unaffected."""


class GrammarError(RequestError):
    """A token was committed that the request's grammar forbids, or the grammar came to a limit; the request ends."""


class SessionError(RequestError):
    """The file of a session is none, is torn or altered, belongs to another model or numerics, or cannot be written."""


class CapacityError(LowlatError):
    """The request is valid but the queue is full now; it may be sent again later."""


class Busy(CapacityError):
    """The server has no capacity for the request; it expects some after `retry_after_s`, or does not know (None)."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StreamError(LowlatError):
    """A request broke off before its own end; it cannot be resumed.

    token_ids   all tokens received before
    text        their text, as far as it was received
    code        why: the wire's code ("not_finite", "slow_consumer", ...), "timeout", "closed" or "lost"
    """

    def __init__(self, message: str, *, token_ids: tuple[int, ...] = (), text: str = "", code: str = "") -> None:
        super().__init__(message)
        self.token_ids = token_ids
        self.text = text
        self.code = code


class ServerGone(StreamError):
    """The server ended, was killed, is silent, or was never there; the next call connects again."""


class DeviceError(LowlatError):
    """The device failed; its context is lost and the process must end."""


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a library in Rust, which is an error of one call and yet no `Exception`."""
    return not isinstance(error, Exception) and type(error).__name__ == "PanicException"


def not_unicode(error: UnicodeEncodeError) -> RequestError:
    """The refusal of a text that has no encoding."""
    return RequestError(f"text is not Unicode: a lone surrogate at character {error.start}")


def meant(name: object, known: Iterable[str], forms: Mapping[str, str] | None = None) -> str:
    """The end of a message about an unknown name: the known one that is spelt most like it, or nothing.

    forms  how a known name is shown, where not as it is
    """
    from difflib import get_close_matches

    near = get_close_matches(str(name)[:80], list(known), n=1, cutoff=NEAR)
    return f"; did you mean {(forms or {}).get(near[0], near[0])!r}?" if near else ""


def shown_at(value: Any, path: str, reason: str) -> str:
    """The part of a value that is wrong, short, for the end of a message; its length where that is what is wrong.

    path    as msgspec writes it, without the "$.": "stop[0]"; "[...]" is some key of a table, which is then shown whole
    reason  why it is wrong, in msgspec's words
    """
    for name, place in _STEP.findall(path):
        if place == "...":
            break
        value = value[int(place)] if place else value.get(name)
    return str(len(value)) if " of length " in reason else f"{value!r:.80}"
