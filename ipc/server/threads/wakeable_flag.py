"""This module has a flag that any thread may raise, and for which the main thread waits while it handles signals."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

__all__ = ["Attention"]

ENOUGH = 4096  # bytes of the pipe that are read at once


class Attention:
    """A flag that is raised once; handlers of signals run while the main thread waits for it.

    The kernel may deliver a signal to any thread of the process, such as one of a device's driver. A main thread that
    waits for a lock would not notice it. So `wait` polls a pipe, into which Python writes at every signal.
    """

    def __init__(self) -> None:
        self._raised = self._closed = False
        self._lock = threading.Lock()  # protects the closing of the pipe
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def set(self) -> None:
        """Raise the flag, from any thread and any number of times."""
        self._raised = True
        with self._lock:
            if not self._closed:
                with suppress(BlockingIOError):  # a full pipe wakes the waiting thread, too
                    os.write(self._writer, b"\0")

    def wait(self) -> None:
        """Wait until the flag is raised; one thread at a time."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while not self._raised:
            if poll.poll():
                os.read(self._reader, ENOUGH)

    @contextmanager
    def signals(
        self, numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]
    ) -> Iterator[None]:
        """Handle signals in the main thread; each interrupts a `wait` while its handler runs."""
        before = {number: signal.signal(number, handler) for number in numbers}
        descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
            for number, old in before.items():
                signal.signal(number, old)

    def close(self) -> None:
        """Raise the flag and close the pipe; no thread may wait any more."""
        self._raised = True
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._reader)
                os.close(self._writer)
