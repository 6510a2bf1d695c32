"""The blocking client: safe for several threads, without a thread of its own."""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from lowlat.errors import LowlatError, ServerGone
from lowlat.ipc.client.base import BaseClient
from lowlat.ipc.client.chunk import Chunk
from lowlat.ipc.client.link import Link
from lowlat.ipc.client.protocol import Connection, Reply, Stream
from lowlat.ipc.client.request import Prompt, Request, make_request
from lowlat.ipc.client.settings import RETRY_S, check_seconds
from lowlat.ipc.messages import Pong, Welcome

__all__ = ["Client", "Generation"]

Value = TypeVar("Value")


class Generation:
    """The chunks of one request, in order; the last one has a finish_reason.

    Leaving it before (break, close, the end of a `with`, or dropping it) cancels the request. One thread at a time
    may read it. Raises what Client.generate says.
    """

    def __init__(self, client: "Client", link: Link, stream: Stream, deadline: float | None) -> None:
        self._client = client
        self._link = link
        self._stream = stream
        self._deadline = deadline
        self._reading = False
        self._done = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._done:
            raise StopIteration
        self._client.check_process()
        if self._reading:
            raise LowlatError("another thread reads this request; give each its own")
        try:
            chunk = self._next()
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self._done = True
            raise StopIteration
        if chunk.finish_reason is not None:
            self._done = True
        return chunk

    def cancel(self) -> None:
        """Ask the server to end the request; what it brought until then still comes, the last chunk "cancelled"."""
        self._client.check_process()
        with self._link as connection:
            connection.cancel(self._stream.number)
            self._link.pump()

    def close(self) -> None:
        """Cancel the request if it has not ended, and read no more of it."""
        if self._done:
            return
        self._done = True
        if not self._stream.ended and self._client.in_own_process:
            self._link.abandon(self._stream.number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self.close()

    def _next(self) -> Chunk | None:
        link, stream = self._link, self._stream
        with link as connection:
            if not stream.ready:
                self._reading = True
                try:
                    in_time = link.wait(stream, self._deadline)
                finally:
                    self._reading = False
                if not in_time:
                    raise stream.broken("timeout_s has passed", "timeout")
            chunk = connection.take(stream)
            if connection.outgoing:
                link.pump()
            return chunk


class Client(BaseClient[Link, "threading.Lock"]):
    """A client of a lowlat server, for programs that block; safe for several threads at once.

    endpoint           ipc:///a/path.sock or tcp://host:port; None: LOWLAT_ENDPOINT, or the user's own default
    name               for the server's logs and statistics, at most 64 characters
    connect_timeout_s  how long the first call may wait for the server to answer
    window             tokens of a request that may wait unread here; beyond them the server pauses that request
    curve              keys, for tcp:// off this machine
    Connects on first use; when the connection was lost, the next call makes a new one. Over ipc:// a process in which
    no thread gets the GIL for longer than the server's heartbeat_timeout_s (10 s unless set) is given up. Use it as a
    context manager, or close it. Raises ConfigError for an endpoint or an option that cannot be; calls raise
    ServerGone when no server answers, Busy when it takes no more clients.
    """

    @property
    def server(self) -> Welcome:
        """The server's description: version, epoch, model, tokenizer, limits. Connects where needed."""
        return self._connected().connection.greeting.take()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        fit_context: bool = False,
        **sampling: Any,
    ) -> Generation:
        """Send a request, and iterate over what comes of it.

        prompt            text, token ids, or chat messages: mappings with role and content
        timeout_s         after so long here, StreamError with the code "timeout" is raised
        deadline_s        after so long there, the server cancels: the last chunk has the code "deadline"
        template_options  for the model's chat template: tools, enable_thinking, ...
        fit_context       lower max_tokens to what the context has room for beside the prompt
        sampling          max_tokens, temperature, stop, seed, logprobs, ...: the fields of lowlat.SamplingParams
        Raises RequestError for a prompt or option that cannot be served, before anything is sent where it can be
        known; Busy when the queue is full; StreamError, ServerGone when the request breaks off, with its tokens.
        """
        deadline = None if timeout_s is None else _deadline(timeout_s)
        request = make_request(
            prompt, sampling, deadline_s=deadline_s, template_options=template_options, fit_context=fit_context
        )
        link, stream = self._submit(request)
        return Generation(self, link, stream, deadline)

    def health(self, timeout_s: float = 5.0) -> Pong:
        """Whether it serves, and the age of its last step while requests run."""
        return self._ask(Connection.health, timeout_s)

    def stats(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """A snapshot of the server's figures."""
        return self._ask(Connection.stats, timeout_s)

    def drain(self, deadline_s: float = 10.0, timeout_s: float = 5.0) -> Pong:
        """Have the server take no more requests, finish those it has for at most so long, and end.

        Returns when the server has understood. Raises RequestError when this user may not ask for it.
        """
        return self._ask(lambda connection: connection.drain(deadline_s), timeout_s)

    def connect(self) -> Welcome:
        """Connect now rather than on first use."""
        return self.server

    def close(self) -> None:
        """End what is under way and the connection; harmless when repeated."""
        self._end()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_lock(self) -> "threading.Lock":
        return threading.Lock()

    def _submit(self, request: Request) -> tuple[Link, Stream]:
        link = self._connected()
        with link as connection:
            stream = connection.submit(request)
            link.send()
        return link, stream

    def _ask(self, question: Callable[[Connection], Reply[Value]], timeout_s: float) -> Value:
        deadline = _deadline(timeout_s)
        link = self._connected()
        with link as connection:
            reply = question(connection)
            if not link.wait(reply, deadline):
                raise self._no_answer(timeout_s)
            return reply.take()

    def _connected(self) -> Link:
        self.check_process()
        with self._connecting:
            if self._links:
                link = self._links[0]
                with link as connection:
                    link.check_news()
                if connection.failure is None:
                    return link
                self._links.clear()
            self._check_open()
            link = self._connect()
            self._links.append(link)
            return link

    def _connect(self) -> Link:
        """Try until a server answers HELLO: it may be about to start, or a socket file may be a dead server's."""
        deadline = time.monotonic() + self._settings.connect_timeout_s
        failure: LowlatError | None = None
        while True:
            link = Link(*self._settings.open(time.monotonic()))
            try:
                with link as connection:
                    link.wait(connection.greeting, deadline)
                if connection.welcome is not None and connection.failure is None:
                    link.keep()
                    return link
            except BaseException:
                link.close("interrupted")
                raise
            failure = connection.failure or failure  # the last attempt may have no time left to learn why
            link.close("no answer")
            if failure is not None and not isinstance(failure, ServerGone):
                raise failure
            if time.monotonic() >= deadline:
                raise self._settings.unreachable(failure)
            time.sleep(RETRY_S)


def _deadline(timeout_s: float) -> float:
    check_seconds("timeout_s", timeout_s)
    return time.monotonic() + timeout_s
