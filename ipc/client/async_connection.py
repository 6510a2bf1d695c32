"""This connection is driven by one event loop, which watches the sockets' descriptors without ZeroMQ's poller."""

import asyncio
import select
import threading
import time
from collections.abc import Callable
from functools import partial

from lowlat.errors import LowlatError
from lowlat.ipc.client.dealer import Dealer
from lowlat.ipc.client.protocol import ClientProtocol, Stream, Waiter

__all__ = ["AsyncConnection"]


class AsyncConnection:
    """A dealer and its protocol."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dealer: Dealer, protocol: ClientProtocol) -> None:
        self.protocol = protocol
        self.loop = loop
        self._thread = threading.get_ident()
        self._dealer = dealer
        self._waiting: dict[Waiter, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._shut = False
        self._news = select.poll()
        for descriptor, act in ((dealer.message_fd, self.pump), (dealer.loss_fd, self.check)):
            self._news.register(descriptor, select.POLLIN)
            loop.add_reader(descriptor, act)

    def pump(self) -> None:
        """Send outgoing messages, and deliver incoming ones."""
        protocol, dealer = self.protocol, self._dealer
        outgoing = protocol.outgoing
        while not self._shut:
            while outgoing and dealer.send(outgoing[0]):
                outgoing.popleft()
            if protocol.failure is not None:
                self._shut_down()
            elif (frame := dealer.receive(False)) is not None:
                self._wake(protocol.receive(frame, time.monotonic()))
            else:
                return

    def check_news(self) -> None:
        """Call `check` if a descriptor is readable: any event makes one readable."""
        if not self._shut and self._news.poll(0):
            self.check()

    def check(self) -> None:
        """Deliver incoming messages, then check whether the connection is lost."""
        self.pump()
        if self._shut:
            return
        self._dealer.look()
        if self._dealer.lost is not None:
            self.fail(self._dealer.lost, self._dealer.refusal)

    def fail(self, reason: str, error: LowlatError | None = None) -> None:
        """End all requests, and close the sockets."""
        self.protocol.fail(reason, error)
        self._shut_down()

    def close(self, reason: str) -> None:
        """End all requests, from any thread, even after the loop has ended."""
        error = LowlatError(reason)
        if threading.get_ident() == self._thread or self.loop.is_closed():
            self.fail(reason, error)
        else:
            self.loop.call_soon_threadsafe(self.fail, reason, error)

    async def wait(self, waiter: Waiter, deadline: float | None) -> bool:
        """Wait until `waiter` has something to take; False if the deadline (monotonic) passes first."""
        while not waiter.ready and self.protocol.failure is None:
            future = self.loop.create_future()
            self.watch(waiter, partial(_resolve, future))
            timer = None if deadline is None else self.loop.call_later(deadline - time.monotonic(), _resolve, future)
            try:
                await future
            finally:
                self.unwatch(waiter)
                if timer is not None:
                    timer.cancel()
            if deadline is not None and not waiter.ready and time.monotonic() >= deadline:
                return False
        return True

    async def ended(self, stream: Stream) -> None:
        """Wait until a request has ended; no other task may wait for it meanwhile."""
        while not stream.ended and self.protocol.failure is None:
            future = self.loop.create_future()
            self.watch(stream, partial(_resolve, future))
            try:
                await future
            finally:
                self.unwatch(stream)

    def watch(self, waiter: Waiter, wake: Callable[[], None]) -> None:
        """Call `wake` whenever `waiter` has something new to take, in the call that receives it."""
        self.protocol.attend(time.monotonic())
        self._waiting[waiter] = wake
        if self._timer is None:
            self._tick()

    def unwatch(self, waiter: Waiter) -> None:
        """Stop calling the `wake` of a waiter."""
        self._waiting.pop(waiter, None)

    def abandon(self, number: int) -> None:
        """Cancel a request whose reader is gone; a garbage collection may call this in any thread."""
        if self.loop.is_closed():
            return
        if threading.get_ident() == self._thread:
            self.loop.call_soon(self._abandon, number)
        else:
            self.loop.call_soon_threadsafe(self._abandon, number)

    def _abandon(self, number: int) -> None:
        self._wake(self.protocol.abandon(number))
        self.pump()

    def _tick(self) -> None:
        self._timer = None
        if self._waiting and not self._shut:
            due = self.protocol.tick(time.monotonic())
            self.pump()
            if not self._shut:
                self._timer = self.loop.call_later(due, self._tick)

    def _wake(self, waiter: Waiter | None) -> None:
        wake = None if waiter is None else self._waiting.get(waiter)
        if wake is not None:
            wake()

    def _shut_down(self) -> None:
        if self._shut:
            return
        self._shut = True
        if self._timer is not None:
            self._timer.cancel()
        for wake in list(self._waiting.values()):
            wake()
        if not self.loop.is_closed():
            self.loop.remove_reader(self._dealer.message_fd)
            self.loop.remove_reader(self._dealer.loss_fd)
        self._dealer.close()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
