"""Clients that bench.http measures: each asks for some streams at once and notes when their tokens came."""

import asyncio
import json
import re
import selectors
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from types import TracebackType
from typing import Any, NamedTuple, Self

from lowlat.ipc import AsyncClient, Client

__all__ = ["KEY", "Question", "Readers", "Timed"]

KEY = "a-key-for-benchmarks"
PATH = "/v1/completions"
TEXT = re.compile(rb'"text":"([@0-9. ]*)"')
GONE_S = 60.0

Ask = Callable[[Sequence["Question"]], "list[Timed]"]
AskOne = Callable[["Question"], Awaitable["Timed"]]


class Question(NamedTuple):
    """A request to make after so many seconds."""

    prompt: list[int]
    tokens: int
    after_s: float


class Timed:
    """One stream: when it was asked for and admitted, when its tokens came, and when their steps had ended, s."""

    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.admitted = 0.0
        self.arrivals: list[float] = []
        self.stamps: list[float] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return len(self.arrivals)

    def take(self, text: str) -> None:
        """Note a text of `bench.http_server`, which has just come."""
        now = time.monotonic()
        for word in text.split():
            if word.startswith("@"):
                self.admitted = float(word[1:])
            else:
                self.arrivals.append(now)
                self.stamps.append(float(word))


class Readers:
    """All ways to ask, with their connections; a context manager.

    names   of those whose packages are installed
    """

    def __init__(self, endpoint: str, url: str, model: str, num_streams: int) -> None:
        self._endpoint, self._url, self._model = endpoint, url, model
        self._num_streams = num_streams
        self._stack = ExitStack()
        self._ways: dict[str, Ask] = {
            "socket": self._ask_socket,
            "asyncio": partial(self._run, self._ask_asyncio),
            "raw": self._ask_raw,
        }
        if find_spec("aiohttp") is not None:
            self._ways["aiohttp"] = partial(self._run, self._ask_aiohttp)
        if find_spec("openai") is not None:
            self._ways["openai"] = partial(self._run, self._ask_openai)

    @property
    def names(self) -> list[str]:
        """Of the ways."""
        return list(self._ways)

    def __enter__(self) -> Self:
        enter = self._stack.enter_context
        self._client = enter(Client(self._endpoint))
        self._pool = enter(ThreadPoolExecutor(self._num_streams))
        self._runner = enter(asyncio.Runner())
        closing = AsyncExitStack()
        self._stack.callback(lambda: self._runner.run(closing.aclose()))
        self._runner.run(self._open(closing))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def ask(self, name: str, questions: Sequence[Question]) -> list[Timed]:
        """Ask for a stream a question, and read all to their ends."""
        return self._ways[name](questions)

    async def _open(self, closing: AsyncExitStack) -> None:
        self._async_client = await closing.enter_async_context(AsyncClient(self._endpoint))
        if "aiohttp" in self._ways:
            import aiohttp

            connector = aiohttp.TCPConnector(limit=self._num_streams)
            headers = {"authorization": f"Bearer {KEY}"}
            self._session = await closing.enter_async_context(
                aiohttp.ClientSession(self._url, connector=connector, headers=headers)
            )
        if "openai" in self._ways:
            import openai

            self._openai = await closing.enter_async_context(
                openai.AsyncOpenAI(base_url=f"{self._url}/v1", api_key=KEY, max_retries=0)
            )

    def _run(self, ask: AskOne, questions: Sequence[Question]) -> list[Timed]:
        async def later(question: Question) -> Timed:
            await asyncio.sleep(question.after_s)
            return await ask(question)

        async def all_of_them() -> list[Timed]:
            return await asyncio.gather(*map(later, questions))

        streams: list[Timed] = self._runner.run(all_of_them())
        return streams

    def _body(self, question: Question) -> dict[str, Any]:
        sampling = {"max_tokens": question.tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self._model, "prompt": question.prompt, "stream": True, **sampling}

    def _ask_socket(self, questions: Sequence[Question]) -> list[Timed]:
        def ask(question: Question) -> Timed:
            time.sleep(question.after_s)
            timed = Timed()
            for chunk in self._client.generate(question.prompt, **_sampling(question)):
                timed.take(chunk.text)
            return timed

        return list(self._pool.map(ask, questions))

    async def _ask_asyncio(self, question: Question) -> Timed:
        timed = Timed()
        async for chunk in self._async_client.generate(question.prompt, **_sampling(question)):
            timed.take(chunk.text)
        return timed

    async def _ask_aiohttp(self, question: Question) -> Timed:
        timed = Timed()
        async with self._session.post(PATH, json=self._body(question)) as answer:
            async for line in answer.content:
                if found := TEXT.search(line):
                    timed.take(found[1].decode())
        return timed

    async def _ask_openai(self, question: Question) -> Timed:
        timed = Timed()
        answer = await self._openai.completions.create(
            model=self._model,
            prompt=question.prompt,
            max_tokens=question.tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in answer:
            if chunk.choices:
                timed.take(chunk.choices[0].text)
        return timed

    def _ask_raw(self, questions: Sequence[Question]) -> list[Timed]:
        host, _, port = self._url.removeprefix("http://").rpartition(":")
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            streams = []
            for question in questions:
                body = json.dumps(self._body(question))
                head = f"host: {host}:{port}\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}"
                caller = stack.enter_context(socket.create_connection((host, int(port)), timeout=GONE_S))
                streams.append(_Raw(caller, f"POST {PATH} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode()))
            begin = time.monotonic()
            due = sorted(zip((question.after_s for question in questions), streams, strict=True), key=itemgetter(0))
            while due or selector.get_map():
                wait_s = begin + due[0][0] - time.monotonic() if due else GONE_S
                if wait_s <= 0:
                    raw = due.pop(0)[1]
                    raw.ask()
                    selector.register(raw.caller, selectors.EVENT_READ, raw)
                for key, _events in selector.select(max(0.0, wait_s)):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
        return [raw.timed for raw in streams]


def _sampling(question: Question) -> dict[str, Any]:
    return {"max_tokens": question.tokens, "temperature": 0.0, "ignore_eos": True}


class _Raw:
    """A stream on a bare socket."""

    def __init__(self, caller: socket.socket, request: bytes) -> None:
        self.caller = caller
        self.timed = Timed()
        self._request = request
        self._unread = b""

    def ask(self) -> None:
        """Send the request."""
        self.timed = Timed()
        self.caller.sendall(self._request)

    def read(self) -> bool:
        """Take what has come; False after the last."""
        self.caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # each read turns it on again
        piece = self.caller.recv(1 << 16)
        self._unread += piece
        while found := TEXT.search(self._unread):
            self.timed.take(found[1].decode())
            self._unread = self._unread[found.end() :]
        return bool(piece) and b"[DONE]" not in self._unread
