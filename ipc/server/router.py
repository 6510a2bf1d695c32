"""The server's socket is a ROUTER of libzmq, over ipc:// and tcp:// alike.

Each message has its connection's routing id, which libzmq makes, and the user at the other end (`Admission`). A ROUTER
does not report when a connection begins or ends, and cannot end one. So this module uses the ROUTER's monitor, which
reports the descriptors of connections that come and go. When a descriptor goes, its peer is sent an unrequested PONG;
the send fails if the connection is over (ROUTER_MANDATORY). To end a connection, its descriptor is shut down.

Several threads may use the router, one at a time. Its owner may sleep meanwhile, as it only polls descriptors. libzmq's
descriptors become readable when something happens, not while something is left to read: so `unread` asks the socket.
"""

import ctypes
import errno
import logging
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence

import zmq
from msgspec import Struct

from lowlat.errors import ConfigError
from lowlat.ipc.endpoint import Endpoint, EndpointLock
from lowlat.ipc.libzmq import has_message, prepare_socket, send_frames
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.admission import Admission, Curve, User, Users
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.peer import Peer
from lowlat.ipc.wire import Pong, encode

__all__ = ["Handlers", "Router"]

HELLO_TIMEOUT_S = 5.0
SPARE_CONNECTIONS = 64  # beyond max_clients, so that these can be told that the server is full
MAX_MESSAGES_A_TURN = 64  # after these, tokens are sent before more is read
MAX_EVENTS_A_TURN = 1024
MAX_FRAMES = 3  # one more than any message has: further frames of a longer message are dropped
# Unread messages of a connection in this process. More of a flood stay with the sender, and those of a dropped
# connection are soon discarded (with 1,024, floods cost other clients 11 % of p99). Few honest clients come near, so
# libzmq seldom stops reading; while it has stopped, the end of a connection can end the process (see README).
MAX_UNREAD = 64
MAX_ENDED = 1 << 14  # remembered connections that ended; their messages may still be unread
PROBE_AFTER_S = (0.0, 0.005, 0.05, 0.5)  # a monitor's event can come before the connection's end is known to the socket
RETRY_S = 0.005
SPARE_DESCRIPTORS = 256  # files, devices, libzmq's own
MANY_DESCRIPTORS = 1 << 16
_PROBE = encode(Pong(0, "serving", 0.0, 0, 0))
_NOBLOCK = int(zmq.NOBLOCK)  # bare numbers: enum's own arithmetic takes microseconds in a process that has just woken
_ACCEPTED = int(zmq.EVENT_ACCEPTED)
_EVENT = struct.Struct("=Hi")  # a monitor's event, and its descriptor


class Handlers(Struct, frozen=True):
    """The functions that the router calls, from within `receive` and its timers.

    message     frames of a message came from a peer, which may be a new peer
    ended       a peer is gone; no later call names it
    unblocked   a peer's queue that was full may have space again
    """

    message: Callable[[Peer, Sequence[bytes]], None]
    ended: Callable[[Peer], None]
    unblocked: Callable[[Peer], None]


class _Connection:
    """A connection that the monitor reported: its time, its socket's inode, and its peer after the first message."""

    __slots__ = ("inode", "peer", "since")

    def __init__(self, descriptor: int) -> None:
        self.since = time.monotonic()
        self.inode = _inode(descriptor)
        self.peer: Peer | None = None


