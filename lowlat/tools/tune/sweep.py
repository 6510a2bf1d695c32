"""This module sweeps within a budget: it compiles and times plans of a few launches at a time."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Protocol

from lowlat.errors import DeviceError
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.kernels.tuning.table import Plan
from lowlat.tools.tune.estimates import Estimates
from lowlat.tools.tune.shapes import Shape

__all__ = ["Bench", "Swept", "sweep"]

logger = logging.getLogger("lowlat")
NOISE = 0.03  # of a time: a plan that is faster by less is not faster in a step, whose launches have other neighbours

Place = tuple[str, str]  # kind and key
Progress = Callable[[int, int], None]
Variants = Sequence[tuple[KernelCall, ...]]


class Bench(Protocol):
    """A device that compiles and times launches."""

    def compile(self, calls: Sequence[KernelCall]) -> None:
        """Compile what is not compiled yet."""
        ...

    def times_us(self, shape: Shape, plans: Variants) -> Mapping[str, Sequence[float]]:
        """Microseconds of a launch under each plan, by case; infinite for one that fails. Raises DeviceError."""
        ...


@dataclass(frozen=True)
class Swept:
    """A launch with the times of its plans, us: the derived one's first.

    times_us  geometric means over the cases
    by_case   times in each case, where there are several
    """

    shape: Shape
    times_us: tuple[float, ...]
    by_case: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def default_us(self) -> float:
        """Time of the derived plan."""
        return self.times_us[0]

    @property
    def best(self) -> int:
        """The number of the fastest plan; the derived one's where none is faster by more than noise."""
        fastest = min(range(len(self.times_us)), key=self.times_us.__getitem__)
        return fastest if self.times_us[fastest] < (1 - NOISE) * self.default_us else 0

    @property
    def best_us(self) -> float:
        """Its time."""
        return self.times_us[self.best]

    @property
    def plan(self) -> Plan:
        """The fastest plan."""
        return self.shape.candidates[self.best]

    @property
    def gain(self) -> float:
        """The share of the derived plan's time that the fastest one saves."""
        return 1 - self.best_us / self.default_us if math.isfinite(self.default_us) else 0.0


def sweep(
    shapes: Sequence[Shape],
    calls_of: Callable[[Sequence[Shape]], Mapping[Place, Variants]],
    bench: Bench,
    estimates: Estimates,
    *,
    until: float,
    keep: Callable[[Swept], None] = lambda swept: None,
    progress: Progress = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Swept]:
    """Compile and time all plans of some launches after those of others, in order, while the clock allows it.

    calls_of   launches -> the calls of each under each of its plans, the derived one first, see `calls_by_plan`
    until      a time of the clock: what is thought to end later is not begun
    keep       called with each launch that was timed, right after it
    progress   called with launches done and launches in all
    Launches none of whose plans can be launched are left out. Where the device fails, that is logged, and what was
    timed before is returned.
    """
    found: list[Swept] = []
    known: set[str] = set()
    waiting, done = list(shapes), 0
    while together := estimates.fitting(waiting, until - clock()):
        calls = calls_of(together)
        kernels = {call.kernel.name: call for each in calls.values() for variant in each for call in variant}
        start = clock()
        bench.compile([call for name, call in kernels.items() if name not in known])
        estimates.saw_compiled(len(kernels.keys() - known), clock() - start)
        known |= kernels.keys()
        for shape in together:
            start = clock()
            if start > until:
                return found
            try:
                swept = _time(shape, calls[shape.place], bench)
            except DeviceError as error:
                logger.error("%s %s: %s; %d launches are left out", shape.kind, shape.key, error, len(shapes) - done)
                return found
            estimates.saw_timed(shape, len(calls[shape.place]), clock() - start)
            if swept is not None:
                found.append(swept)
                keep(swept)
            waiting.remove(shape)
            done += 1
            progress(done, len(shapes))
    return found


def _time(shape: Shape, variants: Variants, bench: Bench) -> Swept | None:
    """A launch with its times; None where none of its plans can be launched. Raises DeviceError."""
    by_case = bench.times_us(shape, variants)
    each_plan = list(zip(*by_case.values(), strict=True))
    times = tuple(each[0] if len(each) == 1 else geometric_mean(each) for each in each_plan)
    if not times or not math.isfinite(min(times)):
        return None
    return Swept(shape, times, by_case if len(by_case) > 1 else {})
