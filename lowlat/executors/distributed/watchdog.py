"""A watchdog distinguishes device work that hangs from slow work, by how long such work took before.

Callers ask it only once a wait has lasted a millisecond, so it costs nothing for shorter ones.
"""

import time

from lowlat.options.runtime import RuntimeConfig

__all__ = ["WATCHDOG", "Watchdog"]

WATCHDOG = (RuntimeConfig.watchdog_factor, RuntimeConfig.watchdog_min_s)  # by default
MIN_SAMPLES = 16
COLD_FACTOR = 30.0  # times min_s are allowed before MIN_SAMPLES waits: the first launches load code
MEMORY = 0.99  # the remembered slowest wait shrinks by this factor at each further wait


class Watchdog:
    """Judges waits for one kind of work, in seconds of the host's clock.

    factor  a wait counts as a hang when it exceeds `factor` times the slowest recent one (`watchdog_factor`)
    min_s   a shorter wait never counts as a hang (`watchdog_min_s`)
    """

    def __init__(self, factor: float = WATCHDOG[0], min_s: float = WATCHDOG[1]) -> None:
        self._factor, self._min_s = factor, min_s
        self._usual_s = 0.0

    @staticmethod
    def begin() -> float:
        """The start time of a wait, for `end` and `complaint`."""
        return time.monotonic()

    def end(self, since: float) -> None:
        """Record the duration of a wait that began at `since` and has ended."""
        self._usual_s = max(MEMORY * self._usual_s, time.monotonic() - since)

    def allowed_s(self, number: int) -> float:
        """How long the wait for the `number`th piece of work may last, counted from 1."""
        if number <= MIN_SAMPLES:
            return COLD_FACTOR * self._min_s
        return max(self._min_s, self._factor * self._usual_s)

    def complaint(self, since: float, number: int) -> str | None:
        """Say why a wait that began at `since` counts as a hang; None while it does not."""
        age, allowed = time.monotonic() - since, self.allowed_s(number)
        if age <= allowed:
            return None
        return f"has run for {age:.1f} s and {allowed:.1f} s are allowed (watchdog_factor, watchdog_min_s)"