class Router:
    """The ROUTER socket, bound to an endpoint. Raises ConfigError if it cannot be bound, or keys cannot be read.

    lock      the lock of an ipc:// endpoint's path
    users     the users admitted over ipc://
    curve     keys of tcp://
    endpoint  the endpoint as bound
    peers     peers that are not gone, by routing id
    """

    def __init__(
        self,
        endpoint: Endpoint,
        lock: EndpointLock | None,
        limits: Limits,
        timers: Timers,
        log: logging.Logger,
        *,
        users: Users,
        curve: Curve | None = None,
    ) -> None:
        _allow_descriptors(limits.max_clients + SPARE_CONNECTIONS)
        self._limits = limits
        self._timers = timers
        self._log = log
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        _forget_routing_ids()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._admission = Admission(self._context, self._router, None if lock is None else users, curve, log)
            self._monitor = self._router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self._bind(endpoint, lock)
        except BaseException:
            self.close(0.0)
            raise
        self.endpoint = endpoint.url if lock is not None else self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peers: dict[bytes, Peer] = {}
        self._connections: dict[int, _Connection] = {}
        self._ended: dict[bytes, None] = {}  # routing ids that ended recently; libzmq gives none twice
        self._handlers: Handlers
        self._poll = select.poll()
        self._wake = self._changes = -1
        self._found: dict[int, int] = {}
        self._asked = self._changed = True  # the admission may have questions, and the monitor events, to read

    def serve(self, wake: int, handlers: Handlers) -> None:
        """Set the handlers, and a descriptor that ends a `wait` when it is readable; call this first."""
        self._wake = wake
        self._handlers = handlers
        self._changes = int(self._monitor.FD)
        for descriptor in (wake, int(self._router.FD), self._changes, self._admission.descriptor):
            self._poll.register(descriptor, select.POLLIN)
        self._timers.after(self._limits.heartbeat_interval_s, self._look_after)

    @property
    def unread(self) -> bool:
        """Whether something that no descriptor reports may be left to receive; ask after any use of the socket."""
        return self._asked or self._changed or has_message(self._router)

    def wait(self, timeout_ms: int) -> bool:
        """Wait for messages or the wake descriptor (-1: for ever); returns whether the wake descriptor is readable.

        This is the only method that may run while another thread is inside a method of the router.
        """
        self._found = dict(self._poll.poll(timeout_ms))
        return self._wake in self._found

    def receive(self, enough: Callable[[], bool]) -> None:
        """Receive a limited number of messages and call their handlers; stop after a message if `enough()`."""
        found, self._found = self._found, {}
        self._asked = self._asked or self._admission.descriptor in found
        self._changed = self._changed or self._changes in found
        if self._asked:
            self._asked = not self._admission.answer()
        if self._changed:
            self._note_connections()
        router = self._router
        for _ in range(MAX_MESSAGES_A_TURN):
            # Asking is cheaper than an exception, and the decode thread may wait for the GIL with a new request.
            if not has_message(router):
                return
            routing_id = router.recv(_NOBLOCK)
            frame = router.recv(copy=False)
            frames = [frame]
            while frame.more:
                frame = router.recv(copy=False)
                if len(frames) < MAX_FRAMES:
                    frames.append(frame)
            peer = self.peers.get(routing_id) or self._begin(routing_id, frames[0])
            if peer is not None:
                self._handlers.message(peer, [one.bytes for one in frames])
            if enough():
                return

    def send(self, peer: Peer, frame: bytes) -> bool:
        """Send a message of one frame without waiting; False if the queue is full: then `unblocked` follows.

        A message to a peer that is gone is dropped, and `ended` follows unless it was called.
        """
        if peer.full:
            return False
        if peer.gone:
            return True
        try:
            send_frames(self._router, (peer.routing_id, frame))
        except zmq.Again:
            peer.full = True
            self._timers.after(RETRY_S, self._retry, peer)
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._timers.after(0.0, self._end, peer)
        return True

    def shut(self, peer: Peer) -> None:
        """End a peer's connection; `ended` follows."""
        connection = self._connections.get(peer.descriptor)
        if connection is not None and connection.peer is peer and not peer.gone:
            self._shut(peer.descriptor, connection)

    def close(self, linger_s: float) -> None:
        """End all connections; messages already sent have `linger_s` to leave."""
        self._router.disable_monitor()
        self._router.close(linger=int(linger_s * 1000))
        self._context.destroy(linger=int(linger_s * 1000))

    def _bind(self, endpoint: Endpoint, lock: EndpointLock | None) -> None:
        router, limits = self._router, self._limits
        prepare_socket(
            router,
            max_message_bytes=limits.max_message_bytes,
            high_water_mark=limits.high_water_mark,
            heartbeat_interval_s=limits.heartbeat_interval_s,
            heartbeat_timeout_s=limits.heartbeat_timeout_s,
        )
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.RCVHWM, min(limits.high_water_mark, MAX_UNREAD))
        if ":" in endpoint.host:
            router.setsockopt(zmq.IPV6, 1)
        if lock is not None:
            router.setsockopt(zmq.USE_FD, lock.listen().detach())  # libzmq's own from now on
        try:
            router.bind(endpoint.url)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {endpoint.url!r:.200}: {error.strerror}") from error

    def _begin(self, routing_id: bytes, frame: zmq.Frame) -> Peer | None:
        """Return a new peer for its first message; None if its connection is over already, or is refused."""
        self._note_connections()
        descriptor = int(frame.get("__fd"))
        connection = self._connections.get(descriptor)
        if connection is None or routing_id in self._ended:
            return None
        if connection.peer is not None:  # one of both is from an earlier connection with the same descriptor
            if _is_newer(connection.peer.routing_id, routing_id):
                return None
            self._end(connection.peer)
        if routing_id[0]:  # the peer chose it, so another connection may have it, too; libzmq's begin with a zero
            self._refuse(descriptor, connection, "a routing id of its own")
            return None
        peer = Peer(routing_id, descriptor, User.of(str(frame.get("User-Id"))))
        self.peers[routing_id] = connection.peer = peer
        return peer

    def _retry(self, peer: Peer) -> None:
        peer.full = False
        if not peer.gone:
            self._handlers.unblocked(peer)

    def _note_connections(self) -> None:
        """Read the monitor's events about connections that came and went."""
        self._changed = True
        came: list[tuple[int, _Connection]] = []
        for _ in range(MAX_EVENTS_A_TURN):
            if not has_message(self._monitor):
                self._changed = False
                break
            event, descriptor = _EVENT.unpack(self._monitor.recv_multipart(_NOBLOCK)[0])
            self._connections.pop(descriptor, None)
            if event == _ACCEPTED:
                connection = self._connections[descriptor] = _Connection(descriptor)
                came.append((descriptor, connection))
                continue
            if any(peer.descriptor == descriptor for peer in self.peers.values()):
                for seconds in PROBE_AFTER_S:
                    self._timers.after(seconds, self._probe, descriptor)
        num_over = len(self._connections) - self._limits.max_clients - SPARE_CONNECTIONS
        for descriptor, connection in came[-num_over:] if num_over > 0 else ():
            self._refuse(descriptor, connection, "too many connections")

    def _look_after(self) -> None:
        """End the connections that have not said HELLO in time."""
        last = time.monotonic() - HELLO_TIMEOUT_S
        for descriptor, connection in list(self._connections.items()):
            peer = connection.peer
            if connection.since < last and (peer is None or not peer.greeted):
                self._refuse(descriptor, connection, f"no HELLO in {HELLO_TIMEOUT_S:g} s")
        self._timers.after(self._limits.heartbeat_interval_s, self._look_after)

    def _refuse(self, descriptor: int, connection: _Connection, reason: str) -> None:
        if self._shut(descriptor, connection):
            self._log.info("ended a connection", extra={"reason": reason})

    def _shut(self, descriptor: int, connection: _Connection | None) -> bool:
        """Shut a connection's socket down unless another has its descriptor; returns whether it was shut down."""
        if connection is None or self._connections.get(descriptor) is not connection:
            return False
        try:
            with socket.socket(fileno=os.dup(descriptor)) as duplicate:
                if not connection.inode or _inode(duplicate.fileno()) != connection.inode:
                    return False
                duplicate.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
        return True

    def _probe(self, descriptor: int) -> None:
        for peer in [one for one in self.peers.values() if one.descriptor == descriptor]:
            if not self._lives(peer):
                self._end(peer)

    def _lives(self, peer: Peer) -> bool:
        """Return whether a peer can be sent to; clients ignore a PONG that they have not requested."""
        self._router.getsockopt(zmq.EVENTS)  # makes the socket notice connections that ended
        try:
            send_frames(self._router, (peer.routing_id, _PROBE))
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def _end(self, peer: Peer) -> None:
        if not peer.gone:
            peer.gone = True
            del self.peers[peer.routing_id]
            self._ended[peer.routing_id] = None
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
            self._handlers.ended(peer)


