"""An inbox is where other threads put items for one thread; they wake it, and never wait for it."""

import os
import select
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Inbox"]

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue with a descriptor that becomes readable when something comes while its reader sleeps.

    Any thread puts; one thread takes. The reader says `sleep` before it polls the descriptor and `awake` after: only
    then does a put cost a system call. What is put is bounded by the putters: a step's outputs, a request's ends.

    A put that wakes releases the GIL in its system call, and the reader takes it. A lock's release, or one of Python's
    queues, keeps the GIL: the reader would wait until the putter has nothing left to do (63 us in place of 13, where
    the putter has 50 us of work left).
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: deque[Item] = deque()
        self._asleep = False
        self._signalled = False
        self._roused = False
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def put(self, item: Item) -> None:
        """Append, and wake the reader if it sleeps."""
        self._items.append(item)
        self.wake()

    def append(self, item: Item) -> None:
        """Append without waking: the reader finds it with what wakes it next."""
        self._items.append(item)

    def wake(self) -> None:
        """Wake the reader if it sleeps."""
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self.descriptor, 1)

    def rouse(self) -> None:
        """Have the reader's `wait` return without an item, this one or the next: it has something else to look at."""
        self._roused = True
        self.wake()

    def take(self) -> Item | None:
        """Take the oldest item, or None."""
        return self._items.popleft() if self._items else None

    def any(self) -> bool:
        """Whether there is something to take."""
        return bool(self._items)

    def sleep(self) -> bool:
        """Announce a poll; returns whether there is nothing to take. A put after this wakes the poll."""
        if self._signalled:
            self._signalled = False
            os.eventfd_read(self.descriptor)
        self._asleep = True
        if self._items or self._roused:
            self._asleep = False
            return False
        return True

    def awake(self, signalled: bool) -> None:
        """Note that the poll is over; signalled: the descriptor was readable, which it stays until the next `sleep`."""
        self._asleep = False
        self._signalled = signalled

    def wait(self, timeout_s: float | None = None) -> Item | None:
        """Wait for the oldest item and take it; None when the time has passed, or where `rouse` was called."""
        while (item := self.take()) is None:
            if self._roused:
                self._roused = False
                return self.take()
            if not self.sleep():
                continue
            signalled = bool(self._poll.poll(None if timeout_s is None else timeout_s * 1000.0))
            self.awake(signalled)
            if timeout_s is not None and not signalled:
                return self.take()
        return item

    def close(self) -> None:
        """Give the descriptor back; what is put from now on is never taken."""
        self._asleep = False
        os.close(self.descriptor)
