"""The sweep within a budget: plans are compiled, the likeliest of every launch first, and then timed."""

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Protocol

from lowlat.errors import DeviceError
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.kernels.tuning.table import Plan
from lowlat.tools.tune.shapes import Shape

__all__ = ["Bench", "Swept", "compile_plans", "time_plans"]

logger = logging.getLogger("lowlat")
KERNELS_A_CORE = 4  # that are compiled before the clock is looked at
NOISE = 0.03  # of a time: a plan that is faster by less is not faster in a step, whose launches have other neighbours

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


def compile_plans(
    shapes: Sequence[Shape],
    calls: Mapping[tuple[str, str], Variants],
    bench: Bench,
    *,
    until: float,
    progress: Progress = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[tuple[str, str], int]:
    """Compile plans, the first of all launches before the second of any; return how many of each launch are ready.

    calls      of each launch under each of its plans, the derived one first, see `calls_by_plan`
    until      a time of the clock, after which nothing more is begun
    progress   called with kernels compiled and kernels in all
    """
    ready = {shape.place: 0 for shape in shapes}
    total = len({call.kernel.name for variants in calls.values() for each in variants for call in each})
    known: set[str] = set()
    waiting: dict[str, KernelCall] = {}
    places: list[tuple[str, str]] = []
    most = KERNELS_A_CORE * len(os.sched_getaffinity(0))

    def flush() -> None:
        bench.compile(list(waiting.values()))
        known.update(waiting)
        for place in places:
            ready[place] += 1
        waiting.clear()
        places.clear()
        progress(len(known), total)

    for place, variant in _by_candidate(shapes, calls):
        waiting.update({call.kernel.name: call for call in variant if call.kernel.name not in known})
        places.append(place)
        if len(waiting) >= most:
            flush()
            if clock() > until:
                return ready
    flush()
    return ready


def _by_candidate(
    shapes: Sequence[Shape], calls: Mapping[tuple[str, str], Variants]
) -> Iterator[tuple[tuple[str, str], tuple[KernelCall, ...]]]:
    for number in range(max((len(variants) for variants in calls.values()), default=0)):
        for shape in shapes:
            if number < len(calls[shape.place]):
                yield shape.place, calls[shape.place][number]


def time_plans(
    shapes: Sequence[Shape],
    calls: Mapping[tuple[str, str], Variants],
    ready: Mapping[tuple[str, str], int],
    bench: Bench,
    *,
    until: float,
    progress: Progress = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Swept]:
    """Time the plans that are compiled; launches that the clock did not allow, or none of whose plans can be launched,
    are left out. Where the device fails, that is logged, and what was timed before is returned.

    ready     plans of each launch, see `compile_plans`
    progress  called with launches timed and launches in all
    """
    found = []
    for done, shape in enumerate(shapes):
        if clock() > until:
            break
        variants = calls[shape.place][: ready[shape.place]]
        try:
            by_case = bench.times_us(shape, variants) if variants else {}
        except DeviceError as error:
            logger.error("%s %s: %s; %d launches are left out", shape.kind, shape.key, error, len(shapes) - done)
            break
        each_plan = list(zip(*by_case.values(), strict=True))
        times = tuple(each[0] if len(each) == 1 else geometric_mean(each) for each in each_plan)
        if times and math.isfinite(min(times)):
            found.append(Swept(shape, times, by_case if len(by_case) > 1 else {}))
        progress(done + 1, len(shapes))
    return found
