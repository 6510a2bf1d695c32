"""A mailbox takes what the driver brings for one request; its caller waits for it in a thread or an event loop."""

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from typing import Any, NamedTuple

from lowlat.engine.metrics import RequestMetrics
from lowlat.ipc.wake import Inbox
from lowlat.options.request import StepOutput

__all__ = ["Brought", "LoopMailbox", "LoopWaker", "ThreadMailbox"]


class Brought(NamedTuple):
    """One step's output of a request, and its figures where that ended it."""

    output: StepOutput
    metrics: RequestMetrics | None


Item = Brought | Exception


class ThreadMailbox:
    """For a caller that waits in a thread.

    each  the caller is woken for each item; otherwise for the last alone
    """

    def __init__(self, *, each: bool) -> None:
        self._each = each
        self._inbox: Inbox[Item] = Inbox()

    def __del__(self) -> None:
        # here, and not when the caller is done: the driver may be about to wake it, and holds the mailbox meanwhile
        if hasattr(self, "_inbox"):
            self._inbox.close()

    def put(self, item: Item, *, last: bool) -> None:
        """Append, and wake the caller where it waits for this."""
        if self._each or last:
            self._inbox.put(item)
        else:
            self._inbox.append(item)

    def take(self) -> Item | None:
        """The next item, where there is one."""
        return self._inbox.take()

    def wait(self, deadline: float | None) -> Item | None:
        """The next item; None when the deadline, on the monotonic clock, has passed."""
        return self._inbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


class LoopWaker:
    """Wakes the tasks of an event loop, once a step: those that wait go on within the loop's callback.

    It is a descriptor that the loop watches. `call_soon_threadsafe` would write to a socket, which the loop empties
    with two calls, and a future's waiter would run in the loop's next round: 85 us to a task in place of 55, at the
    median of 1200 (two shared cores, where a thread that waits hears after 23).
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._waiting: deque[LoopMailbox] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._descriptor, self._wake_tasks)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "LoopWaker":
        """The waker of a loop, made by the loop's own thread with its first mailbox."""
        with _making:
            waker = _wakers.get(loop)
            if waker is None:
                waker = _wakers[loop] = cls(loop)
            return waker

    def wake(self, mailboxes: "Iterable[LoopMailbox]") -> bool:
        """Wake the tasks that wait for these, from any thread; False where the loop has ended."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return False
        self._waiting.extend(mailboxes)
        os.eventfd_write(self._descriptor, 1)
        return True

    def _wake_tasks(self) -> None:
        """In the loop: let those go on who wait."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:  # an earlier read has taken this one
            return
        while self._waiting:
            self._waiting.popleft().wake()


_making = threading.Lock()
_wakers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker]" = weakref.WeakKeyDictionary()


class _ImmediateFuture(asyncio.Future[None]):
    """A future whose one waiter goes on as soon as it is resolved, not in the loop's next round."""

    _waiter: Callable[[Any], object] | None = None
    _context: Context | None = None

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Context | None = None) -> None:
        """Take the task's own way on; there is no other."""
        self._waiter, self._context = fn, context

    def resolve(self) -> None:
        """In the loop, between two callbacks: let the task go on now."""
        if not self.done():
            self.set_result(None)
            if self._waiter is not None:
                run = copy_context().run if self._context is None else self._context.run
                run(self._waiter, self)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the wait; the task hears of it in the loop's next round, as ever."""
        if not super().cancel(msg):
            return False
        if self._waiter is not None:
            self.get_loop().call_soon(self._waiter, self, context=self._context)
        return True


class LoopMailbox:
    """For a task of an event loop; `due` says whether its task is to be woken.

    each  as in ThreadMailbox
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, each: bool) -> None:
        self.waker = LoopWaker.of(loop)
        self.due = False
        self._loop = loop
        self._each = each
        self._items: deque[Item] = deque()
        self._future: _ImmediateFuture | None = None

    def put(self, item: Item, *, last: bool) -> None:
        """Append; the loop is told later, once for all of its mailboxes."""
        self._items.append(item)
        self.due = self.due or self._each or last

    def wake(self) -> None:
        """In the loop: let the task go on that waits."""
        if self._future is not None:
            self._future.resolve()

    def take(self) -> Item | None:
        """The next item, where there is one."""
        return self._items.popleft() if self._items else None

    async def wait(self) -> Item:
        """The next item."""
        while (item := self.take()) is None:
            self._future = _ImmediateFuture(loop=self._loop)
            try:
                if not self._items:
                    await self._future
            finally:
                self._future = None
        return item
