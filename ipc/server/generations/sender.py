"""This module sends the outputs of requests as far as clients grant credit, and reports requests without credit."""

import time
from collections.abc import Callable

from lowlat.ipc.server.generations.statistics import Statistics
from lowlat.ipc.server.generations.streams import Stream
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.peers import Peers

__all__ = ["Sender"]


class Sender:
    """Sends the outputs of requests that credit allows.

    slow_consumer_s  seconds for which outputs may wait without credit
    finish           called with a request that has ended in the engine, after its last output was sent
    starve           called with a request whose outputs waited for too long
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
        """Send the outputs of a request that credit allows; if none is left and it has ended, finish it."""
        while (sendable := stream.next_message()) is not None:
            message, num_tokens = sendable
            if not self._peers.send(stream.peer, message):
                return  # the peer is gone, and its requests were cancelled
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
        """Count tokens that were sent, and their time."""
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
        """Stop a request's timer of starvation: it has credit, or no output waits."""
        self._timers.cancel(stream.starving)
        stream.starving = None
