"""This module delays the small messages of a connection, as a server drops a client that sends too many a second."""

__all__ = ["Pace"]

USUAL_PER_S = 10_000  # assumed for a server that does not say its limit
PART = 0.5  # share of the server's limit for these messages; the rest is for others
BURST_S = 0.25  # after silence, messages of this time at this pace may be sent at once


class Pace:
    """Says how long a message must wait, so that no second has more of them than the server allows.

    max_per_s  the server's limit; None: it does not say
    """

    def __init__(self, max_per_s: int | None = None) -> None:
        self._interval_s = 1.0 / (PART * (USUAL_PER_S if max_per_s is None else max_per_s))
        self._next_at = 0.0

    def delay(self, now: float) -> float:
        """Return the seconds until the next message may be sent, and count it."""
        self._next_at = max(self._next_at, now - BURST_S) + self._interval_s
        return max(0.0, self._next_at - now)
