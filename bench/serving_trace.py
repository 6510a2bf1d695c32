"""Where the time of a first token goes: timestamps through client, I/O thread and decode thread, for whoever hunts it.

    PYTHONPATH=tests python -m bench.serving_trace --step-ms 2 --requests 200 --in-a-row 40

Methods of both sides are wrapped from outside, and each wrap costs a microsecond or two: use it to see what comes
where, and `bench/test_serving.py` for figures. Between blocks of requests the server rests, so the first of each block
meets cold caches. Times are medians since the call of `generate`, us; `<` is a method's begin, `>` its end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["main"]

REST_S = 0.05
Events = list[tuple[str, int]]


def _wrap(owner: Any, method: str, name: str, events: Events) -> None:
    """Note when a method begins and ends."""
    original = getattr(owner, method)

    def traced(*arguments: Any, **options: Any) -> Any:
        events.append((f"{name} <", time.monotonic_ns()))
        result = original(*arguments, **options)
        events.append((f"{name} >", time.monotonic_ns()))
        return result

    setattr(owner, method, traced)


def _serve(endpoint: str, step_s: float, out: Path) -> None:
    """A traced server of a FakeEngine, until SIGTERM; then what was traced is written."""
    from fake_engine import FakeEngine

    from lowlat.ipc.server import Server
    from lowlat.ipc.server.generations.requests import Requests
    from lowlat.ipc.server.peers import Peers
    from lowlat.ipc.server.router import Router
    from lowlat.ipc.server.service import Service
    from lowlat.ipc.server.threads.decode_thread import DecodeThread

    events: Events = []
    for owner, method, name in (
        (Router, "wait", "I/O: wait"),
        (Service, "receive", "I/O: receive"),
        (Requests, "submit", "I/O: submit"),
        (DecodeThread, "put", "I/O: hand over"),
        (Peers, "send", "I/O: send"),
        (DecodeThread, "_rest", "decode: rest"),
        (DecodeThread, "_publish", "decode: publish"),
        (FakeEngine, "submit", "engine: submit"),
        (FakeEngine, "step", "engine: step"),
    ):
        _wrap(owner, method, name, events)
    server = Server(lambda: FakeEngine(step_s), None, endpoint)
    server.start()
    print(flush=True)
    server.run()
    out.write_text(json.dumps(events))


def _ask(endpoint: str, requests: int, in_a_row: int) -> tuple[Events, list[tuple[int, int]]]:
    """Traced requests of two tokens; what the client did, and when each began and had its first token."""
    from lowlat.ipc.client import blocking, connection, dealer, protocol

    events: Events = []
    for owner, method, name in (
        (blocking, "make_request", "client: make"),
        (protocol.ClientProtocol, "submit", "client: submit"),
        (dealer.Dealer, "send", "client: send"),
        (connection.Connection, "_sleep", "client: wait"),
        (protocol.ClientProtocol, "receive", "client: receive"),
    ):
        _wrap(owner, method, name, events)
    spans = []
    with blocking.Client(endpoint) as client:
        for place in range(requests):
            if place % in_a_row == 0:
                time.sleep(REST_S)
            begin = time.monotonic_ns()
            generation = client.generate(range(16), max_tokens=2)
            next(generation)
            spans.append((begin, time.monotonic_ns()))
            list(generation)
    return events, spans


def _report(events: Events, spans: Sequence[tuple[int, int]]) -> None:
    events = sorted(events, key=lambda event: event[1])
    moments = [moment for _, moment in events]
    since: dict[str, list[int]] = defaultdict(list)
    for begin, end in spans:
        seen: Counter[str] = Counter()
        for name, moment in events[bisect(moments, begin) : bisect(moments, end)]:
            seen[name] += 1
            since[f"{name} {seen[name]}"].append(moment - begin)
        since["first token"].append(end - begin)
    for name, times in sorted(since.items(), key=lambda item: median(item[1])):
        if len(times) > len(spans) / 2:
            print(f"{median(times) / 1e3:8.0f}  {name}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--in-a-row", type=int, default=40)
    parser.add_argument("--serve", nargs=2, metavar=("ENDPOINT", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        _serve(options.serve[0], options.step_ms / 1e3, Path(options.serve[1]))
        return
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o700)
        endpoint, out = f"ipc://{name}/s.sock", Path(name, "events.json")
        command = [sys.executable, "-m", "bench.serving_trace", "--step-ms", str(options.step_ms), "--serve"]
        with subprocess.Popen([*command, endpoint, str(out)], stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                events, spans = _ask(endpoint, options.requests, options.in_a_row)
            finally:
                process.terminate()
        _report(events + [(name, moment) for name, moment in json.loads(out.read_text())], spans)


if __name__ == "__main__":
    main()
