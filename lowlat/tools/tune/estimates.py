"""This module estimates the seconds that tuning a launch takes, to choose launches that fit into the budget."""

import os
from collections.abc import Sequence

from lowlat.tools.tune.shapes import Shape

__all__ = ["Estimates"]

PLAN_S = 0.15  # to time a plan in all of its cases, before one of its kind was timed
SLOW_PLAN_S = {"attention": 0.4}  # whose cases have a context each
KERNEL_S = 2.0  # to compile a kernel on one core, before one was compiled
KERNELS_A_CORE = 4  # that are compiled together


class Estimates:
    """Estimates by kind of launch: they begin with guesses, and learn from measured seconds a plan.

    num_candidates  the most plans of a launch that are timed
    num_cores       cores that compile; None: those of this process
    """

    def __init__(self, num_candidates: int, num_cores: int | None = None) -> None:
        self._most, self._num_cores = num_candidates, num_cores or len(os.sched_getaffinity(0))
        self._timed: dict[str, tuple[int, float]] = {}  # by kind: plans, and the seconds that they took
        self._compiled = (0, 0.0)

    def timing_s(self, shape: Shape) -> float:
        """Return the seconds to time the plans of a launch."""
        plans, seconds = self._timed.get(shape.kind, (0, 0.0))
        return self.num_plans(shape) * (seconds / plans if plans else SLOW_PLAN_S.get(shape.kind, PLAN_S))

    def compiling_s(self, num_kernels: int) -> float:
        """Return the seconds to compile kernels, of which a cache may have some."""
        kernels, seconds = self._compiled
        return num_kernels * (seconds / kernels if kernels else KERNEL_S / self._num_cores)

    def seconds(self, shape: Shape) -> float:
        """Return the seconds to compile and time a launch."""
        return self.timing_s(shape) + self.compiling_s(self.num_plans(shape))

    def num_plans(self, shape: Shape) -> int:
        """Return the number of plans of a launch that are timed."""
        return min(self._most, len(shape.candidates))

    def fitting(self, shapes: Sequence[Shape], left_s: float) -> list[Shape]:
        """Return the first launches that fit into `left_s`, at most as many as compile together; skip longer ones."""
        found: list[Shape] = []
        num_kernels = 0
        for shape in shapes:
            if num_kernels >= KERNELS_A_CORE * self._num_cores:
                break
            if (needed := self.seconds(shape)) <= left_s:
                found.append(shape)
                left_s -= needed
                num_kernels += self.num_plans(shape)
        return found

    def saw_timed(self, shape: Shape, num_plans: int, seconds: float) -> None:
        """Learn from a launch that was timed."""
        plans, before = self._timed.get(shape.kind, (0, 0.0))
        self._timed[shape.kind] = plans + num_plans, before + seconds

    def saw_compiled(self, num_kernels: int, seconds: float) -> None:
        """Learn from kernels that were asked for, whether the cache lacked them or not."""
        kernels, before = self._compiled
        self._compiled = kernels + num_kernels, before + seconds
