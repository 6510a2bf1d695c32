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
CLIENT_GONE = 499  # nobody reads this status
DONE = b"data: [DONE]\n\n"
SILENCE_S = 15.0  # of silence, then a comment is sent: proxies give up after 60 s
COMMENT = b": waiting\n\n"  # readers of events ignore comments
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
    """Encode one event: a JSON value, with a name if the value alone does not show its kind."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return b"".join((head, b"data: ", _encode(value), b"\n\n"))


def check_coding(request: Request) -> None:
    """Refuse a body that is compressed. Raises ApiError."""
    coding = request.headers.get("content-encoding", "identity")
    if coding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"content-encoding: {coding:.40}; bodies are taken uncompressed", code="content_encoding")


async def read_body(request: Request) -> bytes:
    """Read the whole body. Raises ApiError if it is too long, too slow or compressed."""
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
    """The caller that waits for an answer in this task; it may disconnect before the answer comes."""

    def __init__(self, receive: Receive) -> None:
        self._task = asyncio.current_task()
        self._has_left = False
        self._gone = asyncio.ensure_future(_disconnected(receive))
        self._gone.add_done_callback(self._note)

    async def wait_for(self, work: Awaitable[Value]) -> Value | None:
        """Return the work's value; if the caller disconnects first, cancel the work and return None."""
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
    """Sends events as they come, until they end or fail, or the caller disconnects.

    The status is sent with the first event, so that a refusal before it can have its own status. If a request waits for
    long, in the queue or while its prompt is read, the status is sent with a comment.
    choices  the source of chunks; closed with the stream
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
        """Send all events: in the call that receives a chunk, if the server allows it and its buffer has space, else by
        `send`. Raises errors before the first event; a later error becomes the last event.
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
            raise failure  # a fault of the gateway: log it

    def _write(self, exchange: Exchange, send: Send, data: bytes) -> None:
        """Write directly to the connection, as far as it has space, after the status."""
        if not self._begun:
            self._begun = True
            exchange.begin(send(self._start()), data)
        elif data:
            exchange.write(data)
        self._num_written += bool(data)

    def _start(self) -> Message:
        """Return the message that sends the status; middleware may add headers."""
        return {"type": "http.response.start", "status": self.status_code, "headers": [*HEADERS]}

    async def _begin(self, send: Send) -> None:
        """Send the status, once."""
        if not self._begun:
            self._begun = True
            await send(self._start())

    def _break_silence(self, exchange: Exchange, send: Send, num_written: int) -> None:
        """Send a comment if nothing was written since the last call, and schedule the next call."""
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
