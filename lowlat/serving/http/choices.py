"""This module merges several generations of the server into the choices of one answer."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from lowlat.errors import Busy, LowlatError
from lowlat.ipc.client import AsyncGeneration, Chunk

__all__ = ["MAX_AT_ONCE", "Choices", "Taken"]

MAX_AT_ONCE = 16  # of the server's max_requests_per_client, which all callers share
RETRY_S = 0.1

Taken = tuple[int, Chunk]
"""The number of a choice, and a chunk of it."""


class Choices:
    """Gives the chunks of several generations as they come, with the choice's number. One task at a time may read.

    start   sends the request of a choice, by its number. Raises RequestError
    told    converts an error of a choice, by its number, to the one that is raised
    At most MAX_AT_ONCE are under way. If the server is busy, the first ones are refused and later ones wait.
    """

    def __init__(
        self,
        start: Callable[[int], AsyncGeneration],
        num_choices: int = 1,
        told: Callable[[int, LowlatError], Exception] = lambda place, error: error,
    ) -> None:
        self._start = start
        self._told = told
        self._num_choices = num_choices
        self._num_open = num_choices
        self._next_place = min(num_choices, MAX_AT_ONCE)
        self._generations: dict[int, AsyncGeneration] = {}  # running generations, by number of the choice
        self._to_open: dict[int, asyncio.Handle] = {}
        self._arrived: deque[int] = deque()  # choices that have received something, in order
        self._failure: Exception | None = None
        self._waiting: asyncio.Future[Taken | None] | None = None
        self._use: Callable[[int, Chunk], bool] | None = None
        for place in range(self._next_place):
            if self._failure is None:
                self._open(place)

    async def next(self, use: Callable[[int, Chunk], bool] | None = None) -> Taken | None:
        """Return a choice's number and its next chunk; None when all have ended. Raises what a generation raises.

        use   takes chunks in the call that receives them, without a switch of tasks; the first chunk for which it
              returns False is returned here. Its errors are raised here, too.
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
        for handle in self._to_open.values():
            handle.cancel()
        for generation in self._generations.values():
            await generation.aclose()

    def _open(self, place: int) -> None:
        try:
            generation = self._generations[place] = self._start(place)
        except LowlatError as error:
            self._failure = self._told(place, error)
            self._hand_on()
            return
        generation.watch(partial(self._note, place))

    def _note(self, place: int) -> None:
        self._arrived.append(place)
        self._hand_on()

    def _hand_on(self) -> None:
        """Pass chunks that have come on to the waiting reader."""
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        try:
            if self._failure is not None:
                raise self._failure
            while (taken := self._take()) is not None:
                if self._use is None or not self._use(*taken):
                    waiting.set_result(taken)
                    return
            if not self._num_open:
                waiting.set_result(None)
        except Exception as error:  # raised later in the waiting task
            waiting.set_exception(error)

    def _take(self) -> Taken | None:
        while self._arrived:
            place = self._arrived.popleft()
            generation = self._generations.get(place)
            if generation is None:
                continue
            try:
                chunk = generation.take()
            except LowlatError as error:
                if not isinstance(error, Busy) or place < MAX_AT_ONCE:
                    raise self._told(place, error) from error
                del self._generations[place]
                self._open_later(place, error.retry_after_s or RETRY_S)
                continue
            if chunk is None:
                continue
            if chunk.finish_reason is None:
                self._arrived.append(place)  # a call that receives several chunks may report them once
                return place, chunk
            self._num_open -= 1
            del self._generations[place]
            if self._next_place < self._num_choices:
                self._open_later(self._next_place, 0.0)
                self._next_place += 1
            return place, chunk
        return None

    def _open_later(self, place: int, after_s: float) -> None:
        """Open a choice in a call of its own: sending its request can bring chunks of others."""
        self._to_open[place] = asyncio.get_running_loop().call_later(after_s, self._open_now, place)

    def _open_now(self, place: int) -> None:
        del self._to_open[place]
        self._open(place)
