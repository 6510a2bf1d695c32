"""tcp://: a ROUTER of libzmq, with CURVE where keys are given.

ROUTER names a connection by a routing id and tells nobody when it ends. A disconnect shows itself in three ways: a
send fails with EHOSTUNREACH (ROUTER_MANDATORY); the socket's monitor reports the descriptor that was closed, and the
connections that came through it are tried by a PONG that nobody asked for; a message arrives under a known routing id
from another address, or HELLO from another descriptor. Nor has ROUTER a call that ends a connection.
"""

import errno
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from lowlat.errors import ConfigError
from lowlat.ipc.endpoint import Endpoint
from lowlat.ipc.libzmq import has_message, prepare_socket, send_frames
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.transport.listener import MAX_FRAMES, MAX_MESSAGES_A_TURN, Connection, Handlers, Listener
from lowlat.ipc.server.transport.security import Credentials, Curve
from lowlat.ipc.wire import Kind, Pong, encode

__all__ = ["ZmqListener"]

PROBE_AFTER_S = (0.0, 0.005, 0.05, 0.5)  # a monitor's event can come before the pipe's end is known to the socket
RETRY_S = 0.005
MAX_UNREAD = 128  # messages of a client that lie here: the rest of a flood stays with whoever sends it
MAX_ENDED = 512  # with what RCVHWM lets wait of each, more than a client can leave behind at a time
_HELLO = Kind.HELLO.to_bytes()
_PROBE = encode(Pong(0, "serving", 0.0, 0, 0))
_POLLIN = int(zmq.POLLIN)  # bare numbers: enum's own arithmetic takes microseconds in a process that has just woken
_NOBLOCK = int(zmq.NOBLOCK)
_EVENT = struct.Struct("=Hi")  # a monitor's event, and its descriptor


class ZmqConnection(Connection):
    """The peer that ROUTER calls by a routing id, as long as it is the same client's.

    greeted   it said HELLO
    suspect   a connection with its descriptor has ended a moment ago
    broken    nothing can be sent to it any more
    """

    __slots__ = (
        "_put",
        "address",
        "broken",
        "credentials",
        "descriptor",
        "ended",
        "full",
        "greeted",
        "routing_id",
        "stranger",
        "suspect",
    )

    def __init__(
        self, routing_id: bytes, address: str, descriptor: int, put: Callable[["ZmqConnection", bytes], bool]
    ) -> None:
        self.routing_id = routing_id
        self.address = address
        self.descriptor = descriptor
        self.credentials = Credentials()
        self.stranger = False  # nobody says who its user is
        self.greeted = False
        self.suspect = False
        self.broken = False
        self.full = False
        self.ended = False
        self._put = put

    def put(self, frame: bytes) -> bool:
        return self._put(self, frame)

    def admit(self) -> None:
        """Nor can ROUTER end one that is not."""

    def mute(self) -> None:
        """Ignored: messages are read all the same, and told, as ROUTER cannot leave one out."""

    def end(self) -> None:
        """There is no call for it."""


