"""This module times steps, and has a thread that detects a step that does not end."""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.statistics import Histogram

__all__ = ["StepClock", "Watchdog"]

MIN_SAMPLES = 16
COLD_FACTOR = 30.0  # of watchdog_min_s, while no time is known: a first step may still load code


class StepClock:
    """Times steps, by kind: the number of running requests, and whether one has just joined, so that prefill ran.

    The decode thread writes; other threads read single attributes.
    """

    def __init__(self, limits: Limits) -> None:
        self._factor = limits.watchdog_factor
        self._min_s = limits.watchdog_min_s
        self._kinds: dict[tuple[int, bool], Histogram] = {}
        self._kind = (0, False)
        self.all = Histogram()
        self.started = 0.0  # time when the running step began; 0.0 between steps
        self.completed = 0.0  # time when the last step ended, or the first began; 0.0 while nothing runs

    def begin(self) -> None:
        """Start the clock: the engine is about to take a command, or to step."""
        now = time.monotonic()
        if not self.completed:
            self.completed = now
        self.started = now

    def step(self, num_running: int, joining: bool) -> None:
        """Set the kind of the step that begins."""
        self._kind = (num_running, joining)

    def end(self, now: float) -> None:
        """Record a step that ended at `now` (time.monotonic())."""
        seconds = now - self.started
        self.started, self.completed = 0.0, now
        histogram = self._kinds.get(self._kind)
        if histogram is None:
            histogram = self._kinds[self._kind] = Histogram()
        histogram.record(seconds)
        self.all.record(seconds)

    def rest(self) -> None:
        """Stop the clock: no request is left."""
        self.started = self.completed = 0.0

    def age_s(self) -> float:
        """Return the seconds since the last completed step while requests run, else 0.0."""
        completed = self.completed
        return time.monotonic() - completed if completed else 0.0

    def allowed_s(self) -> float:
        """Return how long the running step may take: watchdog_factor times the p99 of its kind.

        A kind with few samples gets watchdog_factor times the longest step of all kinds. The first steps get
        COLD_FACTOR times watchdog_min_s.
        """
        histogram = self._kinds.get(self._kind)
        if histogram is None or histogram.count < MIN_SAMPLES:
            histogram = self.all
            if histogram.count < MIN_SAMPLES:
                return self._min_s * COLD_FACTOR
            return max(self._min_s, self._factor * histogram.max_s)
        return max(self._min_s, self._factor * histogram.percentile(0.99))


class Watchdog(threading.Thread):
    """Calls `on_stall`, then writes every thread's stack to stderr, when a step takes longer than the clock allows."""

    def __init__(self, clock: StepClock, limits: Limits, on_stall: Callable[[str], None]) -> None:
        super().__init__(name="lowlat-watchdog", daemon=True)
        self._clock = clock
        self._interval_s = min(0.5, limits.watchdog_min_s / 4)
        self._on_stall = on_stall
        self._stopped = threading.Event()
        self.dumped = threading.Event()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    def run(self) -> None:
        clock = self._clock
        while not self._stopped.wait(self._interval_s):
            started = clock.started
            if not started:
                continue
            age, allowed = time.monotonic() - started, clock.allowed_s()
            if age > allowed and clock.started == started:
                # Tell clients first: if nobody reads stderr, the dump waits for ever.
                self._on_stall(f"a step has run for {age:.1f} s and {allowed:.1f} s are allowed (watchdog_factor)")
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                self.dumped.set()
                return
