"""Several generations of the server as the choices of one answer."""

import asyncio
from collections import deque
from collections.abc import Callable

from lowlat.errors import Busy
from lowlat.ipc.client import AsyncGeneration, Chunk

__all__ = ["MAX_AT_ONCE", "Choices"]

MAX_AT_ONCE = 16  # of the server's max_requests_per_client, which all callers share
RETRY_S = 0.1


class Choices:
    """Chunks of some generations, by the place of each, as they come; at most MAX_AT_ONCE are under way.

    start   sends the request of a choice, by its number. Raises RequestError
    Where the server is busy, the first ones are refused and later ones wait.
    """

    def __init__(self, start: Callable[[int], AsyncGeneration], num_choices: int = 1) -> None:
        self._start = start
        self._num_choices = num_choices
        self._open = {place: start(place) for place in range(min(num_choices, MAX_AT_ONCE))}
        self._next_place = len(self._open)
        self._reads: dict[asyncio.Task[Chunk], int] = {}
        self._ready: deque[tuple[int, Chunk]] = deque()
        self._num_open = num_choices

    async def next(self) -> tuple[int, Chunk] | None:
        """The number of a choice and its next chunk; None when all have ended. Raises what a generation raises."""
        if not self._num_open:
            return None
        if self._num_choices == 1:
            place, chunk = 0, await anext(self._open[0])
        else:
            place, chunk = await self._next_of_several()
        if chunk.finish_reason is not None:
            self._num_open -= 1
        return place, chunk

    async def close(self) -> None:
        """Cancel what has not ended."""
        for read in self._reads:
            read.cancel()
        self._reads.clear()
        for generation in self._open.values():
            await generation.aclose()

    async def _next_of_several(self) -> tuple[int, Chunk]:
        if not self._reads and not self._ready:
            for place in self._open:
                self._read(place)
        while not self._ready:
            done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                self._take(self._reads.pop(read), read)
        return self._ready.popleft()

    def _take(self, place: int, read: "asyncio.Task[Chunk]") -> None:
        try:
            chunk = read.result()
        except Busy as error:
            if place < MAX_AT_ONCE:
                raise
            self._reads[asyncio.ensure_future(self._again(place, error.retry_after_s or RETRY_S))] = place
            return
        self._ready.append((place, chunk))
        if chunk.finish_reason is None:
            self._read(place)
            return
        del self._open[place]
        if self._next_place < self._num_choices:
            place, self._next_place = self._next_place, self._next_place + 1
            self._open[place] = self._start(place)
            self._read(place)

    async def _again(self, place: int, after_s: float) -> Chunk:
        await asyncio.sleep(after_s)
        self._open[place] = self._start(place)
        return await anext(self._open[place])

    def _read(self, place: int) -> None:
        self._reads[asyncio.ensure_future(anext(self._open[place]))] = place
