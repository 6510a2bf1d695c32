"""A generation is a request of a client: the call that makes it sends it, and leaving it cancels it."""

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from lowlat.errors import LowlatError, RequestError
from lowlat.ipc.chunk import Chunk
from lowlat.ipc.client.protocol import ClientProtocol, Stream
from lowlat.ipc.client.request import Request

if TYPE_CHECKING:
    from lowlat.ipc.client.base import BaseClient

__all__ = ["BaseGeneration", "Driver", "Submission"]


class Driver(Protocol):
    """The part of a connection that a request needs."""

    protocol: ClientProtocol

    def abandon(self, number: int) -> None:
        """Cancel a request whose reader is gone; a garbage collection may call it in any thread, inside any call."""

    def close(self, reason: str) -> None:
        """End all requests, from any thread."""


DriverType = TypeVar("DriverType", bound=Driver)


class Submission(Generic[DriverType]):
    """A request before it is sent; its connection may not exist yet.

    left     the caller has left the request
    failure  why it was not sent
    """

    __slots__ = ("connection", "failure", "left", "stream")

    def __init__(self) -> None:
        self.connection: DriverType | None = None
        self.stream: Stream | None = None
        self.failure: LowlatError | None = None
        self.left = False

    def submit(self, connection: DriverType, request: Request) -> None:
        """Queue the request on a connection. Raises what ClientProtocol.submit does."""
        self.stream = connection.protocol.submit(request)
        self.connection = connection


class BaseGeneration(Generic[DriverType]):
    """The chunks of one request, in order; the last one has a finish_reason.

    The call that makes it sends the request. Leaving it before its end cancels the request: by break, by close, by the
    end of a `with`, or by dropping it. One thread or task at a time may read it. Raises what Client.generate says.
    """

    def __init__(
        self, client: "BaseClient[DriverType, Any]", submission: Submission[DriverType], deadline: float | None
    ) -> None:
        self._client = client
        self._submission = submission
        self._deadline = deadline
        self._reading = False
        self._done = False

    def __del__(self) -> None:
        if not getattr(self, "_done", True):
            self._leave()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._client.endpoint!r}, {'ended' if self._done else 'under way'})"

    def _begin(self) -> bool:
        """Begin to read a chunk; False after the last one. `_end` or `_leave` must follow."""
        if self._done:
            return False
        self._client.check_process()
        if self._is_open:
            raise RequestError("the prompt is open still: finish it without `speculative`, then read the answer")
        if self._reading:
            raise LowlatError("another thread or task reads this request; give each its own")
        self._reading = True
        return True

    @property
    def _is_open(self) -> bool:
        """Whether its prompt is still being written, so that nothing can be read."""
        stream = self._submission.stream
        return stream is not None and stream.is_open and not stream.ended

    def _submitted(self) -> tuple[DriverType, Stream]:
        """Return its connection and its stream. Raises the error if it was not sent."""
        connection, stream = self._submission.connection, self._submission.stream
        if connection is None or stream is None:
            raise self._submission.failure or LowlatError("the request was never sent: its event loop has ended")
        return connection, stream

    def _end(self, chunk: Chunk | None) -> None:
        """Finish reading a chunk; None: there was none after the last."""
        self._reading = False
        self._done = chunk is None or chunk.finish_reason is not None

    def _leave(self) -> None:
        """Cancel the request if it has not ended, and stop reading it."""
        self._reading = False
        if self._done:
            return
        self._done = self._submission.left = True
        connection, stream = self._submission.connection, self._submission.stream
        if connection is not None and stream is not None and not stream.ended and self._client.in_own_process:
            connection.abandon(stream.number)
