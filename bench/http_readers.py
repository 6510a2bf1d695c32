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
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from lowlat.ipc import AsyncClient, Client

__all__ = ["KEY", "Readers", "Timed"]

KEY = "a-key-for-benchmarks"
PATH = "/v1/completions"
TEXT = re.compile(rb'"text":"([@0-9. ]*)"')
GONE_S = 60.0

Ask = Callable[[Sequence[list[int]], int], "list[Timed]"]
AskOne = Callable[[list[int], int], Awaitable["Timed"]]


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
            "asyncio": lambda prompts, tokens: self._run(self._ask_asyncio, prompts, tokens),
            "raw": self._ask_raw,
        }
        if find_spec("aiohttp") is not None:
            self._ways["aiohttp"] = lambda prompts, tokens: self._run(self._ask_aiohttp, prompts, tokens)
        if find_spec("openai") is not None:
            self._ways["openai"] = lambda prompts, tokens: self._run(self._ask_openai, prompts, tokens)

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

    def ask(self, name: str, prompts: Sequence[list[int]], tokens: int) -> list[Timed]:
        """Ask for a stream a prompt, all at once, and read them to their ends."""
        return self._ways[name](prompts, tokens)

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

    def _run(self, ask: AskOne, prompts: Sequence[list[int]], tokens: int) -> list[Timed]:
        async def all_of_them() -> list[Timed]:
            return await asyncio.gather(*(ask(prompt, tokens) for prompt in prompts))

        streams: list[Timed] = self._runner.run(all_of_them())
        return streams

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return {"model": self._model, "prompt": prompt, "stream": True, **sampling}

    def _ask_socket(self, prompts: Sequence[list[int]], tokens: int) -> list[Timed]:
        def ask(prompt: list[int]) -> Timed:
            timed = Timed()
            for chunk in self._client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
                timed.take(chunk.text)
            return timed

        return list(self._pool.map(ask, prompts))

    async def _ask_asyncio(self, prompt: list[int], tokens: int) -> Timed:
        timed = Timed()
        async for chunk in self._async_client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
            timed.take(chunk.text)
        return timed

    async def _ask_aiohttp(self, prompt: list[int], tokens: int) -> Timed:
        timed = Timed()
        async with self._session.post(PATH, json=self._body(prompt, tokens)) as answer:
            async for line in answer.content:
                if found := TEXT.search(line):
                    timed.take(found[1].decode())
        return timed

    async def _ask_openai(self, prompt: list[int], tokens: int) -> Timed:
        timed = Timed()
        answer = await self._openai.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in answer:
            if chunk.choices:
                timed.take(chunk.choices[0].text)
        return timed

    def _ask_raw(self, prompts: Sequence[list[int]], tokens: int) -> list[Timed]:
        host, _, port = self._url.removeprefix("http://").rpartition(":")
        bodies = [json.dumps(self._body(prompt, tokens)) for prompt in prompts]
        with ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            callers = [
                stack.enter_context(socket.create_connection((host, int(port)), timeout=GONE_S)) for _ in prompts
            ]
            streams = []
            for caller, body in zip(callers, bodies, strict=True):
                head = f"host: {host}:{port}\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}"
                raw = _Raw(caller)
                streams.append(raw)
                caller.sendall(f"POST {PATH} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
                selector.register(caller, selectors.EVENT_READ, raw)
            while selector.get_map():
                for key, _events in selector.select(GONE_S):
                    if not key.data.read():
                        selector.unregister(key.fileobj)
        return [raw.timed for raw in streams]


class _Raw:
    """A stream on a bare socket."""

    def __init__(self, caller: socket.socket) -> None:
        self.timed = Timed()
        self._caller = caller
        self._unread = b""

    def read(self) -> bool:
        """Take what has come; False after the last."""
        self._caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)  # each read turns it on again
        piece = self._caller.recv(1 << 16)
        self._unread += piece
        while found := TEXT.search(self._unread):
            self.timed.take(found[1].decode())
            self._unread = self._unread[found.end() :]
        return bool(piece) and b"[DONE]" not in self._unread
