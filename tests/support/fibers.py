"""The threads of CUDA blocks as fibers of one thread: each runs until it waits for others, and nothing is timed.

The next fiber, of those that may go on, is drawn from a seed: a read that comes too early is found, and found again in
the next run.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

OTHERS = "others"
PATIENCE = 100  # times that each may let others go on while nobody does anything else
Combine = Callable[[list[Any]], Sequence[Any]]


class Fiber(greenlet):
    """A thread of a block; what it does is given when it is made, and callers may hang their own state on it.

    number   its place among all
    """

    def __init__(self, number: int, body: Callable[[], None]) -> None:
        super().__init__(body)
        self.number = number
        self.value: Any = None
        self.place: Hashable = "its first turn"


this_fiber: Callable[[], Any] = getcurrent  # the one that runs, as whatever it was made


class Fibers:
    """Runs fibers to their ends; they meet and sleep by places, which are whatever can be a key."""

    def __init__(self, fibers: Sequence[Fiber], seed: int = 0) -> None:
        self._fibers = fibers
        self._draw = random.Random(seed).random
        self._ready: list[Fiber] = []
        self._sleeping: defaultdict[Hashable, list[Fiber]] = defaultdict(list)
        self._all: list[Fiber] = []
        self._num_left = len(fibers)
        self._hub = getcurrent()

    def run(self) -> None:
        """Run all to their ends. Raises what a fiber raises first, and AssertionError when all wait for each other."""
        ready = self._ready
        ready.extend(self._fibers)
        num_in_vain = 0
        try:
            while ready:
                place = int(self._draw() * len(ready))
                fiber, ready[place] = ready[place], ready[-1]
                ready.pop()
                fiber.switch()
                num_in_vain = num_in_vain + 1 if fiber.place is OTHERS and not fiber.dead else 0
                assert num_in_vain <= PATIENCE * self._num_left, f"{len(ready)} threads ask for what never comes"
                if fiber.dead:
                    self._num_left -= 1
                    if self._all and len(self._all) == self._num_left:
                        self._wake_all()
            waiting = Counter(str(fiber.place) for fiber in self._fibers if not fiber.dead)
            assert not waiting, f"threads wait for what never comes: {dict(waiting)}"
        finally:
            for fiber in self._fibers:
                if bool(fiber):  # under way
                    fiber.throw(GreenletExit)

    def meet(self, place: Hashable, count: int, value: Any = None, combine: Combine | None = None) -> Any:
        """Wait until `count` fibers have come to a place; what `combine` makes of their values, each its own.

        combine   from values to results, both in the order of the fibers' numbers; called once, by the last to come
        """
        fiber = this_fiber()
        fiber.value = value
        members = self._sleeping[place]
        members.append(fiber)
        if len(members) < count:
            self._leave(fiber, place)
            return fiber.value
        del self._sleeping[place]
        if combine is not None:
            ordered = sorted(members, key=_number)
            for member, result in zip(ordered, combine([member.value for member in ordered]), strict=True):
                member.value = result
        members.pop()
        self._ready.extend(members)
        return fiber.value

    def all_reduce(self, place: Hashable, count: int, value: Any) -> list[Any]:
        """The values of all `count` fibers that come to a place, in the order of their numbers."""
        values: list[Any] = self.meet(place, count, value, lambda values: [values] * count)
        return values

    def meet_all(self) -> None:
        """Wait until every fiber has come that has not ended."""
        if len(self._all) + 1 < self._num_left:
            fiber = this_fiber()
            self._all.append(fiber)
            self._leave(fiber, "all")
        else:
            self._wake_all()

    def pause(self) -> None:
        """Let others go on, of whom one may be waited for."""
        fiber = this_fiber()
        self._ready.append(fiber)
        self._leave(fiber, OTHERS)

    def sleep(self, place: Hashable) -> None:
        """Wait for `wake` of the place."""
        fiber = this_fiber()
        self._sleeping[place].append(fiber)
        self._leave(fiber, place)

    def wake(self, place: Hashable) -> None:
        """Let those that sleep at the place go on."""
        self._ready.extend(self._sleeping.pop(place, ()))

    def _leave(self, fiber: Fiber, place: Hashable) -> None:
        fiber.place = place
        self._hub.switch()

    def _wake_all(self) -> None:
        self._ready.extend(self._all)
        self._all.clear()


def _number(fiber: Fiber) -> int:
    return fiber.number
