"""Several generations of the server as the choices of one answer."""

import asyncio
from collections import deque
from collections.abc import Sequence

from lowlat.ipc.client import AsyncGeneration, Chunk

__all__ = ["Choices"]


class Choices:
    """Chunks of some generations, by the place of each, as they come."""

    def __init__(self, generations: Sequence[AsyncGeneration]) -> None:
        self._generations = list(generations)
        self._reads: dict[asyncio.Task[Chunk], int] = {}
        self._ready: deque[tuple[int, Chunk]] = deque()
        self._num_open = len(self._generations)

    async def next(self) -> tuple[int, Chunk] | None:
        """The number of a choice and its next chunk; None when all have ended. Raises what a generation raises."""
        if not self._num_open:
            return None
        if len(self._generations) == 1:
            place, chunk = 0, await anext(self._generations[0])
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
        for generation in self._generations:
            await generation.aclose()

    async def _next_of_several(self) -> tuple[int, Chunk]:
        if not self._reads and not self._ready:
            for place in range(len(self._generations)):
                self._read(place)
        while not self._ready:
            done, _ = await asyncio.wait(self._reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                place = self._reads.pop(read)
                chunk = read.result()
                self._ready.append((place, chunk))
                if chunk.finish_reason is None:
                    self._read(place)
        return self._ready.popleft()

    def _read(self, place: int) -> None:
        self._reads[asyncio.ensure_future(anext(self._generations[place]))] = place
