"""Choices of one answer: a bounded number is under way, later ones wait where the server is busy."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lowlat.errors import Busy, RequestError
from lowlat.ipc.client import Chunk
from lowlat.serving.http.choices import MAX_AT_ONCE, Choices

NUM = 3 * MAX_AT_ONCE


class Generation:
    """Two chunks and an end, told of once, in a later turn of the loop; or an error."""

    def __init__(self, place: int, error: Exception | None = None) -> None:
        self.chunks = [Chunk((place,)), Chunk((place,)), Chunk(finish_reason="stop")]
        self.error = error
        self.is_open = True

    def watch(self, wake: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(wake)

    def take(self) -> Chunk | None:
        if self.error is not None:
            raise self.error
        chunk = self.chunks.pop(0) if self.chunks else None
        self.is_open = self.is_open and bool(self.chunks)
        return chunk

    async def aclose(self) -> None:
        self.is_open = False


class Server:
    """Starts generations: the first try of a busy place is refused, and a bad place at once or by the server."""

    def __init__(self, *, busy: tuple[int, ...] = (), bad: int = -1, at_once: bool = True) -> None:
        self.busy, self.bad, self.at_once = set(busy), bad, at_once
        self.made: list[Generation] = []
        self.most = 0

    def start(self, place: int) -> Any:
        error: Exception | None = None
        if place in self.busy:
            self.busy.remove(place)
            error = Busy("later", 0.001)
        elif place == self.bad:
            error = RequestError("bad")
            if self.at_once:
                raise error
        self.made.append(Generation(place, error))
        self.most = max(self.most, sum(one.is_open and one.error is None for one in self.made))
        return self.made[-1]


def collect(server: Server, num: int) -> list[tuple[int, Chunk]]:
    async def main() -> list[tuple[int, Chunk]]:
        choices = Choices(server.start, num)
        found = []
        try:
            while (taken := await choices.next()) is not None:
                found.append(taken)
        finally:
            await choices.close()
        return found

    return asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize("busy", [(), (MAX_AT_ONCE, NUM - 1), tuple(range(MAX_AT_ONCE, NUM))])
def test_all_choices_come_and_a_bounded_number_is_under_way(busy: tuple[int, ...]) -> None:
    server = Server(busy=busy)
    found = collect(server, NUM)
    assert server.most <= MAX_AT_ONCE and len(server.made) == NUM + len(busy)
    for place in range(NUM):
        own = [chunk for at, chunk in found if at == place]
        assert [chunk.token_ids for chunk in own] == [(place,), (place,), ()] and own[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (Server(busy=(3,)), Busy),
        (Server(bad=3), RequestError),
        (Server(bad=3, at_once=False), RequestError),
        (Server(bad=NUM - 1), RequestError),
        (Server(bad=NUM - 1, at_once=False), RequestError),
    ],
)
def test_what_a_choice_raises_ends_them_all(server: Server, error: type[Exception]) -> None:
    with pytest.raises(error):
        collect(server, NUM)
