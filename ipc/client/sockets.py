"""A client's sockets: the DEALER, and the monitor that tells when its connection is lost.

ZeroMQ connects anew by itself and says nothing; but a stream never resumes, so a connection that was once lost is
given up, and its sockets with it.
"""

import struct
from dataclasses import dataclass, field

import zmq
from zmq import Again

from lowlat.errors import ConfigError
from lowlat.ipc.client.protocol import HEARTBEAT_INTERVAL_S
from lowlat.ipc.endpoint import Endpoint, prepare_socket
from lowlat.ipc.frames import send_frames

__all__ = ["ClientCurve", "Sockets"]

HEARTBEAT_TIMEOUT_S = 3.5  # after a heartbeat, which leaves within a second: so within 5 s in all
MAX_REPLY_BYTES = 1 << 26
HIGH_WATER_MARK = 1 << 16  # streams are bounded by their windows; beyond this the server's queue fills
_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=HI")
# Bare numbers: enum's own arithmetic takes microseconds in a process that has just woken.
_POLLIN = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)


@dataclass(frozen=True)
class ClientCurve:
    """Keys for CURVE, each 40 characters of Z85: the server's public one, and the client's own pair.

    Without a pair a fresh one is made, which a server that lists its clients does not know.
    """

    server_key: str
    public_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.public_key is None) != (self.secret_key is None):
            raise ConfigError("CURVE needs both public_key and secret_key, or neither")
        for name in ("server_key", "public_key", "secret_key"):
            key = getattr(self, name)
            if key is not None and not _is_key(key):
                raise ConfigError(f"{name} must be 40 characters of Z85")

    def apply(self, socket: "zmq.Socket[bytes]") -> None:
        """Set the keys before connecting."""
        public, secret = self.public_key, self.secret_key
        if public is None or secret is None:
            public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
        socket.curve_serverkey = self.server_key.encode("ascii")
        socket.curve_publickey = public.encode("ascii")
        socket.curve_secretkey = secret.encode("ascii")


def _is_key(key: object) -> bool:
    return isinstance(key, str) and len(key) == 40 and key.isascii() and key.isprintable() and " " not in key


class Sockets:
    """A context of its own, a DEALER that connects, and its monitor.

    dealer_fd, monitor_fd   become readable when there may be something to do; one must look at the sockets until
                            there is nothing left, or they stay silent
    """

    def __init__(self, endpoint: Endpoint, curve: ClientCurve | None) -> None:
        if not endpoint.loopback and curve is None:
            raise ConfigError(f"endpoint {endpoint} leaves this machine and needs CURVE: give curve=ClientCurve(...)")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._dealer = self._context.socket(zmq.DEALER)
            prepare_socket(
                self._dealer,
                max_message_bytes=MAX_REPLY_BYTES,
                high_water_mark=HIGH_WATER_MARK,
                heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
                heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            )
            self._dealer.setsockopt(zmq.RECONNECT_IVL, 20)
            self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
            if curve is not None:
                curve.apply(self._dealer)
            self._monitor: zmq.Socket[bytes] = self._dealer.get_monitor_socket(_EVENTS)
            self._monitor.setsockopt(zmq.LINGER, 0)
            _has_message(self._monitor)  # only who has looked once is told by the descriptor
            self._dealer.connect(endpoint.url)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._may_follow = False  # frames behind the one that was received last
        self.dealer_fd: int = self._dealer.FD
        self.monitor_fd: int = self._monitor.FD

    @property
    def readable(self) -> bool:
        """Whether a message waits; this also takes note of what made the descriptor readable."""
        self._skip()
        return _has_message(self._dealer)

    def receive(self) -> bytes | None:
        """The first frame of the next message, None without one; this version's messages have no other.

        What tells whether there is one costs more than to receive it, in a process that has just woken; to learn that
        there is none costs the most. So who knows that the descriptor was readable need not ask first.
        """
        self._skip()
        try:
            frame = self._dealer.recv(_NOBLOCK)
        except Again:
            return None
        self._may_follow = True
        return frame

    def send(self, frames: tuple[bytes, ...]) -> bool:
        """Send a message; False when the queue is full."""
        try:
            send_frames(self._dealer, frames)
        except Again:
            return False
        return True

    def loss(self) -> str | None:
        """Why the connection was lost, if it was."""
        lost = None
        while _has_message(self._monitor):
            event, detail = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.EVENT_DISCONNECTED:
                lost = lost or "the connection was lost"
            else:
                lost = f"the handshake failed ({detail}); CURVE keys must fit the server's"
        return lost

    def _skip(self) -> None:
        """Drop what follows the frame that was received last: not at once, for its reader waits for it."""
        if self._may_follow:
            self._may_follow = False
            while self._dealer.getsockopt(zmq.RCVMORE):
                self._dealer.recv(_NOBLOCK)

    def close(self) -> None:
        """Close all, without waiting for anybody."""
        self._context.destroy(linger=0)


def _has_message(socket: "zmq.Socket[bytes]") -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)
