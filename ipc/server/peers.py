"""The clients of a server: who they are, and what could not be sent to them yet. It knows no request and no socket."""

import time
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.streams import Stream
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.transport.listener import Connection
from lowlat.ipc.server.transport.rate import Rate
from lowlat.ipc.wire import Bye, encode

__all__ = ["Peer", "Peers"]

END_AFTER_S = 0.2  # time for BYE to leave
MAX_UNSENT_CONTROL = 256


class Peer:
    """The client at the other end of a connection.

    greeted   HELLO came, in a version that is spoken
    dropped   said BYE to; nothing it sends is read any more
    gone      its connection is over
    unsent    messages that the connection's queue had no room for, in order; while there are any, it is blocked
    """

    __slots__ = (
        "blocked_since",
        "connection",
        "dropped",
        "gone",
        "greeted",
        "last_number",
        "messages",
        "name",
        "num_bad_messages",
        "streams",
        "unsent",
        "watched",
    )

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.name = ""
        self.greeted = False
        self.dropped = False
        self.gone = False
        self.num_bad_messages = 0
        self.messages = Rate()
        self.last_number = -1
        self.streams: dict[int, Stream] = {}
        self.unsent: deque[bytes] = deque()
        self.blocked_since = 0.0
        self.watched = False

    @property
    def uid(self) -> int | None:
        """The user behind it; None over tcp."""
        return self.connection.credentials.uid

    @property
    def pid(self) -> int | None:
        """The process behind it; None over tcp."""
        return self.connection.credentials.pid


class Peers:
    """The table of clients, and sending to them.

    on_gone     called once for a peer that is gone or dropped, when nothing can be sent to it any more
    on_unblock  called when what waited for a peer's queue has left
    """

    def __init__(
        self, limits: Limits, timers: Timers, on_gone: Callable[[Peer], None], on_unblock: Callable[[Peer], None]
    ) -> None:
        self._limits = limits
        self._timers = timers
        self._on_gone = on_gone
        self._on_unblock = on_unblock
        self._peers: dict[Connection, Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    @property
    def num_greeted(self) -> int:
        """Peers that have said HELLO and are not dropped."""
        return sum(peer.greeted and not peer.dropped for peer in self._peers.values())

    def find(self, connection: Connection) -> tuple[Peer, bool]:
        """The peer at the other end of a connection, and whether it is new."""
        peer = self._peers.get(connection)
        if peer is not None:
            return peer, False
        peer = self._peers[connection] = Peer(connection)
        return peer, True

    def send(self, peer: Peer, message: Struct) -> bool:
        """Send, or keep for later when the peer's queue is full; False when the peer is gone."""
        if peer.gone or peer.dropped:
            return False
        frame = encode(message)
        if not peer.unsent:
            if peer.connection.put(frame):
                return True
            peer.blocked_since = time.monotonic()
            if not peer.watched:
                peer.watched = True
                self._timers.after(self._limits.slow_consumer_s, self._watch, peer)
        peer.unsent.append(frame)
        if len(peer.unsent) > MAX_UNSENT_CONTROL + self._limits.max_requests_per_client:
            self.drop(peer, "slow_consumer")  # asks and asks, and reads no answer
            return False
        return True

    def drop(self, peer: Peer, reason: str, message: str = "") -> None:
        """Say BYE to a peer, hear it no more, and end its connection where that can be done."""
        if peer.gone or peer.dropped:
            return
        if not peer.unsent:  # or there is no room for it
            self.send(peer, Bye(reason, message))
        peer.dropped = True
        peer.unsent.clear()
        peer.connection.mute()
        self._timers.after(END_AFTER_S, peer.connection.end)
        self._on_gone(peer)

    def ended(self, connection: Connection) -> None:
        """A connection is over."""
        peer = self._peers.pop(connection, None)
        if peer is None:
            return
        peer.gone = True
        peer.unsent.clear()
        if not peer.dropped:
            self._on_gone(peer)

    def unblocked(self, connection: Connection) -> None:
        """There is room again in the queue to a peer."""
        peer = self._peers.get(connection)
        if peer is None or peer.dropped:
            return
        while peer.unsent:
            if not connection.put(peer.unsent[0]):
                return
            peer.unsent.popleft()
            peer.blocked_since = time.monotonic()
        self._on_unblock(peer)

    def _watch(self, peer: Peer) -> None:
        """Drop a peer whose queue has had no room for too long."""
        peer.watched = False
        if peer.gone or peer.dropped or not peer.unsent:
            return
        left = peer.blocked_since + self._limits.slow_consumer_s - time.monotonic()
        if left <= 0.0:
            self.drop(peer, "slow_consumer")
            return
        peer.watched = True
        self._timers.after(left, self._watch, peer)
