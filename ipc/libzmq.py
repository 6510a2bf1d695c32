"""This module prepares libzmq's sockets for servers and clients: it checks the version, sets options and sends."""

import zmq
from zmq.backend import Socket as BareSocket

from lowlat.errors import ConfigError

__all__ = ["has_message", "prepare_socket", "send_frames"]

MIN_VERSION = (4, 3)  # heartbeats and USE_FD came with 4.2, a monitor's events of handshakes with 4.3
HANDSHAKE_TIMEOUT_MS = 5000
# Bare numbers: enum's own arithmetic takes microseconds in a process that has just woken.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE_NOBLOCK = int(zmq.SNDMORE | zmq.NOBLOCK)
_POLLIN = int(zmq.POLLIN)
_send = BareSocket.send  # zmq.Socket.send costs time for options that are not used here


def prepare_socket(
    socket: "zmq.Socket[bytes]",
    *,
    max_message_bytes: int,
    high_water_mark: int,
    heartbeat_interval_s: float,
    heartbeat_timeout_s: float,
) -> None:
    """Set a socket's limits before it binds or connects: sizes, queues, heartbeats, lingering.

    Raises ConfigError for a libzmq that is too old.
    """
    if zmq.zmq_version_info() < MIN_VERSION:
        raise ConfigError(f"libzmq {zmq.zmq_version()} is too old; 4.3 or newer is needed, as pyzmq's wheels have it")
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    timeout_ms = int(heartbeat_timeout_s * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(heartbeat_interval_s * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
    socket.setsockopt(zmq.HEARTBEAT_TTL, timeout_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)


def has_message(socket: "zmq.Socket[bytes]") -> bool:
    """Return whether a message can be received; this also handles the event that made the descriptor readable."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _POLLIN)


def send_frames(socket: "zmq.Socket[bytes]", frames: tuple[bytes, ...]) -> None:
    """Send a message; a ROUTER's begins with a frame that holds the peer's routing id.

    Raises zmq.Again when the queue is full, zmq.ZMQError when the peer is gone. Only the first frame can be refused, so
    a message is sent whole or not at all.
    """
    for frame in frames[:-1]:
        _send(socket, frame, _MORE_NOBLOCK)
    _send(socket, frames[-1], _NOBLOCK)