class ZmqListener(Listener):
    """Binds a ROUTER. Raises ConfigError when it cannot, or keys cannot be read."""

    def __init__(self, endpoint: Endpoint, limits: Limits, timers: Timers, curve: Curve | None) -> None:
        self.shared = False
        self._limits = limits
        self._timers = timers
        self._authenticator: ThreadAuthenticator | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._bind(endpoint, curve)
        except BaseException:
            self._end_context(0.0)
            raise
        self.endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._sources: list[Any] = []
        self._found: list[tuple[Any, int]] = []
        self._handlers: Handlers
        self._connections: dict[bytes, ZmqConnection] = {}
        self._past: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # the latest: address and descriptor

    def serve(self, wake: int, handlers: Handlers) -> None:
        self._sources = [(wake, _POLLIN), (self._router, _POLLIN), (self._monitor, _POLLIN)]
        self._handlers = handlers

    def wait(self, timeout_ms: int) -> bool:
        self._found = zmq.zmq_poll(self._sources, timeout_ms)
        return self._sources[0] in self._found

    def receive(self, enough: Callable[[], bool]) -> None:
        _, heard, ended = self._sources
        found, self._found = self._found, []
        if ended in found:
            self._disconnected()  # first: a new connection's messages may be in the router already
        if heard not in found:
            return
        router = self._router
        for _ in range(MAX_MESSAGES_A_TURN):
            routing_id = router.recv(_NOBLOCK)
            frame = router.recv(copy=False)
            frames = [frame]
            while frame.more:
                frame = router.recv(copy=False)
                if len(frames) < MAX_FRAMES:
                    frames.append(frame)
            connection = self._find(routing_id, frames[0])
            if connection is not None:
                self._handlers.message(connection, [one.bytes for one in frames])
            # To ask is cheaper than an exception, while the decode thread waits for the GIL with what was submitted.
            if enough() or not has_message(router):
                return

    def close(self, linger_s: float) -> None:
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._end_context(linger_s)

    def _bind(self, endpoint: Endpoint, curve: Curve | None) -> None:
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
        if curve is not None:
            self._authenticator = curve.protect(self._context, router)
        if ":" in endpoint.host:
            router.setsockopt(zmq.IPV6, 1)
        try:
            router.bind(endpoint.url)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {endpoint.url!r:.200}: {error.strerror}") from error

    def _end_context(self, linger_s: float) -> None:
        self._router.close(linger=int(linger_s * 1000))
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()  # waits for the last messages

    def _find(self, routing_id: bytes, frame: zmq.Frame) -> ZmqConnection | None:
        """The connection that a message came on; None where nobody is there to be answered.

        libzmq also speaks ZMTP 1 and 2, as which bytes by chance may pass; their frames have no properties, and so
        nobody knows whose they are. And what a connection brought before it ended can still come when its end is
        known: only HELLO may begin another.
        """
        try:
            address = str(frame.get("Peer-Address"))
        except zmq.ZMQError:
            return None
        is_hello = bytes(frame.buffer[:1]) == _HELLO
        connection = self._connections.get(routing_id)
        if connection is not None:
            descriptor = int(frame.get("__fd")) if is_hello else connection.descriptor
            # Another's under the same routing id, or the same process has connected anew.
            is_other = descriptor != connection.descriptor or (is_hello and connection.greeted and connection.suspect)
            if connection.address == address and not is_other and not connection.broken:
                connection.greeted = connection.greeted or is_hello
                return connection
            self._end(connection)
        descriptor = int(frame.get("__fd"))
        if self._past.get(routing_id) == (address, descriptor) and not is_hello:
            return None
        connection = self._connections[routing_id] = ZmqConnection(routing_id, address, descriptor, self._put)
        connection.greeted = is_hello
        return connection

    def _put(self, connection: ZmqConnection, frame: bytes) -> bool:
        if connection.full:
            return False
        if connection.ended or connection.broken:
            return True
        try:
            send_frames(self._router, (connection.routing_id, frame))
        except zmq.Again:
            connection.full = True
            self._timers.after(RETRY_S, self._retry, connection)
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            connection.broken = True
            self._timers.after(0.0, self._end, connection)
        return True

    def _retry(self, connection: ZmqConnection) -> None:
        connection.full = False
        if not connection.ended:
            self._handlers.unblocked(connection)

    def _disconnected(self) -> None:
        for _ in range(MAX_MESSAGES_A_TURN):  # connections may come and go faster than they can be noted
            if not has_message(self._monitor):
                return
            _, descriptor = _EVENT.unpack(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            for connection in self._connections.values():
                if connection.descriptor == descriptor:
                    connection.suspect = True
            for seconds in PROBE_AFTER_S:
                self._timers.after(seconds, self._probe, descriptor, seconds == PROBE_AFTER_S[-1])

    def _probe(self, descriptor: int, last: bool) -> None:
        suspects = [one for one in self._connections.values() if one.descriptor == descriptor]
        if suspects:
            self._router.getsockopt(zmq.EVENTS)  # makes the socket take note of ended pipes
        for connection in suspects:
            connection.suspect = connection.suspect and not last
            try:
                send_frames(self._router, (connection.routing_id, _PROBE))
            except zmq.Again:
                continue
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._end(connection)

    def _end(self, connection: ZmqConnection) -> None:
        if connection.ended:
            return
        connection.ended = True
        if self._connections.get(connection.routing_id) is connection:
            del self._connections[connection.routing_id]
        self._past[connection.routing_id] = (connection.address, connection.descriptor)
        self._past.move_to_end(connection.routing_id)
        if len(self._past) > MAX_ENDED:
            self._past.popitem(last=False)
        self._handlers.ended(connection)
