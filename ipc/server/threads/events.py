"""This module defines the events that a server's threads send each other, as structs, which are cheap to make."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from lowlat.ipc.engine import EngineOutput
from lowlat.ipc.server.generations.streams import Stream
from lowlat.ipc.wire import Sampling, Submit

__all__ = [
    "Command",
    "DecodeCancel",
    "DecodeFinish",
    "DecodeGrow",
    "DecodeOpen",
    "DecodePause",
    "DecodeResidence",
    "DecodeStop",
    "DecodeSubmit",
    "DrainAsked",
    "EngineFigures",
    "Event",
    "Failed",
    "Grown",
    "OpenCommand",
    "PauseDone",
    "Prepare",
    "Prepared",
    "Refused",
    "ResidenceAsked",
    "ResidenceDone",
    "Step",
]


class Step(Struct, frozen=True):
    """To the I/O thread: the outputs of a step, and the figures of the requests that it ended."""

    outputs: Sequence[EngineOutput]
    metrics: Mapping[str, Mapping[str, Any]]


class Refused(Struct, frozen=True):
    """To the I/O thread: the engine did not take a request."""

    request_id: str
    code: str
    message: str


class Prepared(Struct, frozen=True):
    """To the I/O thread: a request is tokenized and valid; or code and message say why not.

    converted  the outputs of a conversion, which is complete with them
    """

    stream: Stream
    prompt: Sequence[int] = ()
    code: str | None = None
    message: str = ""
    converted: Sequence[EngineOutput] = ()


class Grown(Struct, frozen=True):
    """To the I/O thread: pieces of an open prompt are tokenized; or code and message say why not.

    num_bytes  bytes of the pieces that count against the client's credit
    ends       the prompt ends with these token ids; speculative: on trial
    """

    stream: Stream
    token_ids: Sequence[int] = ()
    num_bytes: int = 0
    ends: bool = False
    speculative: bool = False
    code: str | None = None
    message: str = ""


class EngineFigures(Struct, frozen=True):
    """To the I/O thread: the engine's own figures, about once a second."""

    figures: Mapping[str, Any]


class Failed(Struct, frozen=True):
    """To the I/O thread: the server must end; clients get this code and message."""

    code: str
    message: str


class DrainAsked(Struct, frozen=True):
    """To the I/O thread: refuse new requests, let running ones finish within deadline_s, and end."""

    deadline_s: float


class ResidenceAsked(Struct, frozen=True):
    """To the I/O thread: the keeper of the device's memory wants it back, or gives it."""

    asleep: bool


class PauseDone(Struct, frozen=True):
    """To the I/O thread: whether a request is paused now; code and problem say why a pause was refused."""

    stream: Stream
    paused: bool
    code: str | None = None
    problem: str | None = None


class ResidenceDone(Struct, frozen=True):
    """To the I/O thread: the engine sleeps or is awake, as `asleep` says; or problem says why not."""

    asleep: bool
    problem: str = ""


Residing = ResidenceAsked | ResidenceDone
Event = Step | Refused | Prepared | Grown | EngineFigures | Failed | DrainAsked | PauseDone | Residing


class DecodeSubmit(Struct, frozen=True):
    """To the decode thread: a request for the engine."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    cache_salt: str
    session: str = ""


class DecodeOpen(Struct, frozen=True):
    """To the decode thread: a request for the engine whose prompt is still being written."""

    request_id: str
    sampling: Sampling
    cache_salt: str
    session: str
    max_prompt_tokens: int | None


class DecodeGrow(Struct, frozen=True):
    """To the decode thread: more of an open prompt."""

    request_id: str
    token_ids: Sequence[int]


class DecodeFinish(Struct, frozen=True):
    """To the decode thread: an open prompt ends with these token ids; speculative: on trial."""

    request_id: str
    token_ids: Sequence[int]
    speculative: bool


class DecodeCancel(Struct, frozen=True):
    """To the decode thread: end a request."""

    request_id: str


class DecodePause(Struct, frozen=True):
    """To the decode thread: pause or resume a request."""

    stream: Stream
    resumes: bool


class DecodeStop(Struct, frozen=True):
    """To the decode thread: close the engine and end."""


class DecodeResidence(Struct, frozen=True):
    """To the decode thread: put the engine to sleep, or wake it."""

    asleep: bool


OpenCommand = DecodeSubmit | DecodeOpen | DecodeGrow | DecodeFinish
Command = OpenCommand | DecodeCancel | DecodePause | DecodeStop | DecodeResidence


class Prepare(Struct):
    """To a text thread: tokenize and check a request. `take` and `drop` release the message of the request."""

    stream: Stream
    submit: Submit | None
    body: bytes
    dropped: bool = False

    def take(self) -> tuple[Stream, Submit | None, bytes]:
        """In the text thread: take the request; its submit is None if it was dropped."""
        submit, body = self.submit, self.body
        self.submit, self.body = None, b""
        return self.stream, submit, body

    def put_back(self, submit: Submit, body: bytes) -> bool:
        """In the text thread that took it: leave it to another thread; False if it was dropped meanwhile."""
        self.submit, self.body = submit, body
        if self.dropped:  # read after the write; `drop` sets it before its own write
            self.drop()
        return not self.dropped

    def drop(self) -> None:
        """In the I/O thread: release the request, which has ended."""
        self.dropped = True
        self.submit, self.body = None, b""


Post = Callable[[Event], None]
