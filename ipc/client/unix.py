"""ipc://: a Unix socket that speaks ZMTP as a DEALER, without a thread between it and its reader."""

import socket
from collections.abc import Sequence

from lowlat.ipc.channel import Channel
from lowlat.ipc.client.transport import MAX_FRAME_BYTES, Transport
from lowlat.ipc.endpoint import Endpoint

__all__ = ["UnixTransport"]


class UnixTransport(Channel, Transport):
    """Connects to the endpoint's path at once, or is lost."""

    def __init__(self, endpoint: Endpoint) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        super().__init__(connection, b"DEALER", b"ROUTER", max_frame_bytes=MAX_FRAME_BYTES, max_frames=1, max_unsent=1)
        self.message_fd = self.descriptor
        self.loss_fd = None
        self.needs_reader = True
        self._early: Sequence[bytes] = ()
        try:
            connection.connect(str(endpoint.path))
        except OSError as error:
            self._lose(f"cannot connect: {error.strerror}")
        self.flush()

    def receive(self, told: bool) -> bytes | None:
        while self.lost is None:
            if told and not self.fill():
                return None
            frames = self.next()
            if frames:
                return frames[0]
            if self._early and self.ready:
                super().send(self._early)
                self._early = ()
            told = frames is None
        return None

    def send(self, frames: Sequence[bytes]) -> bool:
        """What is to leave before the other side's READY has come, HELLO, waits for it: libzmq refuses it earlier."""
        if self.ready:
            return super().send(frames)
        if self._early:
            return False
        self._early = frames
        return True

    def look(self) -> None:
        """What is lost is found where it is received."""
