"""This module times steps, and has the thread that notices a step that never ends."""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

from lowlat.ipc.limits import Limits
from lowlat.ipc.server.generations.statistics import Histogram

__all__ = ["StepClock", "Watchdog"]

MIN_SAMPLES = 16
COLD_FACTOR = 30.0  # of watchdog_min_s, before anything is known: a first step may still load code


class StepClock:
    """Times of steps, by kind: how many requests ran, and whether one had just joined, so that a prompt was read.

    The decode thread writes; other threads read single attributes.
    """

    def __init__(self, limits: Limits) -> None:
        self._factor = limits.watchdog_factor
        self._min_s = limits.watchdog_min_s
        self._kinds: dict[tuple[int, bool], Histogram] = {}
        self._kind = (0, False)
        self.all = Histogram()
        self.started = 0.0  # of the step that runs; 0.0 between steps
        self.completed = 0.0  # when the last step ended, or the first began; 0.0 while nothing runs

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
        """The step ended at this time.monotonic()."""
        seconds = now - self.started
        self.started, self.completed = 0.0, now
        histogram = self._kinds.get(self._kind)
        if histogram is None:
            histogram = self._kinds[self._kind] = Histogram()
        histogram.record(seconds)
        self.all.record(seconds)

    def rest(self) -> None:
        """Stop the clock: nothing is left to step for."""
        self.started = self.completed = 0.0

    def age_s(self) -> float:
        """Seconds since the last completed step while requests run, else 0.0."""
        completed = self.completed
        return time.monotonic() - completed if completed else 0.0

    def allowed_s(self) -> float:
        """How long the present step may take: so many times the p99 of its kind.

        A kind not seen often enough is judged by the slowest kind that was, and the first steps of all generously.
        """
        histogram = self._kinds.get(self._kind)
        if histogram is None or histogram.count < MIN_SAMPLES:
            histogram = self.all
            if histogram.count < MIN_SAMPLES:
                return self._min_s * COLD_FACTOR
            return max(self._min_s, self._factor * histogram.max_s)
        return max(self._min_s, self._factor * histogram.percentile(0.99))


class Watchdog(threading.Thread):
    """Calls `on_stall`, then writes every thread's stack to stderr, when a step takes far longer than its like."""

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
                # Clients first: nobody may read stderr, and then the dump waits forever.
                self._on_stall(f"a step has run for {age:.1f} s and {allowed:.1f} s are allowed (watchdog_factor)")
                faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
                self.dumped.set()
                return
