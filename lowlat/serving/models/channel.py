"""This module connects the supervisor and a model's process, which send each other lines of JSON over a socket pair."""

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Channel"]

MAX_LINE = 1 << 20
AT_ONCE = 1 << 16


class Channel:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._rest = b""
        self._lock = threading.Lock()
        self.closed = False

    def fileno(self) -> int:
        """Return the descriptor, for polls."""
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message; False if the other end is gone."""
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            try:
                self._socket.sendall(data)
            except (OSError, ValueError):
                return False
        return True

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes, and return complete messages; sets `closed` if the other end is gone."""
        try:
            data = self._socket.recv(AT_ONCE)
        except OSError:
            data = b""
        if not data or len(self._rest) > MAX_LINE:
            self.closed = True
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [message for line in lines if isinstance(message := json.loads(line), dict)]

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages as they come, until the other end is gone."""
        while not self.closed:
            yield from self.receive()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
