"""Several generations of the server as the choices of one answer."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from lowlat.ipc.client import AsyncGeneration, Chunk

__all__ = ["Choices", "Taken"]

Taken = tuple[int, Chunk]
"""The number of a choice, and a chunk of it."""


class Choices:
    """Chunks of some generations, by the place of each, as they come. One task at a time asks for the next."""

    def __init__(self, generations: Sequence[AsyncGeneration]) -> None:
        self._generations = list(generations)
        self._num_open = len(self._generations)
        self._arrived: deque[int] = deque()  # places where something came, in order
        self._waiting: asyncio.Future[Taken | None] | None = None
        self._use: Callable[[int, Chunk], bool] | None = None
        for place, generation in enumerate(self._generations):
            generation.watch(partial(self._note, place))

    async def next(self, use: Callable[[int, Chunk], bool] | None = None) -> Taken | None:
        """The number of a choice and its next chunk; None when all have ended. Raises what a generation raises.

        use   takes a chunk in the very call that receives it, and no task is switched to for it; the first chunk for
              which it returns False is returned here. What it raises is raised here.
        """
        self._use = use
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            self._hand_on()
            return await self._waiting
        finally:
            self._waiting = None

    async def close(self) -> None:
        """Cancel what has not ended."""
        for generation in self._generations:
            await generation.aclose()

    def _note(self, place: int) -> None:
        self._arrived.append(place)
        self._hand_on()

    def _hand_on(self) -> None:
        """Give chunks that have come to whoever waits for them."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        try:
            while (taken := self._take()) is not None:
                if self._use is None or not self._use(*taken):
                    waiting.set_result(taken)
                    return
            if not self._num_open:
                waiting.set_result(None)
        except Exception as error:  # of a generation or of `use`: it belongs to the task that waits
            waiting.set_exception(error)

    def _take(self) -> Taken | None:
        while self._arrived:
            place = self._arrived.popleft()
            chunk = self._generations[place].take()
            if chunk is not None:
                self._num_open -= chunk.finish_reason is not None
                return place, chunk
        return None
