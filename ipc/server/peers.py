"""The connections of a server: who they are, what could not be sent to them yet, and when they are gone.

ROUTER names a connection by a routing id and tells nobody when it ends. A disconnect shows itself in three ways: a
send fails with EHOSTUNREACH (ROUTER_MANDATORY); the socket's monitor reports the descriptor that was closed, and the
peers that came through it are tried by a PONG that nobody asked for; a message arrives under the routing id of a
known peer from another process, or HELLO from another descriptor. It knows no request.
"""

import errno
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import zmq
from msgspec import Struct

from lowlat.ipc.frames import send_frames
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.security import Credentials, disconnect
from lowlat.ipc.server.streams import Stream
from lowlat.ipc.server.timers import Timers
from lowlat.ipc.wire import Bye, Kind, Pong, encode

__all__ = ["Peer", "Peers"]

PROBE_AFTER_S = (0.0, 0.005, 0.05, 0.5)  # a monitor's event can come before the pipe's end is known to the socket
RETRY_S = 0.005
DISCONNECT_AFTER_S = 0.2  # time for BYE to leave
MAX_UNSENT_CONTROL = 256
MAX_ENDED = 512  # with what RCVHWM lets wait of each, more than a client can leave behind at a time
HELLO = bytes((Kind.HELLO,))


class Peer:
    """A connection.

    greeted   HELLO came, in a version that is spoken
    dropped   said BYE to; nothing it sends is read any more
    suspect   a connection with its descriptor has ended a moment ago
    unsent    messages that ZeroMQ's queue to it had no room for, in order
    """

    __slots__ = (
        "address",
        "blocked_since",
        "credentials",
        "descriptor",
        "dropped",
        "gone",
        "greeted",
        "last_number",
        "name",
        "num_bad_messages",
        "num_messages",
        "routing_id",
        "streams",
        "suspect",
        "unsent",
        "window_end",
    )

    def __init__(self, routing_id: bytes, address: str, descriptor: int) -> None:
        self.routing_id = routing_id
        self.address = address
        self.descriptor = descriptor
        self.credentials = Credentials.of(address)
        self.name = ""
        self.greeted = False
        self.dropped = False
        self.gone = False
        self.suspect = False
        self.num_bad_messages = 0
        self.num_messages = 0
        self.window_end = time.monotonic() + 1.0
        self.last_number = -1
        self.streams: dict[int, Stream] = {}
        self.unsent: deque[bytes] = deque()
        self.blocked_since = 0.0

    @property
    def blocked(self) -> bool:
        """Whether ZeroMQ's queue to it is full."""
        return bool(self.unsent)

    def floods(self, limit: int) -> bool:
        """Count a message; whether there were more than so many in this second."""
        self.num_messages += 1
        if self.num_messages <= limit:
            return False
        now = time.monotonic()
        late = now > self.window_end
        if late:
            self.num_messages, self.window_end = 0, now + 1.0
        return not late


