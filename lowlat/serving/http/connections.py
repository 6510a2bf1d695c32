"""This module limits connections to the gateway, in number and in time.

A connection belongs to a stranger until a request with the key came on it, and then to a caller. Strangers and callers
have separate limits, so that clients without the key cannot keep callers out. With too many strangers, the oldest idle
stranger's connection is closed; with too many callers, an idle caller's.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from lowlat.serving.http.errors import ApiError
from lowlat.serving.http.exchange import EXTENSION

__all__ = ["Connection", "ConnectionLimits", "Connections"]

CLOSE = (b"connection", b"close")


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections.

    answer_s           time for a stranger's request, to one of the few paths that need no key
    headers_s          time for a request's headers, from the connection's begin or from their first byte
    idle_s             time for which a stranger's connection may wait for its next request
    caller_idle_s      the same for a caller's; longer than clients keep theirs, or they would send into a closing one
    linger_s           time for which, and bytes up to which, input after an answer is dropped before the connection
    max_linger_bytes   closes: closing a socket with unread bytes could lose the answer
    stranger_s         the least time for which a stranger keeps its place: the requests of many callers may come later
    max_strangers      connections without a request that had the key; more wait until they are accepted
    max_callers        connections with one
    """

    headers_s: float = 10.0
    answer_s: float = 30.0
    idle_s: float = 5.0
    caller_idle_s: float = 75.0
    linger_s: float = 2.0
    max_linger_bytes: int = 4 << 20
    stranger_s: float = 0.5
    max_strangers: int = 256
    max_callers: int = 1000

    def within(self, num_descriptors: int) -> "ConnectionLimits":
        """The same bounds, lower where a process may open only so many files."""
        strangers = max(1, min(self.max_strangers, num_descriptors // 4))
        callers = max(1, min(self.max_callers, num_descriptors - strangers))
        return replace(self, max_strangers=strangers, max_callers=callers)


class Connections:
    """The connections of strangers and of callers, oldest first."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._strangers: dict[Connection, None] = {}
        self._callers: dict[Connection, None] = {}

    def __iter__(self) -> Iterator["Connection"]:
        return iter([*self._strangers, *self._callers])

    def has_room(self, num_coming: int) -> bool:
        """Whether another connection may be accepted next to those that come: it has a place, or takes one that a
        stranger has had for its time.
        """
        if len(self._strangers) + num_coming < self.limits.max_strangers:
            return True
        return sum(1 for _ in self._spent()) > num_coming

    def add(self, connection: "Connection") -> None:
        """Take a new connection; of too many strangers one is let go."""
        if len(self._strangers) >= self.limits.max_strangers:
            self.drop_stranger()
        self._strangers[connection] = None

    def admit(self, connection: "Connection") -> bool:
        """Make a stranger a caller; False if there are too many callers and all are busy."""
        if connection in self._callers:
            return True
        if len(self._callers) >= self.limits.max_callers:
            idle = next((other for other in self._callers if other.idle), None)
            if idle is None:
                return False
            self._let_go(idle)
        self._strangers.pop(connection, None)
        self._callers[connection] = None
        return True

    def discard(self, connection: "Connection") -> None:
        """Forget a connection that was closed."""
        self._strangers.pop(connection, None)
        self._callers.pop(connection, None)

    def drop_stranger(self) -> bool:
        """Close the oldest stranger that has had its time, an idle one if possible; False if there is none."""
        spent = list(self._spent())
        found = next((other for other in spent if other.idle), spent[0] if spent else None)
        if found is None:
            return False
        self._let_go(found)
        return True

    def _spent(self) -> Iterator["Connection"]:
        """The strangers that have had their time, oldest first."""
        end = time.monotonic() - self.limits.stranger_s
        return itertools.takewhile(lambda other: other.made_at <= end, self._strangers)

    def _let_go(self, connection: "Connection") -> None:
        self.discard(connection)
        connection.abort()


class Connection(H11Protocol):
    """A connection of uvicorn's, with time limits for a request's headers, between requests, and after an answer.

    places   every connection of the gateway
    """

    def __init__(self, places: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._places = places
        self._asked: ASGIApp = self.app
        self.app = self._answer
        self._timer: asyncio.TimerHandle | None = None  # closes the connection; None: no time limit
        self._is_admitted = False
        self.made_at = time.monotonic()
        self._num_lingered: int | None = None  # bytes dropped after the last answer
        self.timeout_keep_alive = places.limits.idle_s  # type: ignore[assignment]

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def admit(self) -> bool:
        """See Connections.admit."""
        if self.transport.is_closing():  # nobody will read the answer, and the place is already free
            return True
        if not self._is_admitted and self._places.admit(self):
            self._is_admitted = True
            self.timeout_keep_alive = self._places.limits.caller_idle_s  # type: ignore[assignment]
            self._close_in(None)
        return self._is_admitted

    def abort(self) -> None:
        """Close at once."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._places.add(self)
        self._close_in(self._places.limits.headers_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._places.discard(self)
        self._close_in(None)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        limits = self._places.limits
        if self._num_lingered is not None:
            self._num_lingered += len(data)
            if self._num_lingered > limits.max_linger_bytes:
                self.abort()
            return
        was_idle = self.idle
        super().data_received(data)
        if self.transport.is_closing():
            return
        if not self.idle:
            if was_idle:
                self._close_in(None if self._is_admitted else limits.answer_s)
        elif self._timer is None:
            self._close_in(limits.headers_s)

    def on_response_complete(self) -> None:
        """See H11Protocol; it may begin the next request, where that has come already."""
        if self._num_lingered is None:
            self._close_in(None)
        super().on_response_complete()
        if not self.idle and not self._is_admitted:
            self._close_in(self._places.limits.answer_s)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, as uvicorn does while it handles the reason, in the shape of all errors."""
        if not self.idle and self.cycle.response_started:
            self.abort()
            return
        reason = sys.exception()
        status = HTTPStatus(getattr(reason, "error_status_hint", 400))  # h11's
        answer = ApiError(status, f"the request is not HTTP/1.1: {reason or msg}", code="http").response()
        head = b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode())
        fields = b"".join(b"%b: %b\r\n" % field for field in [*answer.raw_headers, CLOSE])
        self.transport.write(b"".join((head, fields, b"\r\n", answer.body)))
        if not self.idle:  # the handler that waits for the rest of the body cannot answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.linger()

    def linger(self) -> None:
        """Close after an answer whose request was not read to its end, once the caller has had time to read it."""
        if self._num_lingered is None and not self.transport.is_closing():
            self._num_lingered = 0
            self._close_in(self._places.limits.linger_s)
            self.flow.resume_reading()
            try:
                self.transport.write_eof()
            except OSError:  # it is gone already
                self.abort()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and close after an answer for which it did not read the body."""
        exchange = _Exchange(self, self.cycle)
        scope.setdefault("extensions", {})[EXTENSION] = exchange

        async def send_checked(message: Message) -> None:
            if message["type"] == "http.response.start" and self.cycle.more_body:
                self.cycle.transport = _LingeringTransport(self)  # type: ignore[assignment]
                message = {**message, "headers": [*message.get("headers", ()), CLOSE]}
            await send(message)

        await self._asked(scope, receive, send_checked)

    def _close_in(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.abort)


class _LingeringTransport:
    """A connection's transport for one last answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """Close after a while."""
        self._connection.linger()


class _Exchange:
    """See Exchange. Of HTTP/1.1 alone, whose bodies of unknown length are chunked."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._chunked = cycle.scope["http_version"] == "1.1"
        self._transport = connection.transport

    def admit(self) -> bool:
        """See Exchange."""
        return self._connection.admit()

    def can_write(self) -> bool:
        """See Exchange."""
        cycle = self._cycle
        open_ = self._chunked and not cycle.response_complete and not cycle.disconnected and not cycle.more_body
        return open_ and not cycle.flow.write_paused and not self._transport.is_closing()

    def begin(self, start: Awaitable[None], data: bytes) -> None:
        """See Exchange."""
        head = _Head()
        self._cycle.transport = head  # type: ignore[assignment]
        try:
            _finish(start)
        finally:
            self._cycle.transport = self._transport
        self._transport.write(b"".join((*head.pieces, _piece(data) if data else b"")))

    def write(self, data: bytes) -> None:
        """See Exchange."""
        self._transport.write(_piece(data))


class _Head:
    """A transport that keeps what is written, which leaves with what follows."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.write = self.pieces.append


def _piece(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _finish(work: Awaitable[None]) -> None:
    """Run a coroutine that has nothing to wait for. Raises RuntimeError for one that waits."""
    try:
        next(iter(work.__await__()))
    except StopIteration:
        return
    raise RuntimeError("the head of an answer had to wait for its socket")
