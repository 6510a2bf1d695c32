"""This connection is shared by several threads and has none of its own: the first thread that waits receives for all.

The sockets are used under one lock, except for waiting. The leader, one of the waiting threads, polls descriptors
without the lock, so that others can send meanwhile. A send may consume the signal that a message has come. So the
sender looks for messages afterwards, delivers them, and wakes their threads. While no thread waits, none receives;
libzmq itself answers the server's heartbeats.
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from types import TracebackType

from lowlat.errors import LowlatError
from lowlat.ipc.client.dealer import Dealer
from lowlat.ipc.client.protocol import ClientProtocol, Waiter

__all__ = ["Connection"]


class Connection:
    """A dealer and its protocol. Entering it as a context manager takes the lock, under which the protocol is used."""

    def __init__(self, dealer: Dealer, protocol: ClientProtocol) -> None:
        self.protocol = protocol
        self._dealer = dealer
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
        for descriptor in (dealer.message_fd, dealer.loss_fd, self._wake):
            self._poll.register(descriptor, select.POLLIN)
            self._news.register(descriptor, select.POLLIN)

    def __enter__(self) -> ClientProtocol:
        self._lock.acquire()
        return self.protocol

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.protocol.failure is not None:
            self._shut_down()
        self._lock.release()
        if self._abandoned:
            self._sweep()

    def send(self) -> None:
        """Under the lock: send outgoing messages; without a leader, the next thread that waits receives."""
        if self._leader is not None or self._shut or self.protocol.failure is not None:
            self.pump()
            return
        self._unread = True
        try:
            self._send()
        except BaseException:
            # half a message may have left, as when Ctrl-C falls between its frames
            self.protocol.fail("interrupted while a message was sent")
            raise

    def pump(self, until: Waiter | None = None) -> None:
        """Under the lock: send outgoing messages, and deliver incoming ones.

        until   given after the descriptor has reported a message: stop as soon as this waiter has something
        """
        if self._shut:
            return
        try:
            self._exchange(until)
        except BaseException:
            # a message may have been received and not delivered, as Ctrl-C can come between
            self.protocol.fail("interrupted while a message was taken")
            raise
        finally:
            if self.protocol.failure is not None:
                self._wake_all()

    @property
    def has_news(self) -> bool:
        """Whether `check` may find anything: whatever happens makes a descriptor readable. One thread at a time."""
        return self._unread or bool(self._news.poll(0))

    def check(self) -> None:
        """Under the lock: deliver incoming messages, then check whether the connection is lost."""
        self.pump()
        if self._shut:
            return
        self._dealer.look()
        if self._dealer.lost is not None:
            self.protocol.fail(self._dealer.lost, self._dealer.refusal)
            self._wake_all()

    def wait(self, waiter: Waiter, deadline: float | None) -> bool:
        """Under the lock: wait until `waiter` has something to take; False if the deadline (monotonic) passes first."""
        try:
            while not waiter.ready and self.protocol.failure is None:
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
        """Cancel a request whose reader is gone; a garbage collection may call this in any thread, inside any call."""
        self._abandoned.append(number)
        self._sweep()

    def close(self, reason: str) -> None:
        """End all requests, and close the sockets."""
        with self:
            if self.protocol.failure is None and not self._shut:
                self.protocol.fail(reason, LowlatError(reason))
                self._wake_all()

    def _lead(self, waiter: Waiter, deadline: float | None, now: float) -> None:
        self._leader = waiter
        protocol = self.protocol
        try:
            protocol.attend(now)
            self.pump()
            while not waiter.ready and protocol.failure is None:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    return
                due = protocol.tick(now)
                if protocol.outgoing or protocol.failure is not None:
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
            elif descriptor == self._dealer.loss_fd:
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
        """Take the lock again even if interrupted, as callers release it."""
        try:
            self._lock.acquire()
        except BaseException:
            self._lock.acquire()
            raise

    def _send(self) -> None:
        outgoing, dealer = self.protocol.outgoing, self._dealer
        while outgoing and dealer.send(outgoing[0]):
            if outgoing:
                outgoing.popleft()

    def _exchange(self, until: Waiter | None) -> None:
        protocol, dealer = self.protocol, self._dealer
        told = until is not None
        while True:
            if protocol.outgoing:
                self._send()
            if protocol.failure is not None:
                return
            frame = dealer.receive(told)
            if frame is None and not told:
                self._unread = False
                return
            told = False
            if frame is None:
                continue
            waiter = protocol.receive(frame, time.monotonic())
            if waiter is not None and waiter is until and waiter.ready and waiter.goes_on:
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
        """Cancel abandoned requests, unless another thread holds the lock: that one does it when it leaves."""
        while self._abandoned and self._lock.acquire(blocking=False):
            try:
                while self._abandoned:
                    self._deliver(self.protocol.abandon(self._abandoned.popleft()))
                self.pump()
            finally:
                self._lock.release()

    def _shut_down(self) -> None:
        """Close the sockets; if the leader still polls their descriptors, it closes them."""
        if self._shut or self._leader is not None:
            return
        self._shut = True
        self._dealer.close()
        os.close(self._wake)
