"""How both sides hand a message's frames to ZeroMQ without waiting. It knows nothing of what is in them."""

import zmq
from zmq.backend import Socket as BareSocket

__all__ = ["send_frames"]

# Bare numbers: enum's own arithmetic takes microseconds in a process that has just woken.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE_NOBLOCK = int(zmq.SNDMORE | zmq.NOBLOCK)
_send = BareSocket.send  # without what zmq.Socket puts around it for options that are not used here


def send_frames(socket: "zmq.Socket[bytes]", frames: tuple[bytes, ...]) -> None:
    """Send a message, for a ROUTER behind the routing id of its peer.

    Raises zmq.Again when the queue is full, zmq.ZMQError when the peer is gone; the first frame is then refused, and
    never a later one.
    """
    for frame in frames[:-1]:
        _send(socket, frame, _MORE_NOBLOCK)
    _send(socket, frames[-1], _NOBLOCK)
