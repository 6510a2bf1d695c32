"""ipc://: Unix sockets on one epoll, speaking ZMTP. It knows no message."""

import errno
import logging
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from lowlat.ipc.channel import Channel
from lowlat.ipc.endpoint import EndpointLock
from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.transport.listener import MAX_FRAMES, MAX_MESSAGES_A_TURN, Connection, Handlers, Listener
from lowlat.ipc.server.transport.rate import Rate
from lowlat.ipc.server.transport.security import Credentials, Users

__all__ = ["UnixListener"]

HELLO_TIMEOUT_S = 5.0
SPARE_CONNECTIONS = 64  # beyond max_clients, so that these can be told that the server is full
MAX_STRANGERS = 16  # connections of users that are not let in, so that these can be told
MAX_STRANGER_FRAME_BYTES = 4096
MAX_BURST = 32  # messages of one connection without a rest: somewhat under a millisecond
REST_S = 0.002
MAX_ACCEPTS_A_TURN = 16
MAX_EVENTS_A_TURN = 64
_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_ENDED = select.EPOLLHUP | select.EPOLLERR  # always told of, asked for or not
_TRANSIENT = frozenset({errno.ECONNABORTED, errno.EINTR, errno.EAGAIN})


class UnixConnection(Channel, Connection):
    """A client's connection.

    queued      messages of it were read and not handled, so no more is read
    resting     it has no turn before a moment has passed
    burst       messages of it that were handled since all that was read was
    muted       nothing that it says is told any more
    starved     something had no room in its queue
    watched     the events that epoll tells of
    silent      heartbeats since it was last heard
    commands    how many of ZMTP's commands come
    admitted    its client was welcomed; before that it has not long
    """

    __slots__ = (
        "_watch",
        "admitted",
        "burst",
        "commands",
        "credentials",
        "ended",
        "muted",
        "opened",
        "queued",
        "resting",
        "silent",
        "starved",
        "stranger",
        "watched",
    )

    def __init__(
        self,
        connection: socket.socket,
        credentials: Credentials,
        limits: Limits,
        watch: Callable[["UnixConnection"], None],
        *,
        stranger: bool,
    ) -> None:
        max_frame_bytes = limits.max_message_bytes
        super().__init__(
            connection,
            b"ROUTER",
            b"DEALER",
            max_frame_bytes=min(max_frame_bytes, MAX_STRANGER_FRAME_BYTES) if stranger else max_frame_bytes,
            max_frames=MAX_FRAMES,
            max_unsent=limits.high_water_mark,
        )
        self._watch = watch
        self.credentials = credentials
        self.opened = time.monotonic()
        self.queued = False
        self.resting = False
        self.burst = 0
        self.muted = False
        self.starved = False
        self.watched = _READ | _WRITE  # its greeting is to leave
        self.ended = False
        self.silent = 0
        self.commands = Rate()
        self.admitted = False
        self.stranger = stranger

    def put(self, frame: bytes) -> bool:
        taken = self.send((frame,))
        if self._unsent:
            self.starved = not taken
            self._watch(self)
        return taken

    def admit(self) -> None:
        self.admitted = True

    def mute(self) -> None:
        self.muted = True
        self._watch(self)

    def end(self) -> None:
        """Found out about in the next turn, as any other end."""
        if not self.ended:
            self.shut()


