"""A watchdog tells a device's work that hangs from work that is slow, by how long such work took before.

It is not asked, so costs nothing, where work ends within a millisecond.
"""

import time

from lowlat.options.runtime import RuntimeConfig

__all__ = ["WATCHDOG", "Watchdog"]

WATCHDOG = (RuntimeConfig.watchdog_factor, RuntimeConfig.watchdog_min_s)  # by default
MIN_SAMPLES = 16
COLD_FACTOR = 30.0  # of min_s, while fewer were seen: the first ones load code
MEMORY = 0.99  # how much of the slowest wait is remembered at each further one


class Watchdog:
    """Judges waits for one kind of work, in seconds of the host's clock.

    factor  a wait of more than so many times the slowest recent one is a hang (`watchdog_factor`)
    min_s   a shorter wait is never one (`watchdog_min_s`)
    """

    def __init__(self, factor: float = WATCHDOG[0], min_s: float = WATCHDOG[1]) -> None:
        self._factor, self._min_s = factor, min_s
        self._usual_s = 0.0

    @staticmethod
    def begin() -> float:
        """The time at which a wait is looked at first."""
        return time.monotonic()

    def end(self, since: float) -> None:
        """A wait since `begin` came to its end."""
        self._usual_s = max(MEMORY * self._usual_s, time.monotonic() - since)

    def allowed_s(self, number: int) -> float:
        """How long the wait for the `number`th piece of work may last, counted from 1."""
        if number <= MIN_SAMPLES:
            return COLD_FACTOR * self._min_s
        return max(self._min_s, self._factor * self._usual_s)

    def complaint(self, since: float, number: int) -> str | None:
        """Why a wait since `begin` counts as a hang; None while it does not."""
        age, allowed = time.monotonic() - since, self.allowed_s(number)
        if age <= allowed:
            return None
        return f"has run for {age:.1f} s and {allowed:.1f} s are allowed (watchdog_factor, watchdog_min_s)"
