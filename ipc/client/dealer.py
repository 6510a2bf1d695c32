"""The client's socket is a DEALER of libzmq, over ipc:// and tcp:// alike; its monitor reports when it is lost.

It connects once. A stream never resumes, so a lost connection is closed with its sockets.
"""

import os
import struct

import zmq
from zmq import Again

from lowlat.errors import ConfigError, RequestError
from lowlat.ipc.client.curve import ClientCurve
from lowlat.ipc.client.protocol import HEARTBEAT_INTERVAL_S
from lowlat.ipc.endpoint import Endpoint
from lowlat.ipc.libzmq import has_message, prepare_socket, send_frames

__all__ = ["Dealer"]

MAX_FRAME_BYTES = 1 << 26  # of a server's message
HEARTBEAT_TIMEOUT_S = 3.5  # after a heartbeat, which leaves within a second: so within 5 s in all
NEVER_MS = 3_600_000  # -1 would have libzmq drop what came before the connection's end and was not received yet
HIGH_WATER_MARK = 1 << 16  # streams are bounded by their windows; beyond this the server's queue fills
_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=HI")
_NOBLOCK = int(zmq.NOBLOCK)  # a bare number: enum's own arithmetic takes microseconds


class Dealer:
    """A DEALER that connects, with its own context, and its monitor. Raises ConfigError for missing keys.

    message_fd   readable when a message may have come; the caller must then receive until there is none
    loss_fd      readable when `look` may find that the connection is lost
    lost         why the connection is lost, else None
    refusal      the error of a server that refused this client, else None
    """

    def __init__(self, endpoint: Endpoint, curve: ClientCurve | None) -> None:
        if not endpoint.loopback and curve is None:
            raise ConfigError(f"endpoint {endpoint} leaves this machine and needs CURVE: give curve=ClientCurve(...)")
        self.lost: str | None = None
        self.refusal: RequestError | None = None
        self._is_local = endpoint.scheme == "ipc"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._dealer = self._context.socket(zmq.DEALER)
            prepare_socket(
                self._dealer,
                max_message_bytes=MAX_FRAME_BYTES,
                high_water_mark=HIGH_WATER_MARK,
                heartbeat_interval_s=HEARTBEAT_INTERVAL_S,
                heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            )
            self._dealer.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
            if curve is not None:
                _apply(curve, self._dealer)
            self._monitor: zmq.Socket[bytes] = self._dealer.get_monitor_socket(_EVENTS)
            self._monitor.setsockopt(zmq.LINGER, 0)
            has_message(self._monitor)  # only who has looked once is told by the descriptor
            self._dealer.connect(endpoint.url)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._may_follow = False  # frames after the one that was received last
        self.message_fd = self._dealer.FD
        self.loss_fd = self._monitor.FD

    def receive(self, told: bool) -> bytes | None:
        """Return the first frame of the next message, or None; messages of this version have no other frame.

        told   the descriptor was readable, and nothing was received since: then this receives without asking first, as
               asking costs more than receiving; receiving without a message costs most
        """
        if self._may_follow:
            self._skip()
        if not told and not has_message(self._dealer):
            return None
        try:
            frame = self._dealer.recv(_NOBLOCK)
        except Again:
            return None
        self._may_follow = True
        return frame

    def send(self, frames: tuple[bytes, ...]) -> bool:
        """Send a message; False if the queue is full."""
        try:
            send_frames(self._dealer, frames)
        except Again:
            return False
        return True

    def look(self) -> None:
        """Read the monitor's events, and set `lost` or `refusal` if the connection is lost."""
        while has_message(self._monitor):
            event, detail = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.EVENT_DISCONNECTED:
                self.lost = self.lost or "the connection was lost"
            elif event == zmq.EVENT_CLOSED:
                self.lost = self.lost or "nobody listens there"
            elif self._is_local and event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.lost = f"the server does not let uid {os.geteuid()} in; ask for --allow-uid"
                self.refusal = RequestError(self.lost)
            else:
                keys = "" if self._is_local else "; CURVE keys must fit the server's"
                self.lost = f"the handshake failed ({detail}){keys}"

    def _skip(self) -> None:
        """Drop further frames of the last message; the next receive does it, as the reader waits for the first one."""
        self._may_follow = False
        while self._dealer.getsockopt(zmq.RCVMORE):
            self._dealer.recv(_NOBLOCK)

    def close(self) -> None:
        """Close the sockets without waiting."""
        self._context.destroy(linger=0)


def _apply(curve: ClientCurve, socket: "zmq.Socket[bytes]") -> None:
    """Set the keys before connecting."""
    public, secret = curve.public_key, curve.secret_key
    if public is None or secret is None:
        public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    socket.curve_serverkey = curve.server_key.encode("ascii")
    socket.curve_publickey = public.encode("ascii")
    socket.curve_secretkey = secret.encode("ascii")
