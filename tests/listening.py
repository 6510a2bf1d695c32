"""A listener on a Unix socket without a server: a test turns it, and sees what its handlers are told."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowlat.ipc.endpoint import EndpointLock
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.transport.listener import Handlers
from lowlat.ipc.server.transport.security import Users
from lowlat.ipc.server.transport.unix_listener import UnixListener

__all__ = ["Listen", "Listening"]


class Listening:
    """A listener that this thread turns; what its handlers were told, in order.

    told          what happened, on which connection, its frames
    """

    def __init__(self, path: Path, users: Users, **limits: Any) -> None:
        self.endpoint = f"ipc://{path}"
        self.limits = Limits(**limits)
        self.timers = Timers()
        self.told: list[tuple[str, Any, list[bytes]]] = []
        self._lock = EndpointLock(path)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.listener = UnixListener(
            self.endpoint, self._lock, self.limits, self.timers, logging.getLogger(__name__), users=users
        )
        self.listener.serve(
            self._wake,
            Handlers(
                message=self._message,
                ended=lambda connection: self.told.append(("ended", connection, [])),
                unblocked=lambda connection: self.told.append(("unblocked", connection, [])),
            ),
        )
        self._closed = False

    def _message(self, connection: Any, frames: Sequence[bytes]) -> None:
        self.told.append(("message", connection, list(frames)))
        connection.admit()  # as a server does with who says HELLO

    def turn(self, count: int = 1, timeout_ms: int = 0) -> None:
        for _ in range(count):
            self.timers.run()
            self.listener.wait(timeout_ms)
            self.listener.receive(lambda: False)

    def turn_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10.0
        while not condition():
            assert time.monotonic() < end, self.told
            self.turn(timeout_ms=1)

    def connection(self, place: int = 0) -> Any:
        """On which the first of messages came, or a later one."""
        self.turn_until(lambda: len(self.messages) > place)
        return [connection for what, connection, _ in self.told if what == "message"][place]

    @property
    def messages(self) -> list[list[bytes]]:
        return [frames for what, _, frames in self.told if what == "message"]

    def count(self, what: str) -> int:
        return sum(one == what for one, _, _ in self.told)

    def close(self, linger_s: float = 0.0) -> None:
        if not self._closed:
            self._closed = True
            self.listener.close(linger_s)
            self._lock.release()
            os.close(self._wake)


Listen = Callable[..., Listening]
