"""What the threads of a kernel's run share while it is walked: its launch, its blocks, barriers of arrivals."""

from typing import Any

import numpy as np

__all__ = ["Arrivals", "Home", "Launch"]


class Arrivals:
    """A barrier of arrivals in shared memory: phases end when all have arrived."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0

    def arrive(self) -> bool:
        """One more; whether a phase ends with it."""
        self.arrived += 1
        if self.arrived < self.count:
            return False
        self.arrived, self.phase = 0, self.phase + 1
        return True


class Launch:
    """A kernel's run: its place among those that are run together, and how far it is.

    early     blocks that let the next kernel start, or have ended
    num_left  threads that have not ended
    """

    def __init__(self, number: int, call: Any, previous: "Launch | None") -> None:
        self.number, self.previous = number, previous
        self.grid: int = call.grid[0]
        self.threads: int = call.kernel.threads
        self.dependent: bool = call.dependent
        self.early: set[int] = set()
        self.num_left = self.grid * self.threads

    @property
    def lets_next_start(self) -> bool:
        return len(self.early) == self.grid

    @property
    def ended(self) -> bool:
        return not self.num_left


class Home:
    """What the threads of a block share: their launch, the place in it, shared memory, barriers and static arrays."""

    def __init__(self, launch: Launch, block: int, shared_bytes: int) -> None:
        self.launch, self.block = launch, block
        self.key = launch.number, block
        self.num_left = launch.threads
        self.shared = np.full(shared_bytes, 255, np.uint8)
        self.arrivals: dict[int, Arrivals] = {}
        self.arrays: list[list[Any]] = []
