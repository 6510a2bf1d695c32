"""Where the time of a first token goes, part by part, beside a bare ROUTER and DEALER, for whoever hunts it.

    PYTHONPATH=tests python -m bench.serving_trace --out bench/results/cpu/first_token_parts.json

Methods of both sides are wrapped from outside to note when they begin or end: each note costs some microseconds where
caches are cold, so these parts add up to more than `bench/test_ipc.py` measures. Between blocks of requests all
rest. Times are p25 and p50 of each part, us. The clock is one for all processes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import quantiles
from typing import Any

import zmq

from bench.serving import PROMPT, conditions

__all__ = ["main"]

REST_S = 0.05
TOKENS = 5
BARE_BYTES = 48
Events = list[tuple[str, int]]
Span = tuple[int, int]

# The points that a first token passes, in order, and the part that ends with each.
SERVED = {
    "client: made": "client: make the request",
    "client: send": "client: put it among what is sent, and encode it",
    "I/O: woken": "client: send; libzmq's thread, socket, libzmq's thread, server's poll",
    "I/O: received": "server: take the message from libzmq",
    "I/O: decoded": "server: decode and check it",
    "I/O: handed over": "server: admit it",
    "engine: submit": "server: the decode thread wakes",
    "engine: step": "server: the request joins the step",
    "engine: stepped": "the step",
    "server: send": "server: make and encode the message",
    "client: woken": "server: send; libzmq's thread, socket, libzmq's thread, client's poll",
    "token": "client: receive, decode, hand out",
}
BARE = {"echo: received": "send, and the way there", "echo: send": "the step", "token": "send, and the way back"}


def _note(owner: Any, method: str, events: Events, *, begin: str = "", end: str = "") -> None:
    """Note when a method begins, ends, or both."""
    original = getattr(owner, method)

    def noted(*arguments: Any, **options: Any) -> Any:
        if begin:
            events.append((begin, time.monotonic_ns()))
        result = original(*arguments, **options)
        if end:
            events.append((end, time.monotonic_ns()))
        return result

    setattr(owner, method, noted)


def _serve(endpoint: str, step_s: float, out: Path) -> None:
    """A traced server of a FakeEngine, until SIGTERM; then what was noted is written."""
    from fake_engine import FakeEngine

    from lowlat.ipc.server import Server, router
    from lowlat.ipc.server.generations.requests import Requests
    from lowlat.ipc.server.service import Service
    from lowlat.ipc.server.threads.decode_thread import DecodeThread

    sys.setswitchinterval(0.0005)  # as `lowlat serve` does
    events: Events = []
    _note(router.Router, "wait", events, end="I/O: woken")
    _note(Service, "receive", events, begin="I/O: received")
    _note(Requests, "submit", events, begin="I/O: decoded")
    _note(DecodeThread, "put", events, begin="I/O: handed over")
    _note(FakeEngine, "submit", events, begin="engine: submit")
    _note(FakeEngine, "step", events, begin="engine: step", end="engine: stepped")
    _note(router, "send_frames", events, begin="server: send")
    server = Server(lambda: FakeEngine(step_s, text=True), None, endpoint)
    server.start()
    print(flush=True)
    server.run()
    out.write_text(json.dumps(events))


def _echo(endpoint: str, step_s: float, out: Path) -> None:
    """A bare ROUTER that sleeps for a step and sends back what came, until SIGTERM."""
    events: Events = []

    def end(number: int, frame: object) -> None:
        out.write_text(json.dumps(events))
        sys.exit()

    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(endpoint)
        signal.signal(signal.SIGTERM, end)
        print(flush=True)
        while True:
            message = socket.recv_multipart()
            events.append(("echo: received", time.monotonic_ns()))
            time.sleep(step_s)
            events.append(("echo: send", time.monotonic_ns()))
            socket.send_multipart(message)


@contextmanager
def _process(kind: str, step_s: float, folder: Path, events: Events) -> Iterator[str]:
    """One of the two above in another process; its endpoint. What it has noted is there when the context has ended."""
    endpoint, out = f"ipc://{folder}/{kind}.sock", folder / f"{kind}.json"
    command = [sys.executable, "-m", "bench.serving_trace", "--step-ms", str(step_s * 1e3)]
    with subprocess.Popen([*command, "--run", kind, endpoint, str(out)], stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or not process.stdout.readline():
                raise RuntimeError(f"{kind} ended before it was ready: {process.wait()}")
            yield endpoint
        finally:
            process.terminate()
    events += [(name, moment) for name, moment in json.loads(out.read_text())]


@contextmanager
def _served_client(endpoint: str, events: Events) -> Iterator[Callable[[], Span]]:
    """A traced client; the function asks for a few tokens, and says when it began and had the first."""
    from lowlat.ipc.client import blocking, connection, dealer

    _note(blocking, "make_request", events, end="client: made")
    _note(dealer, "send_frames", events, begin="client: send")
    _note(connection.Connection, "_sleep", events, end="client: woken")

    with blocking.Client(endpoint) as client:

        def ask() -> Span:
            begin = time.monotonic_ns()
            generation = client.generate(PROMPT, max_tokens=TOKENS)
            next(generation)
            end = time.monotonic_ns()
            list(generation)
            return begin, end

        yield ask


@contextmanager
def _bare_client(endpoint: str) -> Iterator[Callable[[], Span]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(endpoint)

        def ask() -> Span:
            begin = time.monotonic_ns()
            dealer.send(bytes(BARE_BYTES))
            dealer.recv()
            return begin, time.monotonic_ns()

        yield ask


def _parts(events: Events, span: Span, points: Sequence[str]) -> list[int] | None:
    """Nanoseconds of each part of a request; None where it took another way.

    A point is passed at the first event of its name after the one before, but who waits may have woken for something
    else: that is passed last before the next point.
    """
    inside = [event for event in events if span[0] <= event[1] < span[1]] + [("token", span[1])]
    passed = [span[0]]
    for place, point in enumerate(points):
        moments = [moment for name, moment in inside if name == point and moment >= passed[-1]]
        if point.endswith("woken") and moments:
            ends = [moment for name, moment in inside if name == points[place + 1] and moment >= moments[0]]
            moments = [moment for moment in moments if ends and moment <= ends[0]][-1:]
        if not moments:
            return None
        passed.append(moments[0])
    return [after - before for before, after in pairwise(passed)]


def _times(events: Events, spans: Sequence[Span], points: dict[str, str]) -> list[dict[str, Any]]:
    """The parts of these requests in order, us at p25 and p50."""
    events = sorted(events, key=lambda event: event[1])
    rows, place = [], 0
    for span in spans:
        while events[place][1] < span[0]:
            place += 1
        end = next((i for i in range(place, len(events)) if events[i][1] >= span[1]), len(events))
        rows.append(_parts(events[place:end], span, list(points)))
    columns = zip(*(row for row in rows if row is not None), strict=True)
    quarters = [quantiles(times, n=4) for times in columns]
    return [
        {"part": words, "p25_us": round(low / 1e3, 1), "p50_us": round(middle / 1e3, 1)}
        for words, (low, middle, _) in zip(points.values(), quarters, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--in-a-row", type=int, default=10)
    parser.add_argument("--out", type=Path, help="where to write the same as JSON")
    parser.add_argument("--run", nargs=3, metavar=("KIND", "ENDPOINT", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    step_s = options.step_ms / 1e3
    if options.run:
        kind, endpoint, out = options.run
        {"serve": _serve, "echo": _echo}[kind](endpoint, step_s, Path(out))
        return
    served: Events = []
    bare: Events = []
    spans: dict[str, list[Span]] = {"served": [], "bare": []}
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o700)
        with ExitStack() as stack:
            enter, folder = stack.enter_context, Path(name)
            ways = {
                "served": enter(_served_client(enter(_process("serve", step_s, folder, served)), served)),
                "bare": enter(_bare_client(enter(_process("echo", step_s, folder, bare)))),
            }
            for _ in range(options.requests // options.in_a_row + 1):
                for way in random.sample(list(ways), len(ways)):
                    time.sleep(REST_S)
                    spans[way] += [ways[way]() for _ in range(options.in_a_row)]
    result = conditions() | {"step_ms": options.step_ms, "in_a_row": options.in_a_row, "requests": options.requests}
    for way, events, points in (("served", served, SERVED), ("bare", bare, BARE)):
        result[way] = _times(events, spans[way][options.in_a_row :], points)  # the first ones warm up
        print(f"{way}: p25, p50, us")
        for row in result[way]:
            print(f"{row['p25_us']:8.0f} {row['p50_us']:8.0f}  {row['part']}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
