"""A connected Unix socket that speaks ZMTP and never waits: both ends of an ipc:// connection are one.

Who owns it polls its descriptor, reads with `fill` and takes messages with `next`. It knows nothing of what is in them.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Sequence

from lowlat.ipc.zmtp import (
    GREETING,
    Command,
    Decoder,
    ZmtpError,
    encode_message,
    encode_ping,
    encode_pong,
    encode_ready,
)

__all__ = ["Channel"]

READ_BYTES = 1 << 15
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_NO_MESSAGE: list[bytes] = []


class Channel:
    """One end of a connection; its greeting and READY wait to be sent.

    connection       a stream socket, the channel's own from now on
    kind, peer_kind  the Socket-Types of this end and of the other: DEALER, ROUTER
    max_frame_bytes  a longer frame from the peer ends the connection
    max_frames       frames of a message that are kept
    max_unsent       messages that may wait here when the kernel's buffer is full
    lost             why nothing more can come: closed, broken, not ZMTP; what came before may still be taken
    heard            something has come since this was last set to False
    """

    __slots__ = ("_decoder", "_early", "_max_unsent", "_socket", "_unsent", "descriptor", "heard", "lost")

    def __init__(
        self,
        connection: socket.socket,
        kind: bytes,
        peer_kind: bytes,
        *,
        max_frame_bytes: int,
        max_frames: int,
        max_unsent: int,
    ) -> None:
        connection.setblocking(False)
        self.descriptor = connection.fileno()
        self.lost: str | None = None
        self.heard = True
        self._socket = connection
        self._decoder = Decoder(peer_kind, max_frame_bytes=max_frame_bytes, max_frames=max_frames)
        self._max_unsent = max_unsent
        self._early: list[bytes] = []
        self._unsent: deque[bytes | memoryview] = deque([GREETING + encode_ready(kind)])

    @property
    def ready(self) -> bool:
        """Whether the peer has said READY."""
        return self._decoder.ready

    @property
    def drained(self) -> bool:
        """Whether `next` has taken all that was read."""
        return self._decoder.drained

    @property
    def pending(self) -> bool:
        """Whether something waits until the kernel has room for it."""
        return bool(self._unsent)

    @property
    def has_room(self) -> bool:
        """Whether `send` would take a message."""
        return len(self._unsent) < self._max_unsent

    def fill(self) -> bool:
        """Read once what has come; whether there was anything."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(f"the connection broke: {error.strerror}")
            return False
        if not data:
            self._lose("the connection was closed")
            return False
        self.heard = True
        self._decoder.feed(data)
        return True

    def next(self) -> list[bytes] | None:
        """The frames of the next message of what was read, [] for what is none, None when all is taken.

        PING is answered here. What is no message counts as one, for whoever takes so many at a time.
        """
        try:
            item = self._decoder.next()
        except ZmtpError as error:
            self._lose(str(error))
            return None
        if not isinstance(item, Command):
            return item
        if item.name == b"PING":
            self._say(encode_pong(item.data))
        elif item.name == b"READY":
            self._unsent.extend(self._early)
            self._early.clear()
            self.flush()
        return _NO_MESSAGE

    def send(self, frames: Sequence[bytes]) -> bool:
        """Take a message; False when as many as may wait do. On a lost connection it goes nowhere.

        Before the peer's READY it waits for it: libzmq refuses what comes before it has said its own.
        """
        data = encode_message(frames)
        if not self._decoder.ready:
            if len(self._early) >= self._max_unsent:
                return False
            self._early.append(data)
            return True
        if self._unsent:
            if not self.has_room:
                return False
            self._unsent.append(data)
            return True
        sent = self._write(data)
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
        return True

    def ping(self) -> None:
        """Ask for a sign of life."""
        self._say(encode_ping())

    def flush(self) -> bool:
        """Send what waits, as far as there is room; whether nothing is left."""
        unsent = self._unsent
        while unsent:
            sent = self._write(unsent[0])
            if self.lost is not None:
                break
            if sent < len(unsent[0]):
                unsent[0] = memoryview(unsent[0])[sent:]
                return False
            unsent.popleft()
        return True

    def shut(self) -> None:
        """End the connection, also for a fork of this process that holds the descriptor; what waits is dropped."""
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give the descriptor back."""
        self.shut()
        self._socket.close()

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        self._unsent.clear()

    def _say(self, command: bytes) -> None:
        """Send a command, unless something waits, here or in a buffer that is full: a sign of life by itself."""
        if not self._unsent:
            sent = self._write(command)
            if 0 < sent < len(command):
                self._unsent.append(memoryview(command)[sent:])

    def _write(self, data: bytes | memoryview) -> int:
        """The bytes that need not be sent again: all, if the peer is gone, for what it said is still to be read."""
        try:
            return self._socket.send(data, _FLAGS)
        except BlockingIOError:
            return 0
        except ConnectionError:
            return len(data)
        except OSError as error:
            self._lose(f"the connection broke: {error.strerror}")
            self.shut()
            return len(data)
