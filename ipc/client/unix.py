"""ipc://: a Unix socket that speaks ZMTP as a DEALER, without a thread between it and its reader."""

import socket

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
        self.stays_readable = self.needs_reader = True
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
            told = frames is None
        return None

    def look(self) -> None:
        """Nothing to do: losses are found at receiving."""
