"""The interface of a client's connection: ipc:// is lowlat's own (`unix`), tcp:// is libzmq's (`dealer`)."""

from abc import ABC, abstractmethod

__all__ = ["MAX_FRAME_BYTES", "Transport"]

MAX_FRAME_BYTES = 1 << 26  # of a server's message


class Transport(ABC):
    """A connection that is being made, is there, or is lost, which it stays: a stream never resumes.

    message_fd      readable when a message may have come; one must receive until there is none, or it stays silent
    loss_fd         readable when `look` may find that the connection is lost; None where `receive` finds it
    lost            why the connection is lost, None while it is not
    stays_readable  whether the descriptor is readable as long as there is something to receive, whatever is called
    needs_reader    whether nobody but its owner answers the server's heartbeats
    """

    message_fd: int
    loss_fd: int | None
    lost: str | None
    stays_readable: bool
    needs_reader: bool

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether part of what was sent waits until there is room for it: `flush` when the descriptor is writable."""

    @abstractmethod
    def receive(self, told: bool) -> bytes | None:
        """The first frame of the next message, None without one; this version's messages have no other.

        told   the descriptor was readable, and nothing has been received since
        """

    @abstractmethod
    def send(self, frames: tuple[bytes, ...]) -> bool:
        """Send a message; False when there is no room."""

    @abstractmethod
    def flush(self) -> bool:
        """Send what waits, as far as there is room; whether nothing is left."""

    @abstractmethod
    def look(self) -> None:
        """See whether the connection is lost."""

    @abstractmethod
    def close(self) -> None:
        """Close all, without waiting for anybody."""