class Peers:
    """The table of connections, and sending to them.

    on_gone     called once for a peer that is gone or dropped, when nothing can be sent to it any more
    on_unblock  called when what waited for a peer's queue has left
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        limits: Limits,
        timers: Timers,
        on_gone: Callable[[Peer], None],
        on_unblock: Callable[[Peer], None],
    ) -> None:
        self._socket = socket
        self._limits = limits
        self._timers = timers
        self._on_gone = on_gone
        self._on_unblock = on_unblock
        self._peers: dict[bytes, Peer] = {}
        self._ended: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # the latest: address and descriptor

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    @property
    def num_greeted(self) -> int:
        """Peers that have said HELLO and are not dropped."""
        return sum(peer.greeted and not peer.dropped for peer in self._peers.values())

    def find(self, routing_id: bytes, frame: zmq.Frame) -> tuple[Peer | None, bool]:
        """The peer that a frame is from, and whether it is new; None where nobody is there to be answered.

        libzmq also speaks ZMTP 1 and 2, as which bytes by chance may pass; their frames have no properties, and so
        nobody knows whose they are. And what a connection brought before it ended can still come when its end is
        known: only HELLO may begin another.
        """
        try:
            address = frame.get("Peer-Address")
        except zmq.ZMQError:
            return None, True
        peer = self._peers.get(routing_id)
        if peer is not None:
            if peer.address == address:
                return peer, False
            self._forget(peer)  # the routing id has come to another process, so this peer's connection has ended
        descriptor = int(frame.get("__fd"))
        if self._ended.get(routing_id) == (address, descriptor) and frame.bytes[:1] != HELLO:
            return None, True
        peer = self._peers[routing_id] = Peer(routing_id, str(address), descriptor)
        return peer, True

    def renew(self, peer: Peer, frame: zmq.Frame) -> Peer:
        """The peer that says HELLO: another one, if the same process has connected anew under the same routing id."""
        descriptor = int(frame.get("__fd"))
        if descriptor == peer.descriptor and not (peer.greeted and peer.suspect):
            return peer
        self._forget(peer)
        renewed = self._peers[peer.routing_id] = Peer(peer.routing_id, peer.address, descriptor)
        return renewed

    def send(self, peer: Peer, message: Struct) -> bool:
        """Send, or keep for later when the peer's queue is full; False when the peer is gone."""
        if peer.gone or peer.dropped:
            return False
        frame = encode(message)
        if not peer.unsent:
            try:
                send_frames(self._socket, (peer.routing_id, frame))
            except zmq.Again:
                peer.blocked_since = time.monotonic()
                peer.unsent.append(frame)
                self._timers.after(RETRY_S, self._retry, peer)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._forget(peer)
                return False
            return True
        peer.unsent.append(frame)
        if len(peer.unsent) > MAX_UNSENT_CONTROL + self._limits.max_requests_per_client:
            self.drop(peer, "slow_consumer")  # asks and asks, and reads no answer
            return False
        return True

    def drop(self, peer: Peer, reason: str, message: str = "") -> None:
        """Say BYE to a peer, hear it no more, and end its connection where that can be done."""
        if peer.gone or peer.dropped:
            return
        if not peer.blocked:  # or there is no room for it
            self.send(peer, Bye(reason, message))
        if peer.gone:
            return
        peer.dropped = True
        peer.unsent.clear()
        self._timers.after(DISCONNECT_AFTER_S, self._disconnect, peer)
        self._on_gone(peer)

    def closed(self, descriptor: int) -> None:
        """The monitor says that a connection with this descriptor has ended: find out whose."""
        for peer in self._peers.values():
            if peer.descriptor == descriptor:
                peer.suspect = True
        for seconds in PROBE_AFTER_S:
            self._timers.after(seconds, self._probe, descriptor, seconds == PROBE_AFTER_S[-1])

    def _probe(self, descriptor: int, last: bool) -> None:
        suspects = [peer for peer in self._peers.values() if peer.descriptor == descriptor]
        if suspects:
            self._socket.getsockopt(zmq.EVENTS)  # makes the socket take note of ended pipes
        for peer in suspects:
            peer.suspect = peer.suspect and not last
            try:
                send_frames(self._socket, (peer.routing_id, encode(Pong(0, "serving", 0.0, 0, 0))))
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._forget(peer)

    def _retry(self, peer: Peer) -> None:
        if peer.gone or peer.dropped:
            return
        try:
            while peer.unsent:
                send_frames(self._socket, (peer.routing_id, peer.unsent[0]))
                peer.unsent.popleft()
                peer.blocked_since = time.monotonic()
        except zmq.Again:
            if time.monotonic() - peer.blocked_since > self._limits.slow_consumer_s:
                self.drop(peer, "slow_consumer")
            else:
                self._timers.after(RETRY_S, self._retry, peer)
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._forget(peer)
            return
        self._on_unblock(peer)

    def _forget(self, peer: Peer) -> None:
        peer.gone = True
        peer.unsent.clear()
        if self._peers.get(peer.routing_id) is peer:
            del self._peers[peer.routing_id]
        self._ended[peer.routing_id] = (peer.address, peer.descriptor)
        self._ended.move_to_end(peer.routing_id)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        if not peer.dropped:
            self._on_gone(peer)

    def _disconnect(self, peer: Peer) -> None:
        if not peer.gone:
            disconnect(peer.descriptor, peer.credentials)
