"""The asyncio client: the loop watches the sockets' own descriptors, no thread and no ZeroMQ poller between."""

import asyncio
import select
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from lowlat.errors import LowlatError, ServerGone
from lowlat.ipc.client.base import BaseClient
from lowlat.ipc.client.chunk import Chunk
from lowlat.ipc.client.protocol import Connection, Reply, Stream, Waiter
from lowlat.ipc.client.request import Prompt, Request, make_request
from lowlat.ipc.client.settings import RETRY_S, check_seconds
from lowlat.ipc.client.transport import Transport
from lowlat.ipc.messages import Pong, Welcome

__all__ = ["AsyncClient", "AsyncGeneration"]

Value = TypeVar("Value")


class AsyncLink:
    """Sockets and the connection on them, driven by one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sockets: Transport, connection: Connection) -> None:
        self.connection = connection
        self.loop = loop
        self._thread = threading.get_ident()
        self._sockets = sockets
        self._waiting: dict[Waiter, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._shut = False
        self._news = select.poll()
        self._writes = False
        self._news.register(sockets.message_fd, select.POLLIN)
        loop.add_reader(sockets.message_fd, self.pump)
        if sockets.loss_fd is not None:
            self._news.register(sockets.loss_fd, select.POLLIN)
            loop.add_reader(sockets.loss_fd, self.check)

    def pump(self) -> None:
        """Send what is to be sent, and hand out what has come."""
        connection, sockets = self.connection, self._sockets
        outgoing = connection.outgoing
        while not self._shut:
            while outgoing and sockets.send(outgoing[0]):
                outgoing.popleft()
            if connection.failure is not None:
                self._shut_down()
            elif (frame := sockets.receive(False)) is not None:
                self._wake(connection.receive(frame, time.monotonic()))
            elif sockets.lost is not None:
                connection.fail(sockets.lost)
            else:
                if sockets.pending is not self._writes:
                    self._watch_room(sockets.pending)
                return

    def check_news(self) -> None:
        """Check, if anything has happened: whatever happens makes a descriptor readable."""
        if not self._shut and self._news.poll(0):
            self.check()

    def check(self) -> None:
        """Take what has come, then see whether the connection is lost."""
        self.pump()
        if self._shut:
            return
        self._sockets.look()
        if self._sockets.lost is not None:
            self.fail(self._sockets.lost)

    def fail(self, reason: str, error: LowlatError | None = None) -> None:
        """End all that is under way."""
        self.connection.fail(reason, error)
        self._shut_down()

    def close(self, reason: str) -> None:
        """End all, from any thread, also when the loop has ended."""
        error = LowlatError(reason)
        if threading.get_ident() == self._thread or self.loop.is_closed():
            self.fail(reason, error)
        else:
            self.loop.call_soon_threadsafe(self.fail, reason, error)

    async def wait(self, waiter: Waiter, deadline: float | None) -> bool:
        """Wait until there is something to take; False when the deadline (monotonic) has passed."""
        self.connection.attend(time.monotonic())
        while not waiter.ready and self.connection.failure is None:
            future = self._waiting[waiter] = self.loop.create_future()
            timer = None if deadline is None else self.loop.call_later(deadline - time.monotonic(), _resolve, future)
            if self._timer is None:
                self._tick()
            try:
                await future
            finally:
                self._waiting.pop(waiter, None)
                if timer is not None:
                    timer.cancel()
            if deadline is not None and not waiter.ready and time.monotonic() >= deadline:
                return False
        return True

    def abandon(self, number: int) -> None:
        """Cancel a request whose reader is gone; from any thread, as when memory is collected."""
        if threading.get_ident() == self._thread:
            self.loop.call_soon(self._abandon, number)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._abandon, number)

    def _abandon(self, number: int) -> None:
        self._wake(self.connection.abandon(number))
        self.pump()

    def _tick(self) -> None:
        self._timer = None
        if self._waiting and not self._shut:
            due = self.connection.tick(time.monotonic())
            self.pump()
            if not self._shut:
                self._timer = self.loop.call_later(due, self._tick)

    def _watch_room(self, wanted: bool) -> None:
        """Be told when there is room for the rest of a message that is longer than the kernel's buffer."""
        self._writes = wanted
        if wanted:
            self.loop.add_writer(self._sockets.message_fd, self._make_room)
        else:
            self.loop.remove_writer(self._sockets.message_fd)

    def _make_room(self) -> None:
        if self._sockets.flush():
            self.pump()

    def _wake(self, waiter: Waiter | None) -> None:
        future = None if waiter is None else self._waiting.get(waiter)
        if future is not None:
            _resolve(future)

    def _shut_down(self) -> None:
        if self._shut:
            return
        self._shut = True
        if self._timer is not None:
            self._timer.cancel()
        for future in self._waiting.values():
            _resolve(future)
        if not self.loop.is_closed():
            self.loop.remove_reader(self._sockets.message_fd)
            if self._sockets.loss_fd is not None:
                self.loop.remove_reader(self._sockets.loss_fd)
            if self._writes:
                self._watch_room(False)
        self._sockets.close()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncGeneration:
    """The chunks of one request, in order; the last one has a finish_reason.

    Leaving it before, and the cancellation of a task that waits for it, cancels the request. The request is sent when
    the first chunk is asked for. Raises what Client.generate says.
    """

    def __init__(self, client: "AsyncClient", request: Request, timeout_s: float | None) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._link: AsyncLink | None = None
        self._stream: Stream | None = None
        self._reading = False
        self._done = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._done:
            raise StopAsyncIteration
        if self._reading:
            raise LowlatError("another task reads this request; give each its own")
        self._reading = True
        try:
            chunk = await self._next()
        except BaseException:
            self._leave()
            raise
        finally:
            self._reading = False
        if chunk is None:
            self._done = True
            raise StopAsyncIteration
        if chunk.finish_reason is not None:
            self._done = True
        return chunk

    async def cancel(self) -> None:
        """Ask the server to end the request; what it brought until then still comes, the last chunk "cancelled"."""
        if self._link is None or self._stream is None:
            self._done = True
            return
        self._link.connection.cancel(self._stream.number)
        self._link.pump()

    async def aclose(self) -> None:
        """Cancel the request if it has not ended, and read no more of it."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self._leave()

    def _leave(self) -> None:
        if self._done:
            return
        self._done = True
        link, stream = self._link, self._stream
        if link is None or stream is None or stream.ended:
            return
        if self._client.in_own_process and not link.loop.is_closed():
            link.abandon(stream.number)

    async def _next(self) -> Chunk | None:
        link, stream = self._link, self._stream
        if link is None or stream is None:
            self._deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
            link = self._link = await self._client.connected()
            stream = self._stream = link.connection.submit(self._request)
            link.pump()
        self._client.check_process()
        if not stream.ready and not await link.wait(stream, self._deadline):
            raise stream.broken("timeout_s has passed", "timeout")
        chunk = link.connection.take(stream)
        if link.connection.outgoing:
            link.pump()
        return chunk


class AsyncClient(BaseClient[AsyncLink, asyncio.Lock]):
    """A client of a lowlat server for asyncio; belongs to the loop that first uses it. See Client for the options.

    Over ipc:// the loop answers the server's heartbeats: where it does not run for longer than the server's
    heartbeat_timeout_s (10 s unless set), the connection is given up, and its streams raise ServerGone.
    """

    @property
    def server(self) -> Welcome:
        """The server's description from when the client connected. Raises LowlatError before that."""
        if not self._links:
            raise LowlatError("the client has not connected yet; await connect()")
        return self._links[0].connection.greeting.take()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        fit_context: bool = False,
        **sampling: Any,
    ) -> AsyncGeneration:
        """Check a request, and return its chunks to iterate over; see Client.generate."""
        check_seconds("timeout_s", timeout_s)
        request = make_request(
            prompt, sampling, deadline_s=deadline_s, template_options=template_options, fit_context=fit_context
        )
        return AsyncGeneration(self, request, timeout_s)

    async def health(self, timeout_s: float = 5.0) -> Pong:
        """Whether it serves, and the age of its last step while requests run."""
        return await self._ask(Connection.health, timeout_s)

    async def stats(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """A snapshot of the server's figures."""
        return await self._ask(Connection.stats, timeout_s)

    async def drain(self, deadline_s: float = 10.0, timeout_s: float = 5.0) -> Pong:
        """Have the server finish for at most so long, and end; see Client.drain."""
        return await self._ask(lambda connection: connection.drain(deadline_s), timeout_s)

    async def connect(self) -> Welcome:
        """Connect now rather than on first use."""
        return (await self.connected()).connection.greeting.take()

    async def close(self) -> None:
        """End what is under way and the connection; harmless when repeated."""
        self._end()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connected(self) -> AsyncLink:
        """The connection, made anew where it was lost."""
        self.check_process()
        loop = asyncio.get_running_loop()
        if self._links and self._links[0].loop is loop and not self._closed:
            link = self._links[0]
            link.check_news()
            if link.connection.failure is None:
                return link
        elif self._links and self._links[0].loop is not loop:
            if not self._links[0].loop.is_closed():
                raise LowlatError("the client belongs to another event loop that still lives; make one for each")
            self._links.pop().fail("its event loop has ended")
            self._connecting = self._new_lock()
        async with self._connecting:
            self._check_open()
            if self._links:
                link = self._links[0]
                link.check()
                if link.connection.failure is None:
                    return link
                self._links.clear()
            link = await self._connect(loop)
            if self._closed:
                link.fail("the client was closed")
                raise LowlatError("the client was closed while it connected")
            self._links.append(link)
            return link

    def _new_lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> AsyncLink:
        deadline = time.monotonic() + self._settings.connect_timeout_s
        failure: LowlatError | None = None
        while True:
            link = AsyncLink(loop, *self._settings.open(time.monotonic()))
            connection = link.connection
            try:
                link.pump()
                await link.wait(connection.greeting, deadline)
            except BaseException:
                link.fail("interrupted")
                raise
            if connection.welcome is not None and connection.failure is None:
                return link
            failure = connection.failure or failure  # the last attempt may have no time left to learn why
            link.fail("no answer")
            if failure is not None and not isinstance(failure, ServerGone):
                raise failure
            if time.monotonic() >= deadline:
                raise self._settings.unreachable(failure)
            await asyncio.sleep(RETRY_S)

    async def _ask(self, question: Callable[[Connection], Reply[Value]], timeout_s: float) -> Value:
        check_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        link = await self.connected()
        reply = question(link.connection)
        link.pump()
        if not await link.wait(reply, deadline):
            raise self._no_answer(timeout_s)
        return reply.take()
