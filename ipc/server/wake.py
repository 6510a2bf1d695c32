"""How other threads hand something to the thread that owns the sockets, and wake it, without waiting for it."""

import os
from collections import deque
from typing import Generic, TypeVar

__all__ = ["Inbox"]

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """A queue with a descriptor that becomes readable when something comes while its reader sleeps.

    Any thread puts; one thread takes. The reader says `sleep` before it polls the descriptor and `awake` after: only
    then does a put cost a system call. What is put is bounded by the putters: a step's outputs, a request's ends.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: deque[Item] = deque()
        self._asleep = False

    def put(self, item: Item) -> None:
        """Append, and wake the reader if it sleeps."""
        self._items.append(item)
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self.descriptor, 1)

    def take(self) -> Item | None:
        """The oldest, or None."""
        try:
            return self._items.popleft()
        except IndexError:
            return None

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        return bool(self._items)

    def sleep(self) -> bool:
        """Before polling: whether there is nothing to take. A put after this wakes the poll."""
        self._asleep = True
        if self._items:
            self._asleep = False
            return False
        return True

    def awake(self, signalled: bool) -> None:
        """After polling; signalled says whether the descriptor was readable."""
        self._asleep = False
        if signalled:
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Give the descriptor back; what is put from now on is never taken."""
        self._asleep = False
        os.close(self.descriptor)
