"""Reading a request's body, watching whether its caller disconnects, and answers as server-sent events."""

import asyncio
from collections.abc import Awaitable
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
    "event",
    "read_body",
    "respond",
]

MAX_BODY_BYTES = 4 << 20
BODY_TIMEOUT_S = 30.0
CLIENT_GONE = 499  # for nobody to read
DONE = b"data: [DONE]\n\n"
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


async def read_body(request: Request) -> bytes:
    """The whole body. Raises ApiError for one that is too long or too slow."""
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

    The status is sent with the first event, so that a refusal before it still has a status of its own.
    choices  where chunks come from; they are closed with the stream
    """

    def __init__(self, choices: Choices, answer: Answer, caller: Caller) -> None:
        self.background = None
        self.status_code = 200
        self._choices = choices
        self._answer = answer
        self._caller = caller
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._caller.wait_for(self._send_all(exchange_of(scope), send))
        finally:
            self._caller.leave()
            await self._choices.close()

    async def _send_all(self, exchange: Exchange | None, send: Send) -> None:
        """Send all events: an event in the call that receives its chunk, where the server offers a way and its buffer
        has room, else by `send`. Raises LowlatError for what fails before the first event.
        """

        start: Message = {"type": "http.response.start", "status": self.status_code, "headers": HEADERS}

        def write(place: int, chunk: Chunk) -> bool:
            if exchange is None or not exchange.can_write():
                return False
            data = self._answer.events(place, chunk)
            if not self._begun:
                self._begun = True
                exchange.begin(send(start), data)
            elif data:
                exchange.write(data)
            return True

        try:
            while (taken := await self._choices.next(write)) is not None:
                data = self._answer.events(*taken)
                await self._begin(send, start)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            data = self._answer.last_events()
        except LowlatError as error:
            if not self._begun:
                raise
            data = event(api_error(error).body)
        await self._begin(send, start)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    async def _begin(self, send: Send, start: Message) -> None:
        """Send the status, once."""
        if not self._begun:
            self._begun = True
            await send(start)


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
