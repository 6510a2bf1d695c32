"""This module computes the time of each call, stage and step from the starts and ends of recorded kernels.

Kernels overlap: with programmatic dependent launch a kernel starts early and waits for the one before, so durations do
not add up. A call's time is how far it moves the latest end so far; thus the times of calls add up to the step. It
includes the time before the call in which no kernel ran; the idle share tells how much that is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from lowlat.errors import LowlatError
from lowlat.graphs.program import Stage

__all__ = ["AllReduce", "CallSite", "CallTime", "Idle", "KernelEvent", "StepTimes", "attribute", "idle_time"]

SHOWN = 100  # characters of a kernel's mangled name in a message


@dataclass(frozen=True)
class KernelEvent:
    """One kernel in a profiler's record: its name there, and its start and end on the device's clock, us."""

    name: str
    start_us: float
    end_us: float


class AllReduce(StrEnum):
    """The way in which a launch exchanges with other ranks."""

    NONE = "none"
    ALONE = "alone"  # it does little else: it gathers or adds rows, and norms them
    FUSED = "fused"  # it multiplies, too, and exchanges what it has finished meanwhile


@dataclass(frozen=True)
class CallSite:
    """One launch of a step, in order.

    kernel       the kernel's name, its constants included
    source       the Python function it was written as: part of the name that profilers show
    moved_bytes  that it must read: weights, keys and values; 0 where that is not what bounds it
    also         other stages whose operations the launch's group covers
    all_reduce   with other ranks
    """

    stage: Stage
    kernel: str
    source: str = ""
    moved_bytes: float = 0.0
    also: tuple[Stage, ...] = ()
    all_reduce: AllReduce = AllReduce.NONE


@dataclass(frozen=True)
class CallTime:
    """One launch's part of a step: from the latest end before it to the latest end with it, us."""

    site: CallSite
    event: KernelEvent
    begin_us: float
    end_us: float

    @property
    def time_us(self) -> float:
        """How far it moved the latest end; 0 if it ended before another that started earlier."""
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class StepTimes:
    """One step: from its first kernel's start, or the end of the step before it where that is later."""

    calls: tuple[CallTime, ...]

    @property
    def begin_us(self) -> float:
        """Where its time begins."""
        return self.calls[0].begin_us

    @property
    def end_us(self) -> float:
        """The latest end of its kernels."""
        return self.calls[-1].end_us

    @property
    def time_us(self) -> float:
        """The sum of its calls' times."""
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class Idle:
    """Time in which no kernel runs, us; one that has started and waits for another counts as running.

    span_us     from the first kernel's start to the last one's end
    idle_us     of it, without any kernel
    between_us  of that, from one step's last end to the next one's first start: the host's turn
    """

    span_us: float
    idle_us: float
    between_us: float

    @property
    def share(self) -> float:
        """The idle part of the span."""
        return self.idle_us / self.span_us if self.span_us else 0.0


def attribute(events: Sequence[KernelEvent], sites: Sequence[CallSite], *, skip: int = 0) -> list[StepTimes]:
    """Assign each event to its call, step by step, without the first `skip` steps.

    events  whole steps, in any order: by their starts, the i-th of a step is the i-th call's
    Raises LowlatError if they are not whole steps, or a kernel is not the one of its call.
    """
    count = len(sites)
    if not count or not events or len(events) % count:
        raise LowlatError(
            f"the profiler recorded {len(events)} kernels, which are not whole steps of {count} launches: "
            "some were lost, or not all are the step's"
        )
    ordered = sorted(events, key=lambda event: (event.start_us, event.end_us))
    steps, front = [], float("-inf")
    for start in range(0, len(ordered), count):
        part = ordered[start : start + count]
        front = max(front, part[0].start_us)
        calls = []
        for place, (site, event) in enumerate(zip(sites, part, strict=True)):
            _check_place(place, site, event)
            end = max(front, event.end_us)
            calls.append(CallTime(site, event, front, end))
            front = end
        steps.append(StepTimes(tuple(calls)))
    if len(steps) <= skip:
        raise LowlatError(f"the profiler recorded {len(steps)} steps, of which the first {skip} do not count")
    return steps[skip:]


def _check_place(place: int, site: CallSite, event: KernelEvent) -> None:
    if site.source not in event.name:
        raise LowlatError(
            f"the profiler's kernel number {place} of a step is {event.name:.{SHOWN}}, where {site.kernel} is launched"
        )


def idle_time(steps: Sequence[StepTimes]) -> Idle:
    """Return how long no kernel ran, over all steps."""
    events = sorted((call.event for step in steps for call in step.calls), key=lambda event: event.start_us)
    idle, first, front = 0.0, events[0].start_us, events[0].start_us
    for event in events:
        idle += max(0.0, event.start_us - front)
        front = max(front, event.end_us)
    return Idle(front - first, idle, sum(_gaps(steps)))


def _gaps(steps: Sequence[StepTimes]) -> Iterator[float]:
    for before, after in pairwise(steps):
        yield max(0.0, after.begin_us - before.end_us)
