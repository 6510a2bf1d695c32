"""This module spaces the small messages of a connection, as a server drops a client that sends more than it takes."""

__all__ = ["Pace"]

USUAL_PER_S = 10_000  # of a server that does not say
PART = 0.5  # of what a server takes, that is sent; the rest is for other messages
BURST_S = 0.25  # of messages at this pace that may come at once, after silence


class Pace:
    """Says how long a message waits, so that no second has more of them than a server takes.

    max_per_s  messages that the server takes; None: it does not say
    """

    def __init__(self, max_per_s: int | None = None) -> None:
        self._interval_s = 1.0 / (PART * (USUAL_PER_S if max_per_s is None else max_per_s))
        self._next_at = 0.0

    def delay(self, now: float) -> float:
        """Seconds until the next message may go, which is counted."""
        self._next_at = max(self._next_at, now - BURST_S) + self._interval_s
        return max(0.0, self._next_at - now)
