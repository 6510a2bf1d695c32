"""A connection that several threads share and none owns: whoever waits first listens for all.

All that touches the sockets happens under one lock, but for the waiting itself: the leader, one of those who wait,
polls bare descriptors without it. So others can send meanwhile. A send may swallow the signal that a message has come;
so whoever sends looks for messages afterwards, hands them out, and wakes whom they are for. While nobody waits nobody
listens; but where the server's heartbeats must be answered a thread looks once in a while, which does not keep the
interpreter alive.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from types import TracebackType

from lowlat.errors import LowlatError
from lowlat.ipc.client.protocol import HEARTBEAT_INTERVAL_S, SILENCE_S, Connection, Waiter
from lowlat.ipc.client.transport import Transport

__all__ = ["Link"]


class Link:
    """Sockets and the connection on them. As a context manager it is the lock, under which the connection is used."""

    def __init__(self, sockets: Transport, connection: Connection) -> None:
        self.connection = connection
        self._sockets = sockets
        self._lock = threading.Lock()
        self._leader: Waiter | None = None
        self._followers: dict[Waiter, threading.Lock] = {}
        self._abandoned: deque[int] = deque()
        self._shut = False
        self._unread = False  # messages may wait that no descriptor tells of
        self._asleep = False  # the leader polls, and nobody has woken it yet
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()  # the leader's, who polls it without the lock
        self._news = select.poll()
        for descriptor in (sockets.message_fd, sockets.loss_fd, self._wake):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)
                self._news.register(descriptor, select.POLLIN)
        self._ended = threading.Event()

    def __enter__(self) -> Connection:
        self._lock.acquire()
        return self.connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.connection.failure is not None:
            self._shut_down()
        self._lock.release()
        if self._abandoned:
            self._sweep()

    def send(self) -> None:
        """Under the lock: send what is to be sent; if nobody listens, who waits next looks for what has come."""
        if self._leader is not None or self._shut or self.connection.failure is not None:
            self.pump()
            return
        self._unread = self._unread or not self._sockets.stays_readable
        try:
            self._send()
        except BaseException:
            # half a message may have left, as when Ctrl-C falls between its frames
            self.connection.fail("interrupted while a message was sent")
            raise

    def pump(self, until: Waiter | None = None) -> None:
        """Under the lock: send what is to be sent, and hand out what has come.

        until   the descriptor says that something has come, and more than what makes this one ready may wait
        """
        if self._shut:
            return
        try:
            self._exchange(until)
        except BaseException:
            # a message may have been taken and not handed out, as when Ctrl-C falls between
            self.connection.fail("interrupted while a message was taken")
            raise
        finally:
            if self.connection.failure is not None:
                self._wake_all()

    def check_news(self) -> None:
        """Under the lock: check, if anything has happened: whatever happens makes a descriptor readable."""
        if self.connection.failure is None and (self._unread or self._news.poll(0)):
            self.check()

    def check(self) -> None:
        """Under the lock: take what has come, then see whether the connection is lost."""
        self.pump()
        if self._shut:
            return
        self._sockets.look()
        if self._sockets.lost is not None:
            self.connection.fail(self._sockets.lost)
            self._wake_all()

    def wait(self, waiter: Waiter, deadline: float | None) -> bool:
        """Under the lock: wait until there is something to take; False when the deadline (monotonic) has passed."""
        try:
            while not waiter.ready and self.connection.failure is None:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    return False
                if self._leader is None:
                    self._lead(waiter, deadline, now)
                else:
                    self._follow(waiter, deadline, now)
            return True
        finally:
            if self._followers and self._leader is None:
                _, signal = self._followers.popitem()
                signal.release()

    def abandon(self, number: int) -> None:
        """Cancel a request whose reader is gone; from any thread, amid any call, as when memory is collected."""
        self._abandoned.append(number)
        self._sweep()

    def keep(self) -> None:
        """Under no lock: answer the server's heartbeats from now on while nobody waits, where nobody else does."""
        welcome = self.connection.welcome
        if welcome is None or not self._sockets.needs_reader:
            return
        pause_s = min(HEARTBEAT_INTERVAL_S, welcome.limits.heartbeat_interval_s)
        threading.Thread(target=self._keep, args=(pause_s,), name="lowlat-client", daemon=True).start()

    def _keep(self, pause_s: float) -> None:
        while not self._ended.wait(pause_s):
            if self._leader is None and self._lock.acquire(blocking=False):
                try:
                    self.pump()
                finally:
                    self._leave()

    def close(self, reason: str) -> None:
        """End all that is under way."""
        with self:
            if self.connection.failure is None and not self._shut:
                self.connection.fail(reason, LowlatError(reason))
                self._wake_all()

    def _lead(self, waiter: Waiter, deadline: float | None, now: float) -> None:
        self._leader = waiter
        connection = self.connection
        try:
            connection.attend(now)
            if self._unread or connection.outgoing or not self._sockets.stays_readable:
                self.pump()
            while not waiter.ready and connection.failure is None:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    return
                due = connection.tick(now)
                if connection.outgoing or connection.failure is not None:
                    self.pump()
                    if waiter.ready:
                        return
                self._sleep(due if deadline is None else min(due, deadline - now))
                self.pump(None if self._followers else waiter)
        finally:
            self._leader = None

    def _sleep(self, pause_s: float) -> None:
        self._asleep = True
        self._lock.release()
        try:
            events = self._poll.poll(pause_s * 1000.0)
        finally:
            self._acquire()
            self._asleep = False
        for descriptor, _ in events:
            if descriptor == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif descriptor == self._sockets.loss_fd:
                self.check()

    def _follow(self, waiter: Waiter, deadline: float | None, now: float) -> None:
        signal = self._followers[waiter] = threading.Lock()
        signal.acquire()
        self._lock.release()
        try:
            signal.acquire(timeout=-1 if deadline is None else deadline - now)
        finally:
            self._acquire()
            self._followers.pop(waiter, None)

    def _acquire(self) -> None:
        """Take the lock back whatever happens: callers release it."""
        try:
            self._lock.acquire()
        except BaseException:
            self._lock.acquire()
            raise

    def _send(self) -> None:
        outgoing, sockets = self.connection.outgoing, self._sockets
        while outgoing and sockets.send(outgoing[0]):
            if outgoing:
                outgoing.popleft()
            if sockets.pending:
                self._finish_sending()

    def _finish_sending(self) -> None:
        """The rest of a message that is longer than the kernel's buffer: a server that lives takes it at once."""
        writable = select.poll()
        writable.register(self._sockets.message_fd, select.POLLOUT)
        while not self._sockets.flush():
            if not writable.poll(SILENCE_S * 1000.0):
                self.connection.fail(f"the server took nothing for {SILENCE_S:g} s")
                return

    def _exchange(self, until: Waiter | None) -> None:
        connection, sockets = self.connection, self._sockets
        told = until is not None
        while True:
            self._send()
            if connection.failure is not None:
                return
            frame = sockets.receive(told)
            if frame is None:
                if sockets.lost is not None:
                    connection.fail(sockets.lost)
                elif not told:
                    self._unread = False
                    return
                told = False
                continue
            told = False
            waiter = connection.receive(frame, time.monotonic())
            if waiter is not None and waiter is until and waiter.goes_on:
                self._unread = True  # its reader has waited long enough
                return
            self._deliver(waiter)

    def _deliver(self, waiter: Waiter | None) -> None:
        if waiter is None:
            return
        if waiter is self._leader:
            self._wake_leader()
        elif (signal := self._followers.pop(waiter, None)) is not None:
            signal.release()

    def _wake_leader(self) -> None:
        if self._asleep:
            self._asleep = False
            os.eventfd_write(self._wake, 1)

    def _wake_all(self) -> None:
        while self._followers:
            self._followers.popitem()[1].release()
        self._wake_leader()

    def _sweep(self) -> None:
        """Cancel what was abandoned, unless somebody holds the lock, who does it on leaving."""
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                while self._abandoned:
                    self._deliver(self.connection.abandon(self._abandoned.popleft()))
                self.pump()
            finally:
                self._lock.release()

    def _shut_down(self) -> None:
        """Close the sockets, unless the leader still polls their descriptors: then it does."""
        if self._shut or self._leader is not None:
            return
        self._shut = True
        self._ended.set()
        self._sockets.close()
        os.close(self._wake)
