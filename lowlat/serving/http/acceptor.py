"""This module accepts connections of a listener up to a capacity, and waits when no file descriptors are left.

asyncio itself logs a traceback for every attempt without descriptors, and tries again at once.
"""

import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable

__all__ = ["Acceptor"]

AT_ONCE = 128  # connections accepted before other work gets its turn
PAUSE_S = 0.1
FULL_PAUSE_S = 0.01
LOG_S = 10.0
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

logger = logging.getLogger("lowlat.serving.http")


class Acceptor:
    """Makes a protocol for every connection to a listener.

    make        makes a protocol
    make_room   closes a connection that can be spared
    has_room    given the number of connections under way, whether another may be accepted; otherwise it stays queued
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        make_room: Callable[[], bool],
        has_room: Callable[[int], bool] = lambda num_coming: True,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._make_room = make_room
        self._has_room = has_room
        self._opening: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._logged = -LOG_S
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Take no more connections."""
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if not self._has_room(len(self._opening)):
                self._wait(FULL_PAUSE_S)
                return
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SCARCE:
                    raise
                self._tell(error)
                self._make_room()
                self._wait(PAUSE_S)
                return
            accepted.setblocking(False)
            opening = self._loop.create_task(self._open(accepted))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:  # it is gone already
            accepted.close()

    def _tell(self, error: OSError) -> None:
        """Log that connections cannot be accepted, now and then."""
        now = time.monotonic()
        if now - self._logged >= LOG_S:
            self._logged = now
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            logger.warning(
                "no connection can be accepted now: %s (ulimit -n is %d); new ones wait", error.strerror, limit
            )

    def _wait(self, seconds: float) -> None:
        """Leave connections in the listener's queue for a moment."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)
