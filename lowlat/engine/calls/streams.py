"""A stream yields the chunks of one request, in a thread or an event loop, and makes an answer of them."""

import asyncio
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Self, TypeVar

from lowlat.engine.calls.driver import Driver, Ticket
from lowlat.engine.calls.mailboxes import Brought, LoopMailbox, ThreadMailbox
from lowlat.engine.calls.prompts import Prepared
from lowlat.errors import LowlatError, StreamError
from lowlat.ipc.answer import Answer, AnswerParts
from lowlat.ipc.chunk import Chunk
from lowlat.ipc.messages import FinishReason

__all__ = ["AsyncStream", "Stream"]

Box = TypeVar("Box", ThreadMailbox, LoopMailbox)
LATE = "timeout_s has passed"


class _Reading(Generic[Box]):
    """Does what both kinds of streams share: it submits a request, turns its outputs into chunks, and cancels it."""

    def __init__(self, driver: Driver, mailbox: Box) -> None:
        self._driver = driver
        self._mailbox: Box = mailbox
        self._parts = AnswerParts()
        self._ticket: Ticket | None = None
        self._left = False
        self._done = False

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self._leave()

    @property
    def request_id(self) -> str:
        """The request's name, for `Runtime.metrics`; "" until the runtime has taken it."""
        return "" if self._ticket is None else self._ticket.request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt's token ids; () until the runtime has taken it."""
        return () if self._ticket is None else self._ticket.prepared.prompt

    def __repr__(self) -> str:
        state = "ended" if self._done else "under way"
        return f"{type(self).__name__}({self.request_id!r}, {len(self._parts.received)} tokens, {state})"

    def cancel(self) -> None:
        """Cancel the request. Chunks made before that still come; the last one has finish_reason "cancelled"."""
        if self._ticket is not None:
            self._driver.cancel(self._ticket, drop=False)

    def _submit(self, prepared: Prepared) -> None:
        self._ticket = ticket = Ticket(prepared, self._mailbox)
        if self._left:
            return
        try:
            self._driver.submit(ticket)
        except BaseException:
            self._done = True
            raise

    def _leave(self) -> None:
        """Stop reading, and cancel the request if it has not ended."""
        self._done = self._left = True
        if self._ticket is not None and not self._ticket.over:
            self._driver.cancel(self._ticket, drop=True)

    def _read(self, item: Brought | Exception) -> Chunk:
        """Turn an item into the caller's chunk. Raises the item if it is an error, and StreamError for a failure."""
        if isinstance(item, Exception):
            self._done = True
            raise self._parts.received.broken(str(item), item.code) if isinstance(item, StreamError) else item
        output, metrics = item
        reason: FinishReason | None = output.finish_reason
        chunk = Chunk.of(output, reason, None if metrics is None else metrics.to_dict())
        self._parts.add(chunk)
        self._done = reason is not None
        if reason == "error":
            raise self._parts.received.broken(output.error or "the request failed", output.error_code or "internal")
        return chunk


class Stream(_Reading[ThreadMailbox]):
    """Stream yields the chunks of one request as they come; the last one has a finish_reason and metrics.

    Leaving it before its end (break, `close`, the end of a `with`, or dropping it) cancels the request. One thread
    reads it. Raises StreamError, with the tokens that came before, if the request fails or the runtime is closed
    meanwhile; DeviceError if the device has failed.
    """

    def __init__(self, driver: Driver, prepared: Prepared, timeout_s: float | None, *, each: bool = True) -> None:
        super().__init__(driver, ThreadMailbox(each=each))
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._submit(prepared)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        if self._done:
            raise StopIteration
        try:
            item = self._mailbox.wait(self._deadline)
            if item is None:
                raise self._parts.received.broken(LATE, "timeout")
            return self._read(item)
        except BaseException:
            if not self._done:
                self._leave()
            raise

    def answer(self) -> Answer:
        """Read to the end, and return the whole answer, chunks that were already read included."""
        for _ in self:
            pass
        return self._parts.answer()

    def close(self) -> None:
        """Cancel the request if it has not ended, and stop reading."""
        if not self._done:
            self._leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Reading[LoopMailbox]):
    """AsyncStream yields the chunks of one request as they come, for one task; see Stream.

    Leaving it (break, `aclose`, the end of an `async with`, cancelling the task that waits, dropping it) cancels the
    request. For an invalid request the constructor raises RequestError if `quick`, else the first chunk does.

    prepare  makes the request; unless it is quick, a thread calls it
    """

    def __init__(
        self,
        driver: Driver,
        prepare: Callable[[], Prepared],
        timeout_s: float | None,
        *,
        quick: bool,
        each: bool = True,
    ) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise LowlatError("astream needs a running event loop; use stream, or call it in a coroutine") from None
        super().__init__(driver, LoopMailbox(loop, each=each))
        self._deadline = None if timeout_s is None else loop.time() + timeout_s
        self._preparing: asyncio.Future[Prepared] | None = None
        if quick:
            self._submit(prepare())
        else:
            self._preparing = loop.run_in_executor(None, prepare)
            self._preparing.add_done_callback(partial(_begin, weakref.ref(self)))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._done:
            raise StopAsyncIteration
        try:
            if self._deadline is None:
                return self._read(await self._next())
            async with asyncio.timeout_at(self._deadline):
                item = await self._next()
            return self._read(item)
        except BaseException as error:
            if not self._done:
                self._leave()
            if isinstance(error, TimeoutError):
                raise self._parts.received.broken(LATE, "timeout") from None
            raise

    async def _next(self) -> Brought | Exception:
        if self._preparing is not None:
            await asyncio.shield(self._preparing)
            self._preparing = None
        return await self._mailbox.wait()

    async def answer(self) -> Answer:
        """Read to the end, and return the whole answer, chunks that were already read included."""
        async for _ in self:
            pass
        return self._parts.answer()

    async def aclose(self) -> None:
        """Cancel the request if it has not ended, and stop reading."""
        if not self._done:
            self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _begin(self, prepared: Prepared) -> None:
        """Submit the request that a thread has prepared; an error goes to the reader through the mailbox."""
        try:
            self._submit(prepared)
        except LowlatError as error:
            self._done = False
            self._mailbox.put(error, last=True)


def _begin(stream: "weakref.ref[AsyncStream]", prepared: "asyncio.Future[Prepared]") -> None:
    found = stream()
    if not prepared.cancelled() and prepared.exception() is None and found is not None:
        found._begin(prepared.result())
