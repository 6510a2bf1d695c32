"""This module has the base of both clients: options, at most one connection, and the process that they belong to."""

import os
import weakref
from abc import ABC, abstractmethod
from typing import Generic, NoReturn, TypeVar

from lowlat.errors import LowlatError, ServerGone
from lowlat.ipc.client.curve import ClientCurve
from lowlat.ipc.client.generation import Driver
from lowlat.ipc.client.protocol import DEFAULT_WINDOW
from lowlat.ipc.client.settings import Settings

__all__ = ["CLOSED", "BaseClient"]

CLOSED = "the client was closed"

DriverType = TypeVar("DriverType", bound=Driver)
LockType = TypeVar("LockType")


class BaseClient(ABC, Generic[DriverType, LockType]):
    """A client of a lowlat server; `Client` explains the options."""

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        name: str = "",
        connect_timeout_s: float = 5.0,
        window: int = DEFAULT_WINDOW,
        curve: ClientCurve | None = None,
        server_uid: int | None = None,
    ) -> None:
        self._settings = Settings(endpoint, name, connect_timeout_s, window, curve, server_uid)
        self._process = os.getpid()
        self._connecting = self._new_lock()
        self._connections: list[
            DriverType
        ] = []  # one, or none; a list, for the finalizer, which must not hold the client
        self._closed = False
        self._finalizer = weakref.finalize(self, _close_all, self._connections, self._process, CLOSED)

    @property
    def endpoint(self) -> str:
        """The server's address."""
        return str(self._settings.endpoint)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled: its connection is one process's; make one in each"
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "connected" if self._connections else "not connected yet"
        return f"{type(self).__name__}({self.endpoint!r}, {state})"

    @property
    def in_own_process(self) -> bool:
        """Whether this process made the client; False in a fork."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raise LowlatError in a forked child, as sockets cannot be shared."""
        if not self.in_own_process:
            raise LowlatError(
                f"this client was made in process {self._process} and is used in its fork {os.getpid()}; "
                "make a client after the fork"
            )

    @abstractmethod
    def _new_lock(self) -> LockType:
        """The lock held while a connection is made."""

    def _end(self, reason: str) -> None:
        """Close for good; harmless when repeated, and in a fork."""
        self._closed = True
        _close_all(self._connections, self._process, reason)
        self._finalizer.detach()

    def _check_open(self) -> None:
        if self._closed:
            raise LowlatError("the client is closed")

    def _no_answer(self, timeout_s: float) -> ServerGone:
        return ServerGone(f"{self.endpoint}: no answer within {timeout_s:g} s (timeout_s)", code="timeout")


def _close_all(connections: list[DriverType], process: int, reason: str) -> None:
    """Close each connection once, even if several threads ask, and none in a fork."""
    while os.getpid() == process:
        try:
            connection = connections.pop()
        except IndexError:
            return
        connection.close(reason)