class UnixListener(Listener):
    """Listens on the path that a lock holds. Raises ConfigError when it cannot.

    users   who is let in; of others few connections are held, and only until they are told
    """

    def __init__(
        self,
        endpoint: str,
        lock: EndpointLock,
        limits: Limits,
        timers: Timers,
        log: logging.Logger,
        *,
        users: Users,
    ) -> None:
        self.endpoint = endpoint
        self.shared = True
        self._limits = limits
        self._timers = timers
        self._log = log
        self._users = users
        self._socket = lock.listen()
        self._socket.setblocking(False)
        self._listening = self._socket.fileno()
        self._epoll = select.epoll()
        self._epoll.register(self._listening, _READ)
        self._accepts = True
        self._wake = -1
        self._handlers: Handlers
        self._found: list[tuple[int, int]] = []
        self._connections: dict[int, UnixConnection] = {}
        self._num_strangers = 0
        self._turns: deque[UnixConnection] = deque()
        self._max_silent = math.ceil(limits.heartbeat_timeout_s / limits.heartbeat_interval_s)

    def serve(self, wake: int, handlers: Handlers) -> None:
        self._wake = wake
        self._handlers = handlers
        self._epoll.register(wake, _READ)
        self._timers.after(self._limits.heartbeat_interval_s, self._heartbeat)

    def wait(self, timeout_ms: int) -> bool:
        found = self._found = self._epoll.poll(0 if self._turns else timeout_ms / 1000.0, MAX_EVENTS_A_TURN)
        return (self._wake, _READ) in found

    def receive(self, enough: Callable[[], bool]) -> None:
        found, self._found = self._found, []
        turns = self._turns
        for descriptor, events in found:
            connection = self._connections.get(descriptor)
            if connection is None:
                if descriptor == self._listening:
                    self._accept()
                continue
            if events != _READ:
                self._attend(connection, events)
            if events & _READ and not connection.queued and not connection.muted:
                if connection.fill():  # once: the kernel keeps the rest of a flood
                    connection.queued = True
                    turns.append(connection)
                elif connection.lost is not None:
                    self._drop(connection)
        for _ in range(MAX_MESSAGES_A_TURN):
            if not turns:
                return
            connection = turns.popleft()
            frames = None if connection.muted else connection.next()
            if frames is None:
                self._settle(connection)
                continue
            if frames:
                self._handlers.message(connection, frames)
            else:
                self._count_command(connection)
            connection.burst += 1
            if connection.drained:
                connection.queued = False
                connection.burst = 0
            elif connection.burst < MAX_BURST:
                turns.append(connection)
            else:
                self._rest(connection)
            if enough():
                return

    def close(self, linger_s: float) -> None:
        self._linger(linger_s)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._turns.clear()
        self._socket.close()
        self._epoll.close()

    def _linger(self, linger_s: float) -> None:
        waiting = {one.descriptor: one for one in self._connections.values() if one.pending}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLOUT)
        end = time.monotonic() + linger_s
        while waiting and (left := end - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000.0):
                if waiting[descriptor].flush():
                    poll.unregister(descriptor)
                    del waiting[descriptor]

    def _attend(self, connection: UnixConnection, events: int) -> None:
        """Send what had no room; an end shows itself when all that came before it was read, unless nobody reads."""
        if events & _WRITE:
            connection.flush()
            if connection.starved and connection.has_room:
                connection.starved = False
                self._handlers.unblocked(connection)
            self._watch(connection)
        if events & _ENDED and (connection.muted or not events & _READ):
            self._drop(connection)

    def _rest(self, connection: UnixConnection) -> None:
        """Leave one that has said much at once for a while: nobody's flood takes the time of all others."""
        if connection.ended:
            return
        connection.burst = 0
        connection.resting = True
        self._epoll.unregister(connection.descriptor)  # or its end would be told of again and again
        self._timers.after(REST_S, self._resume, connection)

    def _resume(self, connection: UnixConnection) -> None:
        if not connection.ended:
            connection.resting = False
            self._epoll.register(connection.descriptor, connection.watched)
            self._watch(connection)
            self._turns.append(connection)

    def _settle(self, connection: UnixConnection) -> None:
        """All that was read of it is handled."""
        connection.queued = False
        connection.burst = 0
        if connection.lost is not None:
            self._drop(connection, connection.lost)

    def _count_command(self, connection: UnixConnection) -> None:
        limit = self._limits.max_messages_per_s
        if connection.commands.exceeds(limit):
            self._drop(connection, f"more than {limit} commands in a second (max_messages_per_s)")

    def _watch(self, connection: UnixConnection) -> None:
        """Have epoll tell of what is wanted of it now."""
        watched = (0 if connection.muted else _READ) | (_WRITE if connection.pending else 0)
        if watched != connection.watched and not connection.ended and not connection.resting:
            connection.watched = watched
            self._epoll.modify(connection.descriptor, watched)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTS_A_TURN):
            try:
                accepted, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    # out of descriptors or memory: it would be told of again and again
                    self._log.error("cannot accept a connection: %s", error.strerror)
                    self._epoll.modify(self._listening, 0)
                    self._accepts = False
                return
            try:
                credentials = Credentials.of(accepted)
            except OSError:
                accepted.close()
                continue
            stranger = not self._users.admits(credentials.uid)
            if self._is_full(stranger):
                accepted.close()
                reason = "too many connections of users that are not let in" if stranger else "too many connections"
                extra = {"reason": reason, "uid": credentials.uid, "peer_pid": credentials.pid}
                self._log.warning("refused a connection", extra=extra)
                continue
            connection = UnixConnection(accepted, credentials, self._limits, self._watch, stranger=stranger)
            self._connections[connection.descriptor] = connection
            self._num_strangers += stranger
            self._epoll.register(connection.descriptor, connection.watched)

    def _is_full(self, stranger: bool) -> bool:
        """Whether there are so many connections that another one is not even told why it cannot be."""
        if stranger:
            return self._num_strangers >= MAX_STRANGERS
        return len(self._connections) - self._num_strangers >= self._limits.max_clients + SPARE_CONNECTIONS

    def _drop(self, connection: UnixConnection, reason: str = "") -> None:
        """End a connection; without a reason its client has."""
        if connection.ended:
            return
        if reason:
            self._log.info("ended a connection", extra={"reason": reason, "peer_pid": connection.credentials.pid})
        connection.ended = connection.muted = True
        self._connections.pop(connection.descriptor)
        self._num_strangers -= connection.stranger
        if not connection.resting:
            self._epoll.unregister(connection.descriptor)  # closing would not, while a fork holds the descriptor
        connection.close()
        self._handlers.ended(connection)

    def _heartbeat(self) -> None:
        """Ask those who were silent for a sign of life; give up those who gave none, or never said HELLO."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if not connection.admitted:
                if now - connection.opened > HELLO_TIMEOUT_S:
                    self._drop(connection, f"no HELLO in {HELLO_TIMEOUT_S:g} s")
            elif connection.heard or connection.queued or connection.muted:
                connection.heard = False
                connection.silent = 0
            elif connection.silent >= self._max_silent:
                reason = f"no sign of life in {self._limits.heartbeat_timeout_s:g} s (heartbeat_timeout_s)"
                self._drop(connection, reason)
            else:
                connection.silent += 1
                connection.ping()
                self._watch(connection)
        if not self._accepts:
            self._accepts = True
            self._epoll.modify(self._listening, _READ)
        self._timers.after(self._limits.heartbeat_interval_s, self._heartbeat)
