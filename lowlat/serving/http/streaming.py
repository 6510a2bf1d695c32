"""This module reads a request's body, watches whether its caller disconnects, and sends server-sent events."""

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lowlat.errors import LowlatError
from lowlat.ipc.client import Chunk
from lowlat.serving.http.choices import Choices
from lowlat.serving.http.errors import ApiError, api_error
from lowlat.serving.http.exchange import Exchange, exchange_of

__all__ = [
    "BODY_TIMEOUT_S",
    "CLIENT_GONE",
    "DONE",
    "MAX_BODY_BYTES",
    "Answer",
    "Caller",
    "EventStream",
    "check_coding",
    "event",
    "read_body",
    "respond",
]

MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 30.0
CLIENT_GONE = 499  # for nobody to read
DONE = b"data: [DONE]\n\n"
SILENCE_S = (
    15.0  # after which a comment says that an answer is still to come: proxies give up on what is silent for 60 s
)
COMMENT = b": waiting\n\n"  # which readers of events pass over
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
Value = TypeVar("Value")
_encode = msgspec.json.Encoder().encode


class Answer(Protocol):
    """An answer in the making, in the shape of one endpoint."""

    def events(self, place: int, chunk: Chunk) -> bytes:
        """Return the events that a chunk of a choice adds to a stream; b"" for nothing."""

    def last_events(self) -> bytes:
        """The end of a stream."""

    def take(self, place: int, chunk: Chunk) -> None:
        """Add a chunk of a choice to the whole."""

    def body(self) -> dict[str, Any]:
        """The whole, when all choices have ended."""


def event(value: Any, name: str | None = None) -> bytes:
    """One event: a JSON value, with a name where its kind is not in the value alone."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return b"".join((head, b"data: ", _encode(value), b"\n\n"))


def check_coding(request: Request) -> None:
    """Refuse a body that is compressed. Raises ApiError."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"content-encoding: {coding:.40}; bodies are taken uncompressed", code="content_encoding")


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError for one that is too long, too slow or compressed."""
    check_coding(request)
    too_long = ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="too_large")
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > MAX_BODY_BYTES:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(CLIENT_GONE, "the caller went away before the body had come", code="gone") from None
    return bytes(body)


class Caller:
    """The caller who waits for an answer in this task, and may go away before it has come."""

    def __init__(self, receive: Receive) -> None:
        self._task = asyncio.current_task()
        self._has_left = False
        self._gone = asyncio.ensure_future(_disconnected(receive))
        self._gone.add_done_callback(self._note)

    async def wait_for(self, work: Awaitable[Value]) -> Value | None:
        """The work's value; None, and the work cancelled, when the caller goes away first."""
        try:
            return await work
        except asyncio.CancelledError:
            if not self._has_left or self._task is None or self._task.uncancel():
                raise
            return None

    def leave(self) -> None:
        """Stop watching for the caller's disconnect."""
        self._gone.remove_done_callback(self._note)
        self._gone.cancel()

    def _note(self, gone: "asyncio.Task[None]") -> None:
        if self._task is not None and not gone.cancelled():
            self._has_left = True
            self._task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come until they end, fail, or nobody reads them any more.

    The status is sent with the first event, so that a refusal before it still has a status of its own; or with a
    comment, which breaks the silence where a request waits for long, in the queue or while its prompt is read.
    choices  where chunks come from; they are closed with the stream
    """

    def __init__(self, choices: Choices, answer: Answer, caller: Caller) -> None:
        self.background = None
        self.status_code = 200
        self._choices = choices
        self._answer = answer
        self._caller = caller
        self._begun = False
        self._num_written = 0
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        if exchange is not None:
            self._break_silence(exchange, send, -1)
        try:
            await self._caller.wait_for(self._send_all(scope, exchange, send))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._caller.leave()
            await self._choices.close()

    async def _send_all(self, scope: Scope, exchange: Exchange | None, send: Send) -> None:
        """Send all events: an event in the call that receives its chunk, where the server offers a way and its buffer
        has room, else by `send`. Raises what fails before the first event; later it is the last one.
        """
        failure: Exception | None = None

        def write(place: int, chunk: Chunk) -> bool:
            if exchange is None or not exchange.can_write():
                return False
            self._write(exchange, send, self._answer.events(place, chunk))
            return True

        try:
            while (taken := await self._choices.next(write)) is not None:
                data = self._answer.events(*taken)
                await self._begin(send)
                self._num_written += bool(data)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            data = self._answer.last_events()
        except Exception as error:
            if not self._begun:
                raise
            failure = error
            data = event(api_error(error, scope).body)
        await self._begin(send)
        await send({"type": "http.response.body", "body": data, "more_body": False})
        if failure is not None and not isinstance(failure, (ApiError, LowlatError)):
            raise failure  # a fault of the gateway's, for its log

    def _write(self, exchange: Exchange, send: Send, data: bytes) -> None:
        """Write what the connection has room for at once, after the status."""
        if not self._begun:
            self._begun = True
            exchange.begin(send(self._start()), data)
        elif data:
            exchange.write(data)
        self._num_written += bool(data)

    def _start(self) -> Message:
        """The status, with headers to which middleware may add."""
        return {"type": "http.response.start", "status": self.status_code, "headers": [*HEADERS]}

    async def _begin(self, send: Send) -> None:
        """Send the status, once."""
        if not self._begun:
            self._begun = True
            await send(self._start())

    def _break_silence(self, exchange: Exchange, send: Send, num_written: int) -> None:
        """Send a comment if nothing was written since the last look, and look again later."""
        if num_written == self._num_written and exchange.can_write():
            self._write(exchange, send, COMMENT)
        again = partial(self._break_silence, exchange, send, self._num_written)
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S, again)


async def respond(request: Request, choices: Choices, answer: Answer, *, stream: bool) -> Response:
    """Answer with what the server generates, as it comes or as a whole; a caller that disconnects cancels it."""
    caller = Caller(request.receive)
    if stream:
        return EventStream(choices, answer, caller)
    try:
        if not await caller.wait_for(_collect(choices, answer)):
            return Response(status_code=CLIENT_GONE)
        return Response(_encode(answer.body()), media_type="application/json")
    finally:
        caller.leave()
        await choices.close()


async def _collect(choices: Choices, answer: Answer) -> bool:
    while (got := await choices.next()) is not None:
        answer.take(*got)
    return True
