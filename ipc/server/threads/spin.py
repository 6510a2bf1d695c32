"""The I/O thread polls by this module for a moment before it sleeps, as a thread that sleeps takes long to wake."""

import math
import os
import time

__all__ = ["Spin"]


class Spin:
    """Decides about polling after the last request has ended, for a client that asks one after another.

    The thread spins only where that would have paid the last time: a request came within `seconds` of the last one's
    end. In every turn it yields its core to other threads; a process that has one core never spins.

    seconds   how long; 0.0: never
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
        """Whether to poll without sleeping now, until `goes_on` says that it was enough."""
        return self._idle and self._pays

    def goes_on(self) -> bool:
        """Whether to go on polling without sleeping; asked in every turn."""
        if not self.due:
            return False
        os.sched_yield()
        self._pays = time.monotonic() - self._idle_since < self._seconds
        return self._pays
