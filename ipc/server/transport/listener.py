"""Where clients connect: what the server wants of a transport, of which there are two.

ipc:// is lowlat's own (`unix_listener`), tcp:// is libzmq's (`zmq_listener`), for the sake of CURVE.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from lowlat.ipc.server.transport.security import Credentials

__all__ = ["Connection", "Handlers", "Listener"]

MAX_MESSAGES_A_TURN = 64  # then tokens go out before more is read
MAX_FRAMES = 3  # one more than any message has: the rest of a longer one is read and not kept


class Connection(ABC):
    """A connection of one client, from its first message to its end; equal to itself alone.

    credentials   who is at its other end
    stranger      its user is not let in
    """

    __slots__ = ()

    credentials: Credentials
    stranger: bool

    @abstractmethod
    def put(self, frame: bytes) -> bool:
        """Take a message of one frame without waiting; False when its queue is full: then `unblocked` follows.

        To a connection that has broken it goes nowhere, and `ended` says so soon.
        """

    @abstractmethod
    def admit(self) -> None:
        """Its client said HELLO and was welcomed: it may stay."""

    @abstractmethod
    def mute(self) -> None:
        """Hear it no more."""

    @abstractmethod
    def end(self) -> None:
        """End it, where the transport can."""


class Handlers(Struct, frozen=True):
    """The events that a listener calls, from within `receive`.

    message     frames came on a connection: a new one, where it was not named before
    ended       a connection is over; named or not, it is not named again
    unblocked   there is room again in a queue that was full
    """

    message: Callable[[Any, Sequence[bytes]], None]
    ended: Callable[[Any], None]
    unblocked: Callable[[Any], None]


class Listener(ABC):
    """An endpoint that is bound, and its connections; one thread's own once it serves.

    endpoint   as bound
    shared     whether another thread may put messages while the owner waits
    """

    endpoint: str
    shared: bool

    @abstractmethod
    def serve(self, wake: int, handlers: Handlers) -> None:
        """Before anything else: who is told, and a descriptor that ends a `wait` when it is readable."""

    @abstractmethod
    def wait(self, timeout_ms: int) -> bool:
        """Wait for connections, messages or the wake descriptor, -1 for ever; whether that is readable."""

    @abstractmethod
    def receive(self, enough: Callable[[], bool]) -> None:
        """Call the handlers for what `wait` has found, a bounded number of times, and at most once after `enough`."""

    @abstractmethod
    def close(self, linger_s: float) -> None:
        """End all connections; what was put has so long to leave."""
