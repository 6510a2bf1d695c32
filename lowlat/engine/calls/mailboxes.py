"""Mailboxes: what the driver's thread puts for one request, and its caller takes, in a thread or an event loop."""

import asyncio
import time
from collections import deque
from typing import NamedTuple

from lowlat.engine.metrics import RequestMetrics
from lowlat.ipc.wake import Inbox
from lowlat.options.request import StepOutput

__all__ = ["Brought", "LoopMailbox", "ThreadMailbox"]


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


class LoopMailbox:
    """For a task of an event loop; `due` says whether the loop is to be told.

    each  as in ThreadMailbox
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, each: bool) -> None:
        self.loop = loop
        self.due = False
        self._each = each
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item, *, last: bool) -> None:
        """Append; the loop is told later, once for all of its mailboxes."""
        self._items.append(item)
        self.due = self.due or self._each or last

    def wake(self) -> None:
        """In the loop: wake the task that waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> Item | None:
        """The next item, where there is one."""
        return self._items.popleft() if self._items else None

    async def wait(self) -> Item:
        """The next item."""
        while (item := self.take()) is None:
            self._waiter = self.loop.create_future()
            try:
                if not self._items:
                    await self._waiter
            finally:
                self._waiter = None
        return item
