"""This module sends the outputs of requests as far as their clients grant credit, and notices those that starve."""

import time
from collections.abc import Callable

from lowlat.ipc.server.generations.statistics import Statistics
from lowlat.ipc.server.generations.streams import Stream
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.peers import Peers

__all__ = ["Sender"]


class Sender:
    """Sends what may be sent of requests.

    slow_consumer_s  seconds without credit after which a request starves
    finish           called with a request that has ended in the engine, and of which all is sent
    starve           called with a request that has starved
    """

    def __init__(
        self,
        peers: Peers,
        statistics: Statistics,
        timers: Timers,
        slow_consumer_s: float,
        *,
        finish: Callable[[Stream], None],
        starve: Callable[[Stream], None],
    ) -> None:
        self._peers, self._statistics, self._timers = peers, statistics, timers
        self._slow_consumer_s, self._finish, self._starve = slow_consumer_s, finish, starve

    def send(self, stream: Stream) -> None:
        """Send what may be sent of a request; then finish it, if that was all."""
        while (sendable := stream.next_message()) is not None:
            message, num_tokens = sendable
            if not self._peers.send(stream.peer, message):
                return  # gone: its requests were given up
            if num_tokens and not stream.converts:
                self._record(stream, num_tokens)
            if stream.peer.unsent:
                return
        if stream.waiting:
            if stream.starving is None:
                stream.starving = self._timers.after(self._slow_consumer_s, self._starve, stream)
            return
        self.feed(stream)
        if stream.final is not None:
            self._finish(stream)

    def _record(self, stream: Stream, num_tokens: int) -> None:
        """Count tokens that were sent, and the time that they took."""
        statistics, now = self._statistics, time.monotonic()
        if not stream.first:
            stream.first = now
            statistics.queued.record(stream.handed - stream.arrived)
            statistics.time_to_first_token.record(now - stream.arrived)
        else:
            statistics.inter_token.record((now - stream.last) / num_tokens, num_tokens)
        stream.last = now
        statistics.tokens(num_tokens, now)

    def feed(self, stream: Stream) -> None:
        """Let a request not starve: it has credit, or nothing waits for any."""
        self._timers.cancel(stream.starving)
        stream.starving = None
