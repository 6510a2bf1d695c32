"""This module lets the I/O thread poll for a moment before it sleeps, as a sleeping thread takes long to wake."""

import math
import os
import time

__all__ = ["Spin"]


class Spin:
    """Decides whether to poll after the last request has ended, for a client that sends one request after another.

    The thread spins only if that would have paid the last time, when a request came within `seconds` of the end of the
    one before. In every turn it yields its core to other threads. A process with one core never spins.

    seconds   the longest time to spin; 0.0: never
    """

    def __init__(self, seconds: float) -> None:
        self._pays = False
        self._seconds = seconds if len(os.sched_getaffinity(0)) > 1 else 0.0
        self._idle = True
        self._idle_since = -math.inf

    def note(self, idle: bool) -> None:
        """Note whether no request is under way; called after anything that may have changed it."""
        if idle is not self._idle:
            self._idle = idle
            now = time.monotonic()
            if idle:
                self._idle_since = now
            else:
                self._pays = now - self._idle_since < self._seconds

    @property
    def due(self) -> bool:
        """Whether to poll without sleeping now, until `goes_on` returns False."""
        return self._idle and self._pays

    def goes_on(self) -> bool:
        """Return whether to poll again without sleeping; call this in every turn."""
        if not self.due:
            return False
        os.sched_yield()
        self._pays = time.monotonic() - self._idle_since < self._seconds
        return self._pays
