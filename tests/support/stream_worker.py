"""Clients in a process of their own: python stream_worker.py ENDPOINT JSON.

Several streams at once through one Client or one AsyncClient, over and over. The process says `ready` when it is
connected, begins at a line on stdin, and prints what it found as one JSON object: with `requests` given. Without it
requests go on until the process is killed, and it says `running` when every stream has had a token.

api            "blocking": a thread a stream; "asyncio"
place          of this process among its like: part of every prompt, so that no two streams are equal
num_streams    at once
requests       of each stream, one after another; None: without end
max_tokens     of a request
until_s        no request begins so long after the first
num_seconds    in place of it: a request is cancelled after so long
window         tokens that may wait unread
pause_s        between two chunks: a slow reader
cancel_after   chunks after which a request is left
"""

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fake_engine import FakeEngine

from lowlat.ipc import AsyncClient, Client
from lowlat.ipc.wire import Sampling


@dataclass
class Found:
    """The worker reports on its streams: tokens, errors, and the times between chunks, to three digits."""

    num_tokens: int = 0
    num_requests: int = 0
    num_chunks: int = 0
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    first_us: Counter[int] = field(default_factory=Counter)
    gaps_us: Counter[int] = field(default_factory=Counter)

    def compare(self, found: Sequence[int], expected: Sequence[int], *, whole: bool) -> None:
        """Count what differs; without `whole` the stream was left early."""
        self.num_requests += 1
        self.num_tokens += len(found)
        expected = expected if whole else expected[: len(found)]
        if list(found) == list(expected):
            return
        have, want = Counter(found), Counter(expected)
        lost, doubled = (want - have).total(), (have - want).total()
        self.lost += lost
        self.doubled += doubled
        self.reordered += not lost and not doubled


class Streams:
    """The options, and what every stream does with a chunk."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.found = Found()
        self.lock = threading.Lock()
        self.started: set[int] = set()

    def prompt(self, stream: int, request: int) -> list[int]:
        return [1 + self.options["place"], stream, request % 1000]

    def requests(self) -> Iterator[int]:
        wanted, until_s = self.options.get("requests"), self.options.get("until_s")
        end = None if until_s is None else time.perf_counter() + until_s
        for number in count() if wanted is None else range(wanted):
            if end is not None and time.perf_counter() > end:
                return
            yield number

    def one(self, stream: int, request: int) -> "One":
        return One(self, stream, request)

    def running(self, stream: int) -> None:
        if self.options.get("requests") is not None or stream in self.started:
            return
        with self.lock:
            self.started.add(stream)
            if len(self.started) == self.options["num_streams"]:
                print("running", flush=True)


class One:
    """One request: takes chunks, and compares at its end."""

    def __init__(self, streams: Streams, stream: int, request: int) -> None:
        self.streams = streams
        self.stream = stream
        options = streams.options
        self.prompt = streams.prompt(stream, request)
        self.max_tokens: int = options["max_tokens"]
        self.until = time.perf_counter() + options.get("num_seconds", 1e9)
        self.cancel_after: int = options.get("cancel_after", 1 << 60)
        self.tokens: list[int] = []
        self.gaps: list[int] = []
        self.num_chunks = 0
        self.last = time.perf_counter()

    def take(self, token_ids: Sequence[int]) -> bool:
        """Add a chunk; whether to go on."""
        now = time.perf_counter()
        if token_ids:
            self.gaps.append(_three_digits(int((now - self.last) * 1e6)))
            self.last = now
            self.num_chunks += 1
            self.tokens.extend(token_ids)
            self.streams.running(self.stream)
        return now < self.until and self.num_chunks < self.cancel_after

    def end(self, whole: bool) -> None:
        expected = in_process(self.prompt, self.max_tokens)
        with self.streams.lock:
            found = self.streams.found
            found.compare(self.tokens, expected, whole=whole)
            found.num_chunks += self.num_chunks
            found.first_us.update(self.gaps[:1])
            found.gaps_us.update(self.gaps[1:])


def _three_digits(value: int) -> int:
    """A number that is off by half a percent at most, so that few of them differ."""
    return round(value, 3 - len(str(value)))


def in_process(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Return the engine's output without a server."""
    engine = FakeEngine(tokens_per_step=256)
    engine.submit("r", prompt, Sampling(max_tokens=max_tokens))
    return [token for _ in range(-(-max_tokens // 256)) for output in engine.step() for token in output.token_ids]


def run_blocking(endpoint: str, streams: Streams) -> None:
    options = streams.options
    pause_s = options.get("pause_s", 0.0)
    with Client(endpoint, window=options.get("window", 1024)) as client:
        begin()

        def run(stream: int) -> None:
            for request in streams.requests():
                one = streams.one(stream, request)
                go_on = True
                for chunk in client.generate(one.prompt, max_tokens=one.max_tokens):
                    go_on = one.take(chunk.token_ids)
                    if not go_on:
                        break
                    if pause_s:
                        time.sleep(pause_s)
                one.end(go_on)

        threads = [threading.Thread(target=run, args=(stream,)) for stream in range(options["num_streams"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


async def run_asyncio(endpoint: str, streams: Streams) -> None:
    options = streams.options
    pause_s = options.get("pause_s", 0.0)
    async with AsyncClient(endpoint, window=options.get("window", 1024)) as client:
        begin()

        async def run(stream: int) -> None:
            for request in streams.requests():
                one = streams.one(stream, request)
                go_on = True
                async with client.generate(one.prompt, max_tokens=one.max_tokens) as chunks:
                    async for chunk in chunks:
                        go_on = one.take(chunk.token_ids)
                        if not go_on:
                            break
                        if pause_s:
                            await asyncio.sleep(pause_s)
                one.end(go_on)

        await asyncio.gather(*(run(stream) for stream in range(options["num_streams"])))


def begin() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    endpoint, options = sys.argv[1], json.loads(sys.argv[2])
    streams = Streams(options)
    if options["api"] == "asyncio":
        asyncio.run(run_asyncio(endpoint, streams))
    else:
        run_blocking(endpoint, streams)
    print(json.dumps(streams.found.__dict__))


if __name__ == "__main__":
    main()