def _is_newer(routing_id: bytes, other: bytes) -> bool:
    """Return whether libzmq gave the first id later; its ids are a zero byte and a counter that wraps."""
    first, second = (int.from_bytes(one[1:5], "big") for one in (routing_id, other))
    return (first - second) % (1 << 32) < 1 << 31


def _inode(descriptor: int) -> int:
    """Return the inode of a descriptor's socket; 0 if the descriptor is closed."""
    try:
        return os.fstat(descriptor).st_ino
    except OSError:
        return 0


def _forget_routing_ids() -> None:
    """Seed C's rand(), so that the next ROUTER counts its routing ids from an unpredictable number.

    libzmq takes the first number from an unseeded rand(), and ends the process if a peer has chosen the next id.
    """
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


def _allow_descriptors(num_connections: int) -> None:
    """Raise this process's limit of descriptors well above the connections. Raises ConfigError if it may not.

    libzmq ends the process if it cannot accept an ipc:// connection, and the server can end surplus connections only
    after they were accepted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, most = num_connections + SPARE_DESCRIPTORS, hard if hard != resource.RLIM_INFINITY else MANY_DESCRIPTORS
    if most < needed:
        can_be_lowered = most > SPARE_CONNECTIONS + SPARE_DESCRIPTORS
        raise ConfigError(
            f"{num_connections} connections (max_clients and {SPARE_CONNECTIONS} more) need {needed} descriptors, and "
            f"this process may have {most}; raise `ulimit -Hn`{' or lower max_clients' if can_be_lowered else ''}"
        )
    wanted = min(most, max(needed, MANY_DESCRIPTORS))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
