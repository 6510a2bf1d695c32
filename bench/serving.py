"""This program measures the time that serving adds to a token: clients over ipc and the engine alone, in turns.

    python -m pytest bench/test_ipc.py --serving-out bench/results/cpu/serving.json
    python -m bench.serving bench/results/cpu/serving.json

The first measures, the second prints the table. The server is another process; its engine sleeps for a step, without
the GIL, as a device's step does. A round asks for a few tokens in every way, in an order by chance: of the
engine alone, in this process; through the blocking client; through the asyncio client; and a bare ROUTER echoes a
message, at once and after a sleep as long as a step: what that adds is ZeroMQ's and the machine's part of a first
token. Each way is asked several times in a row, or once: then the server has been at rest for a while, and its caches
are cold.
"""

import argparse
import asyncio
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import zmq
from fake_engine import FakeEngine

from bench.ready_process import ready_process
from lowlat.ipc import AsyncClient, Client
from lowlat.ipc.wire import Sampling

__all__ = ["MAX_STREAMS", "PROMPT", "Case", "bare_echo", "main", "served", "table"]

MAX_STREAMS = 16
PROMPT = tuple(range(16))
ECHO = """
import sys, time, zmq
step_s = float(sys.argv[2])
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
print(flush=True)
while True:
    message = router.recv_multipart()
    if step_s:
        time.sleep(step_s)
    router.send_multipart(message)
"""
SERVER = Path(__file__).parents[1] / "tests" / "support" / "fake_server.py"
BARE_BYTES = 48

Times = list[list[float]]
"""For each stream, us: to the first token, then between tokens."""


@contextmanager
def served(folder: Path, step_s: float) -> Iterator[str]:
    """A server of a FakeEngine in another process; its endpoint."""
    endpoint = f"ipc://{folder}/s.sock"
    engine = {"step_s": step_s, "max_running": MAX_STREAMS, "text": True}
    with ready_process(SERVER, endpoint, json.dumps({"engine": engine}), stderr=subprocess.DEVNULL):
        yield endpoint


@contextmanager
def bare_echo(folder: Path, step_s: float = 0.0) -> Iterator[Callable[[], float]]:
    """A function that gives the us of a message to a bare ROUTER in another process, which sleeps, and back."""
    endpoint = f"ipc://{folder}/e{step_s:g}.sock"
    echoing = ready_process("-c", ECHO, endpoint, step_s, stderr=subprocess.DEVNULL)
    with echoing, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)

        def echo() -> float:
            begin = time.perf_counter()
            dealer.send(bytes(BARE_BYTES))
            dealer.recv()
            return (time.perf_counter() - begin) * 1e6

        yield echo


def _gaps(begin: float, seen: Sequence[float]) -> list[float]:
    return [(after - before) * 1e6 for before, after in zip([begin, *seen], seen, strict=False)]


