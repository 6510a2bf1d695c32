"""This module has the asyncio client."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import msgspec

from lowlat.errors import LowlatError, ServerGone, StreamError
from lowlat.ipc.chunk import Chunk
from lowlat.ipc.client.async_connection import AsyncConnection
from lowlat.ipc.client.base import CLOSED, BaseClient
from lowlat.ipc.client.generation import BaseGeneration, Submission
from lowlat.ipc.client.open_prompt import AsyncOpenPrompt
from lowlat.ipc.client.protocol import ClientProtocol, Reply
from lowlat.ipc.client.request import Request, make_request
from lowlat.ipc.client.settings import RETRY_S, deadline_of
from lowlat.ipc.messages import Pong, Result, Welcome
from lowlat.ipc.options import SamplingOptions
from lowlat.ipc.prompts import Prompt

__all__ = ["AsyncClient", "AsyncGeneration"]

Value = TypeVar("Value")
_starting: set["asyncio.Task[None]"] = set()  # an event loop does not keep its tasks alive


class AsyncGeneration(BaseGeneration[AsyncConnection]):
    """AsyncGeneration yields the chunks of one request, in order; see BaseGeneration.

    Cancelling a task that waits for a chunk cancels it.

    starting  the task that connects and sends the request; None once it is sent
    """

    def __init__(
        self,
        client: "AsyncClient",
        submission: Submission[AsyncConnection],
        deadline: float | None,
        starting: "asyncio.Task[None] | None",
    ) -> None:
        super().__init__(client, submission, deadline)
        self._starting = starting
        self._wake: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if not self._begin():
            raise StopAsyncIteration
        try:
            chunk = await self._next()
        except BaseException:
            self._leave()
            raise
        self._end(chunk)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever `take` may have something new, in the call that receives it.

        Use it instead of `async for` to pass chunks on without a switch of tasks. `wake` runs in the event loop, must
        not block, and must not raise.
        """
        self._wake = wake
        if self._starting is not None:
            self._starting.add_done_callback(self._watch_sent)
        else:
            self._watch_sent()
        if self._deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, self._deadline - time.monotonic()), wake)

    def take(self) -> Chunk | None:
        """Return the next chunk; None if it has not come yet, and after the last. Raises what reading does."""
        if self._done or (self._starting is not None and not self._starting.done()):
            self._check_deadline()
            return None
        self._starting = None
        try:
            connection, stream = self._submitted()
            if not stream.ready or self._is_open:
                self._check_deadline()
                return None
            chunk = connection.protocol.take(stream)
        except BaseException:
            self._leave()
            raise
        self._end(chunk)
        if self._done:
            self._unwatch()
        if connection.protocol.outgoing:
            connection.loop.call_soon(connection.pump)
        return chunk

    async def cancel(self) -> None:
        """Ask the server to end the request; chunks until then still come, and the last one says "cancelled"."""
        await self._started()
        connection, stream = self._submitted()
        connection.protocol.cancel(stream.number)
        connection.pump()

    async def pause(self) -> bool:
        """Take the request off its slot, for others, until `resume`; its tokens stay the same.

        Returns when the server has done so, or False if the request ended first. Raises CapacityError if the server has
        no space for the request's state (pause_gib), and RequestError while its prompt is open; it then keeps running.
        """
        return await self._pause(resumes=False)

    async def resume(self) -> None:
        """Let a paused request continue."""
        await self._pause(resumes=True)

    async def _pause(self, *, resumes: bool) -> bool:
        await self._started()
        connection, stream = self._submitted()
        reply = connection.protocol.pause(stream.number, resumes=resumes)
        connection.pump()
        if not await connection.wait(reply, self._deadline):
            raise stream.broken("timeout_s has passed", "timeout")
        return reply.take().paused

    async def _append(self, pieces: Iterable[str | bytes], deadline: float | None) -> None:
        """Send pieces of an open prompt, each when the server takes it."""
        await self._started()
        connection, stream = self._submitted()
        await self._keep_pace(connection)
        connection.check_news()  # receive grants, or the error that ended the request
        stream.check_open()
        try:
            for piece in pieces:
                if not stream.ready and not await connection.wait(stream, deadline):
                    raise stream.broken("the server took no more of the prompt (append_credit) in timeout_s", "timeout")
                connection.protocol.append(stream, piece)
                connection.pump()
        except BaseException:  # the prompt may lack a part
            self._leave()
            raise

    @staticmethod
    async def _keep_pace(connection: AsyncConnection) -> None:
        """Wait if many small messages were sent recently."""
        delay = connection.protocol.pace.delay(time.monotonic())
        if delay:
            await asyncio.sleep(delay)

    async def _finish(self, *, speculative: bool, deadline: float | None) -> None:
        await self._started()
        connection, stream = self._submitted()
        await self._keep_pace(connection)
        connection.check_news()
        connection.protocol.finish(stream, speculative=speculative)
        connection.pump()
        self._deadline = deadline

    async def _while_open(self, work: Awaitable[Value]) -> Value:
        """Wait for `work`, or for the end of the request, whose prompt is open."""
        working = asyncio.ensure_future(work)
        try:
            await self._started()
            connection, stream = self._submitted()
            ended = asyncio.ensure_future(connection.ended(stream))
            try:
                await asyncio.wait((working, ended), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()
                await asyncio.wait((ended,))
            if not working.done():
                stream.check_open()
            return await working
        finally:
            working.cancel()

    async def aclose(self) -> None:
        """Cancel the request if it has not ended, and stop reading it."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _watch_sent(self, starting: "asyncio.Task[None] | None" = None) -> None:
        """Watch the stream of a request that was sent, and call `wake` immediately."""
        connection, stream = self._submission.connection, self._submission.stream
        if self._wake is None or self._done:
            return
        if connection is not None and stream is not None and not stream.ended:
            connection.watch(stream, self._wake)
        self._wake()

    def _unwatch(self) -> None:
        connection, stream = self._submission.connection, self._submission.stream
        if self._wake is not None and connection is not None and stream is not None:
            connection.unwatch(stream)
        self._wake = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self) -> None:
        self._unwatch()
        super()._leave()

    def _check_deadline(self) -> None:
        """Raise StreamError if timeout_s has passed."""
        if self._done or self._deadline is None or time.monotonic() < self._deadline:
            return
        stream = self._submission.stream
        if stream is None:
            raise StreamError("timeout_s has passed, and the client has not connected yet", code="timeout")
        raise stream.broken("timeout_s has passed", "timeout")

    async def _started(self) -> None:
        """Wait until the request was sent, or sending has failed."""
        if self._starting is not None:
            timeout_s = None if self._deadline is None else self._deadline - time.monotonic()
            if not (await asyncio.wait((self._starting,), timeout=timeout_s))[0]:
                raise StreamError("timeout_s has passed, and the client has not connected yet", code="timeout")
            self._starting = None

    async def _next(self) -> Chunk | None:
        if self._starting is not None:
            await self._started()
        connection, stream = self._submitted()
        if not stream.ready and not await connection.wait(stream, self._deadline):
            raise stream.broken("timeout_s has passed", "timeout")
        chunk = connection.protocol.take(stream)
        if connection.protocol.outgoing:
            connection.pump()
        return chunk


class AsyncClient(BaseClient[AsyncConnection, asyncio.Lock]):
    """AsyncClient is the asyncio client of a lowlat server; it belongs to the loop that first uses it. See Client."""

    @property
    def server(self) -> Welcome:
        """The server's description from when the client connected. Raises LowlatError before that."""
        if not self._connections:
            raise LowlatError("the client has not connected yet; await connect()")
        return self._connections[0].protocol.greeting.take()

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        fit_context: bool = False,
        allow_special: bool = False,
        cache_salt: str = "",
        session: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncGeneration:
        """Send a request, and return an iterator over its chunks; see Client.generate.

        If the client is not connected yet, a task connects and sends the request; reading the first chunk then raises
        errors of the server. Raises LowlatError outside an event loop.
        """
        deadline = deadline_of(timeout_s)
        request = make_request(
            prompt,
            sampling,
            deadline_s=deadline_s,
            template_options=template_options,
            fit_context=fit_context,
            allow_special=allow_special,
            cache_salt=cache_salt,
            session=session,
        )
        return self._send(request, deadline)

    def open_prompt(
        self,
        prompt: Prompt | None = None,
        *,
        deadline_s: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        allow_special: bool = False,
        cache_salt: str = "",
        session: str = "",
        add_special_tokens: bool = True,
        max_prompt_tokens: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncOpenPrompt:
        """Send a request whose prompt is still being written; see Client.open_prompt.

        If the client is not connected yet, a task connects; `append` and `finish` then raise errors of the server.
        Raises LowlatError outside an event loop.
        """
        request = make_request(
            prompt,
            sampling,
            deadline_s=deadline_s,
            template_options=template_options,
            allow_special=allow_special,
            cache_salt=cache_salt,
            session=session,
            add_special_tokens=add_special_tokens,
            is_open=True,
            max_prompt_tokens=max_prompt_tokens,
        )
        return AsyncOpenPrompt(self._send(request, None))

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        template_options: Mapping[str, Any] | None = None,
        allow_special: bool = False,
        add_special_tokens: bool = True,
    ) -> tuple[int, ...]:
        """Return the token ids of a text or of chat messages; see Client.tokenize."""
        request = make_request(
            prompt,
            {},
            template_options=template_options,
            allow_special=allow_special,
            result="token_ids",
            add_special_tokens=add_special_tokens,
        )
        token_ids: list[int] = []
        async for chunk in self._send(request, deadline_of(timeout_s)):
            token_ids += chunk.token_ids
        return tuple(token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> str:
        """Return the text of token ids, special tokens included; see Client.detokenize."""
        return await self._text(token_ids, "text", timeout_s)

    async def token_texts(self, token_ids: Sequence[int], *, timeout_s: float | None = None) -> list[str]:
        """Return the text of each token alone; see Client.token_texts."""
        return msgspec.json.decode(await self._text(token_ids, "token_texts", timeout_s), type=list[str])

    async def _text(self, token_ids: Sequence[int], result: Result, timeout_s: float | None) -> str:
        if not token_ids:
            return "" if result == "text" else "[]"
        request = make_request(list(token_ids), {}, result=result)
        return "".join([chunk.text async for chunk in self._send(request, deadline_of(timeout_s))])

    def _send(self, request: Request, deadline: float | None) -> AsyncGeneration:
        self.check_process()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise LowlatError("generate() sends its request at once and needs a running event loop") from None
        submission: Submission[AsyncConnection] = Submission()
        connection = self._current(loop)
        if connection is not None and not self._connecting.locked():
            submission.submit(connection, request)
            connection.pump()
            return AsyncGeneration(self, submission, deadline, None)
        starting = loop.create_task(self._start(submission, request))
        _starting.add(starting)
        starting.add_done_callback(_starting.discard)
        return AsyncGeneration(self, submission, deadline, starting)

    async def health(self, timeout_s: float = 5.0) -> Pong:
        """Tell whether the server serves, and the age of its last step while requests run."""
        return await self._ask(ClientProtocol.health, timeout_s)

    async def stats(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Return a snapshot of the server's figures."""
        return await self._ask(ClientProtocol.stats, timeout_s)

    async def drain(self, deadline_s: float = 10.0, timeout_s: float = 5.0) -> Pong:
        """Have the server finish for at most so long, and end; see Client.drain."""
        return await self._ask(lambda protocol: protocol.drain(deadline_s), timeout_s)

    async def sleep(self, timeout_s: float = 60.0) -> str:
        """Have the server give its model's memory on the device back; see Client.sleep."""
        return (await self._ask(lambda protocol: protocol.reside(asleep=True), timeout_s)).state

    async def wake(self, timeout_s: float = 60.0) -> str:
        """Have the server take the memory again; see Client.wake."""
        return (await self._ask(lambda protocol: protocol.reside(asleep=False), timeout_s)).state

    async def connect(self) -> Welcome:
        """Connect now rather than on first use."""
        return (await self.connected()).protocol.greeting.take()

    async def close(self, reason: str = CLOSED) -> None:
        """End what is under way, whose readers are told the reason, and the connection; harmless when repeated."""
        self._end(reason)

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def connected(self) -> AsyncConnection:
        """The connection, made again where it was lost."""
        self.check_process()
        loop = asyncio.get_running_loop()
        connection = self._current(loop)
        if connection is not None:
            return connection
        async with self._connecting:
            self._check_open()
            connection = self._current(loop)
            if connection is not None:
                return connection
            connection = await self._connect(loop)
            if self._closed:
                connection.fail("the client was closed")
                raise LowlatError("the client was closed while it connected")
            self._connections.append(connection)
            return connection

    def _new_lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    def _current(self, loop: asyncio.AbstractEventLoop) -> AsyncConnection | None:
        """The connection that lives, None where one is to be made. Raises LowlatError in another loop than its own."""
        if not self._connections or self._closed:
            return None
        connection = self._connections[0]
        if connection.loop is loop:
            connection.check_news()
            if connection.protocol.failure is None:
                return connection
        elif not connection.loop.is_closed():
            raise LowlatError("the client belongs to another event loop that still lives; make one for each")
        else:
            connection.fail("its event loop has ended")
            self._connecting = self._new_lock()
        self._connections.clear()
        return None

    async def _start(self, submission: Submission[AsyncConnection], request: Request) -> None:
        try:
            connection = await self.connected()
            if not submission.left:
                submission.submit(connection, request)
                connection.pump()
        except LowlatError as error:
            submission.failure = error

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> AsyncConnection:
        deadline = time.monotonic() + self._settings.connect_timeout_s
        failure: LowlatError | None = None
        while True:
            try:
                connection = AsyncConnection(loop, *self._settings.open(time.monotonic()))
            except ServerGone as error:
                failure = error
            else:
                protocol = connection.protocol
                try:
                    connection.pump()
                    await connection.wait(protocol.greeting, deadline)
                except BaseException:
                    connection.fail("interrupted")
                    raise
                if protocol.welcome is not None and protocol.failure is None:
                    return connection
                failure = protocol.failure or failure  # the last attempt may have no time left to learn why
                connection.fail("no answer")
            if failure is not None and not isinstance(failure, ServerGone):
                raise failure
            if time.monotonic() >= deadline:
                raise self._settings.unreachable(failure)
            await asyncio.sleep(RETRY_S)

    async def _ask(self, question: Callable[[ClientProtocol], Reply[Value]], timeout_s: float) -> Value:
        deadline = deadline_of(timeout_s)
        connection = await self.connected()
        reply = question(connection.protocol)
        connection.pump()
        if not await connection.wait(reply, deadline):
            raise self._no_answer(timeout_s)
        return reply.take()
