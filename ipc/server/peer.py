"""A peer is a client's connection to a server, from the first message on it to its end."""

import time
from collections import deque
from typing import TYPE_CHECKING

from lowlat.ipc.server.admission import User

if TYPE_CHECKING:
    from lowlat.ipc.server.generations.streams import Stream

__all__ = ["Peer", "Rate"]

MESSAGES_WINDOW_S = 1.0
BAD_MESSAGES_WINDOW_S = 60.0


class Rate:
    """Counts events in a window of time, and reads the clock only if they exceed the limit."""

    __slots__ = ("_count", "_end", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._count = 0
        self._window_s = window_s
        self._end = time.monotonic() + window_s

    def exceeds(self, limit: int, cost: int = 1) -> bool:
        """Add an event's cost, and return whether this window now has more than `limit`."""
        self._count += cost
        if self._count <= limit:
            return False
        now = time.monotonic()
        late = now > self._end
        if late:
            self._count, self._end = 0, now + self._window_s
        return not late


class Peer:
    """A client's connection, compared by identity.

    routing_id  the ROUTER's name for it; no other connection ever has the same
    descriptor  its socket in libzmq
    user        the user at its other end
    greeted     HELLO came, with a supported version
    dropped     BYE was sent; later messages of the peer are ignored
    gone        the connection is over
    full        the socket's queue to it was full at the last send, and the retry is still to come
    unsent      messages that did not fit into the queue, in order; the peer is blocked while there are any
    """

    __slots__ = (
        "bad_messages",
        "blocked_since",
        "descriptor",
        "dropped",
        "full",
        "gone",
        "greeted",
        "last_number",
        "messages",
        "name",
        "routing_id",
        "streams",
        "unsent",
        "user",
        "watched",
    )

    def __init__(self, routing_id: bytes, descriptor: int, user: User) -> None:
        self.routing_id = routing_id
        self.descriptor = descriptor
        self.user = user
        self.name = ""
        self.greeted = False
        self.dropped = False
        self.gone = False
        self.full = False
        self.messages = Rate(MESSAGES_WINDOW_S)
        self.bad_messages = Rate(BAD_MESSAGES_WINDOW_S)
        self.last_number = -1
        self.streams: dict[int, Stream] = {}
        self.unsent: deque[bytes] = deque()
        self.blocked_since = 0.0
        self.watched = False
