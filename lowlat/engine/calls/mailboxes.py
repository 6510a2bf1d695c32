"""A mailbox receives one request's outputs from the driver; its caller waits for them in a thread or an event loop."""

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
    """One step's output of a request, and the request's metrics with the last output."""

    output: StepOutput
    metrics: RequestMetrics | None


Item = Brought | Exception


class ThreadMailbox:
    """The mailbox of a caller that waits in a thread.

    each  whether each item wakes the caller; else only the last one does
    """

    def __init__(self, *, each: bool) -> None:
        self._each = each
        self._inbox: Inbox[Item] = Inbox()

    def __del__(self) -> None:
        # not closed when the caller is done: the driver may still be about to wake it, and holds the mailbox until then
        if hasattr(self, "_inbox"):
            self._inbox.close()

    def put(self, item: Item, *, last: bool) -> None:
        """Append an item, and wake the caller if it waits for this one."""
        if self._each or last:
            self._inbox.put(item)
        else:
            self._inbox.append(item)

    def take(self) -> Item | None:
        """The next item, where there is one."""
        return self._inbox.take()

    def wait(self, deadline: float | None) -> Item | None:
        """Wait for the next item; returns None once the deadline, on the monotonic clock, has passed."""
        return self._inbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))


class LoopWaker:
    """Wakes the tasks of an event loop once a step; waiting tasks resume inside the loop's callback.

    The loop watches an eventfd. With `call_soon_threadsafe` the driver would write to a socket, the loop would need
    two calls to empty it, and a future's waiter would run only in the loop's next round. That takes 85 us to a task
    instead of 55 (median of 1200, two shared cores; a waiting thread is woken after 23).
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
        """The waker of a loop; the loop's own thread makes it with its first mailbox."""
        with _making:
            waker = _wakers.get(loop)
            if waker is None:
                waker = _wakers[loop] = cls(loop)
            return waker

    def wake(self, mailboxes: "Iterable[LoopMailbox]") -> bool:
        """Wake the tasks that wait for these mailboxes, from any thread; returns False if the loop has ended."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            return False
        self._waiting.extend(mailboxes)
        os.eventfd_write(self._descriptor, 1)
        return True

    def _wake_tasks(self) -> None:
        """Resume the waiting tasks; the loop calls this."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:  # an earlier call has read this wake-up
            return
        while self._waiting:
            self._waiting.popleft().wake()


_making = threading.Lock()
_wakers: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker]" = weakref.WeakKeyDictionary()


class _ImmediateFuture(asyncio.Future[None]):
    """A future that runs its one waiter when it is resolved, not in the loop's next round."""

    _waiter: Callable[[Any], object] | None = None
    _context: Context | None = None

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Context | None = None) -> None:
        """Keep the callback by which the waiting task resumes; a future here has no other."""
        self._waiter, self._context = fn, context

    def resolve(self) -> None:
        """Resume the task at once; only the loop's thread calls this, outside of any task."""
        if not self.done():
            self.set_result(None)
            if self._waiter is not None:
                run = copy_context().run if self._context is None else self._context.run
                run(self._waiter, self)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the wait; the task resumes in the loop's next round, as with any future."""
        if not super().cancel(msg):
            return False
        if self._waiter is not None:
            self.get_loop().call_soon(self._waiter, self, context=self._context)
        return True


class LoopMailbox:
    """The mailbox of a task in an event loop; `due` says whether to wake the task.

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
        """Append an item; the driver wakes the loop later, once for all of its mailboxes."""
        self._items.append(item)
        self.due = self.due or self._each or last

    def wake(self) -> None:
        """Resume the waiting task, if there is one; the loop's thread calls this."""
        if self._future is not None:
            self._future.resolve()

    def take(self) -> Item | None:
        """The next item, where there is one."""
        return self._items.popleft() if self._items else None

    async def wait(self) -> Item:
        """Wait for the next item."""
        while (item := self.take()) is None:
            self._future = _ImmediateFuture(loop=self._loop)
            try:
                if not self._items:
                    await self._future
            finally:
                self._future = None
        return item
