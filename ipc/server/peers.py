"""This module sends messages to the peers of a server, and keeps those that a full queue delays."""

import time
from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct

from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.timers import Timers
from lowlat.ipc.server.peer import Peer
from lowlat.ipc.server.router import Router
from lowlat.ipc.wire import Bye, encode

__all__ = ["Listener", "Peers"]

END_AFTER_S = 0.2  # time for BYE to leave
MAX_UNSENT_CONTROL = 256


class Listener(Protocol):
    """An object that is told when peers end, and when their queues have space again."""

    def peer_gone(self, peer: Peer) -> None:
        """Called once for a peer that is gone or dropped, when nothing can be sent to it any more."""

    def peer_unblocked(self, peer: Peer) -> None:
        """Called when the messages that waited for a peer's queue have been sent."""


class Peers:
    """Sends to the peers of a router; iterating goes over those that are not gone."""

    def __init__(self, limits: Limits, timers: Timers, router: Router) -> None:
        self._limits = limits
        self._timers = timers
        self._router = router
        self._listener: Listener

    def tell(self, listener: Listener) -> None:
        """Set the listener; call this before the first peer comes."""
        self._listener = listener

    def __len__(self) -> int:
        return len(self._router.peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._router.peers.values()))

    @property
    def num_greeted(self) -> int:
        """The number of peers that have said HELLO and are not dropped."""
        return sum(peer.greeted and not peer.dropped for peer in self._router.peers.values())

    def num_greeted_of(self, account: str) -> int:
        """Return the number of greeted peers of a user's account."""
        return sum(
            peer.greeted and not peer.dropped and peer.user.account == account for peer in self._router.peers.values()
        )

    def send(self, peer: Peer, message: Struct) -> bool:
        """Send a message, or keep it while the peer's queue is full; False if the peer is gone."""
        return self.send_frame(peer, encode(message))

    def send_frame(self, peer: Peer, frame: bytes) -> bool:
        """Send an encoded message, as `send` does."""
        if peer.gone or peer.dropped:
            return False
        if not peer.unsent:
            if self._router.send(peer, frame):
                return True
            peer.blocked_since = time.monotonic()
            if not peer.watched:
                peer.watched = True
                self._timers.after(self._limits.slow_consumer_s, self._watch, peer)
        peer.unsent.append(frame)
        if len(peer.unsent) > MAX_UNSENT_CONTROL + self._limits.max_requests_per_client:
            self.drop(peer, "slow_consumer")  # it keeps asking, and reads no answer
            return False
        return True

    def drop(self, peer: Peer, reason: str, message: str = "") -> None:
        """Say BYE to a peer, ignore its messages, and end its connection."""
        if peer.gone or peer.dropped:
            return
        if not peer.unsent:  # otherwise its queue has no space for BYE
            self.send(peer, Bye(reason, message))
        peer.dropped = True
        peer.unsent.clear()
        self._timers.after(END_AFTER_S, self._router.shut, peer)
        self._listener.peer_gone(peer)

    def ended(self, peer: Peer) -> None:
        """Handle the end of a peer's connection."""
        peer.unsent.clear()
        if not peer.dropped:
            self._listener.peer_gone(peer)

    def unblocked(self, peer: Peer) -> None:
        """Send the messages that waited for a peer, as its queue has space again."""
        if peer.dropped:
            return
        while peer.unsent:
            if not self._router.send(peer, peer.unsent[0]):
                return
            peer.unsent.popleft()
            peer.blocked_since = time.monotonic()
        self._listener.peer_unblocked(peer)

    def _watch(self, peer: Peer) -> None:
        """Drop a peer whose queue has been full for too long."""
        peer.watched = False
        if peer.gone or peer.dropped or not peer.unsent:
            return
        left = peer.blocked_since + self._limits.slow_consumer_s - time.monotonic()
        if left <= 0.0:
            self.drop(peer, "slow_consumer")
            return
        peer.watched = True
        self._timers.after(left, self._watch, peer)