class Case:
    """One step time and number of streams, with all ways to ask; used as a context manager.

    in_a_row   how often a way is asked before another has its turn
    """

    def __init__(
        self, folder: Path, endpoint: str, step_s: float, num_streams: int, in_a_row: int, num_tokens: int
    ) -> None:
        self.step_s = step_s
        self.num_streams = num_streams
        self.in_a_row = in_a_row
        self.num_tokens = num_tokens
        self._folder = folder
        self._endpoint = endpoint
        self._engine = FakeEngine(step_s, max_running=MAX_STREAMS, text=True)
        self._num_asked = 0
        self._stack = ExitStack()
        self._random = random.Random(0)
        self._ways: list[tuple[str, Callable[[], Times]]] = []
        self.clear()

    def __enter__(self) -> "Case":
        enter = self._stack.enter_context
        self._client = enter(Client(self._endpoint))
        self._pool = enter(ThreadPoolExecutor(self.num_streams))
        self._runner = enter(asyncio.Runner())
        self._async_client = AsyncClient(self._endpoint)
        self._runner.run(self._async_client.connect())
        self._stack.callback(lambda: self._runner.run(self._async_client.close()))
        echo, step = enter(bare_echo(self._folder)), enter(bare_echo(self._folder, self.step_s))
        self._ways = [
            ("engine", self._alone),
            ("blocking", self._blocking),
            ("asyncio", lambda: self._runner.run(self._asyncio())),
            ("bare", lambda: [[echo()]]),
            ("bare_step", lambda: [[step()]]),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def clear(self) -> None:
        """Forget what was measured, as after rounds to warm up."""
        names = ("engine", "blocking", "asyncio", "bare", "bare_step")
        self.times: dict[str, list[Times]] = {name: [] for name in names}

    def round(self) -> None:
        """Ask in every way, in an order by chance: a way that follows another finds the server's caches warm."""
        for name, way in self._random.sample(self._ways, len(self._ways)):
            self.times[name] += [way() for _ in range(self.in_a_row)]

    def row(self) -> dict[str, Any]:
        """The measurement, us: p50 and p99 of each way, and of what the clients add, round by round.

        first_ratio is the median time that a client adds to a first token, over what the bare pair adds to a step.
        """
        times = self.times
        row: dict[str, Any] = {
            "step_ms": self.step_s * 1e3,
            "streams": self.num_streams,
            "tokens": self.num_tokens,
            "in_a_row": self.in_a_row,
            "requests": len(times["engine"]) * self.num_streams,
            "bare_round_trip_us": _summary([own[0][0] for own in times["bare"]]),
            "bare_step_adds_us": _summary(
                [own[0][0] - alone[0][0] for own, alone in zip(times["bare_step"], times["engine"], strict=True)]
            ),
        }
        first, later = _split(times["engine"])
        row["engine"] = {"first_us": _summary(first), "later_us": _summary(later)}
        for name in ("blocking", "asyncio"):
            own_first, own_later = _split(times[name])
            row[name] = {
                "first_us": _summary(own_first),
                "later_us": _summary(own_later),
                "first_added_us": _summary([own - alone for own, alone in zip(own_first, first, strict=True)]),
                "later_added_us": _summary([own - alone for own, alone in zip(own_later, later, strict=True)]),
            }
            ratio = row[name]["first_added_us"]["p50"] / row["bare_step_adds_us"]["p50"]
            row[name]["first_ratio"] = round(ratio, 2)
        return row

    def _alone(self) -> Times:
        engine, seen, begins = self._engine, {}, {}
        for _ in range(self.num_streams):
            self._num_asked += 1
            name = str(self._num_asked)
            begins[name], seen[name] = time.perf_counter(), list[float]()
            engine.submit(name, PROMPT, Sampling(max_tokens=self.num_tokens))
        while engine.busy:
            for output in engine.step():
                seen[output.request_id].append(time.perf_counter())
        return [_gaps(begins[name], seen[name]) for name in seen]

    def _blocking(self) -> Times:
        if self.num_streams == 1:
            return [self._ask_blocking(None)]
        barrier = threading.Barrier(self.num_streams)
        return list(self._pool.map(self._ask_blocking, [barrier] * self.num_streams))

    def _ask_blocking(self, barrier: threading.Barrier | None) -> list[float]:
        if barrier is not None:
            barrier.wait()
        begin = time.perf_counter()
        seen = [
            time.perf_counter()
            for chunk in self._client.generate(PROMPT, max_tokens=self.num_tokens)
            for _ in chunk.token_ids
        ]
        return _gaps(begin, seen)

    async def _asyncio(self) -> Times:
        return await asyncio.gather(*(self._ask_asyncio() for _ in range(self.num_streams)))

    async def _ask_asyncio(self) -> list[float]:
        begin = time.perf_counter()
        seen = []
        async for chunk in self._async_client.generate(PROMPT, max_tokens=self.num_tokens):
            seen += [time.perf_counter() for _ in chunk.token_ids]
        return _gaps(begin, seen)


def _split(rounds: Sequence[Times]) -> tuple[list[float], list[float]]:
    """First and later times of all streams and rounds, in an order that is the same for each way."""
    streams = [stream for times in rounds for stream in times]
    return [stream[0] for stream in streams], [gap for stream in streams for gap in stream[1:]]


def _summary(values: Sequence[float]) -> dict[str, float]:
    percentiles = quantiles(values, n=100, method="inclusive")
    return {"p50": round(percentiles[49], 1), "p99": round(percentiles[98], 1)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table of Markdown."""
    lines = [
        "| step | streams | in a row | client | first token | adds | later token | adds | bare ROUTER adds | ratio |",
        "|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        for client in ("engine", "blocking", "asyncio"):
            own = row[client]
            cells = [f"{row['step_ms']:g} ms", f"{row['streams']}", f"{row['in_a_row']}"]
            cells.append("engine alone" if client == "engine" else client)
            for which in ("first", "later"):
                cells.append(_cell(own[f"{which}_us"]))
                cells.append("-" if client == "engine" else _cell(own[f"{which}_added_us"]))
            cells += [_cell(row["bare_step_adds_us"]), ""] if client == "engine" else ["", f"{own['first_ratio']:.2f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(summary: dict[str, float]) -> str:
    return f"{summary['p50']:.0f} / {summary['p99']:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    print(table(json.loads(parser.parse_args(arguments).result.read_text())["rows"]))


if __name__ == "__main__":
    main()
