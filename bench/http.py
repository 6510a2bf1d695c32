"""The time that the HTTP gateway adds to a token, beside a client over ipc that asks the same server, in turns.

    PYTHONPATH=tests python -m bench.http --out bench/results/cpu/http.json

The server is another process, the gateway a third. The engine's steps take a constant time, without the GIL, as a
device's do, and a token's text is the time at which its step ended: so the reader knows how long it was under way.
The reader of the stream is a bare socket that looks for the text alone; over ipc it is the blocking client. A round
asks in both ways, in an order by chance. It knows no model.
"""

import argparse
import http.client
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_engine import FakeCodec, FakeEngine, FakeOutput

from bench.ready_process import ready_process
from bench.serving import conditions
from lowlat.ipc import Client
from lowlat.ipc.limits import Limits
from lowlat.ipc.server import Server

__all__ = ["StampingEngine", "main", "measure", "table"]

KEY = "a-key-for-benchmarks"
TOKENS = 50
ROUNDS = {1: 60, 4: 20, 16: 10}  # by streams
STEP_S = 0.004
PROMPT = list(range(16))
STAMP = re.compile(rb'"text":"([0-9. ]+)"')


class StampingEngine(FakeEngine):
    """A FakeEngine whose tokens say when their step ended, in seconds of the system's monotonic clock."""

    def step(self) -> list[FakeOutput]:
        """Run one step, then stamp its tokens with the time."""
        outputs = super().step()
        stamp = f"{time.monotonic():.6f} "
        return [replace(output, text=stamp) if output.token_ids else output for output in outputs]


def serve(endpoint: str) -> int:
    """Serve the engine until the process is ended."""
    sys.setswitchinterval(0.0005)  # as `lowlat serve` does
    server = Server(
        lambda: StampingEngine(STEP_S, max_running=16, text=True, tokenizer="a hash"), FakeCodec(), endpoint, Limits()
    )
    server.start()
    print("ready", flush=True)
    return server.run()


class Ways:
    """Both ways to ask; each gives, for its tokens, the seconds from their step's end."""

    def __init__(self, client: Client, url: str) -> None:
        self._client = client
        self._address = url.removeprefix("http://")

    def ipc(self, _: int) -> list[float]:
        """Ask over ipc."""
        chunks = self._client.generate(PROMPT, max_tokens=TOKENS)
        return [time.monotonic() - float(stamp) for chunk in chunks for stamp in chunk.text.split()]

    def http(self, _: int) -> list[float]:
        """Ask through the HTTP gateway."""
        connection = http.client.HTTPConnection(self._address)
        connection.connect()
        body = json.dumps({"model": "fake", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True})
        headers = f"host: {self._address}\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}"
        connection.sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n{body}".encode())
        late: list[float] = []
        unread = b""
        while b"[DONE]" not in unread:
            piece = connection.sock.recv(1 << 16)
            now = time.monotonic()
            unread += piece
            if not piece:
                break
            while found := STAMP.search(unread):
                late += [now - float(stamp) for stamp in found[1].split()]
                unread = unread[found.end() :]
        connection.close()
        return late


def measure(rounds: dict[int, int]) -> list[dict[str, Any]]:
    """Rows by number of streams, us: how late tokens are in each way, and what the gateway adds."""
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowlat-")))
        endpoint = f"ipc://{folder}/s.sock"
        environment = {**os.environ, "LOWLAT_API_KEY": KEY}
        stack.enter_context(ready_process("-m", "bench.http", "--serve", endpoint, env=environment))
        command = ("-m", "lowlat.cli", "http", "0", "--json", f"--endpoint={endpoint}")
        gateway = stack.enter_context(ready_process(*command, env=environment))
        client = stack.enter_context(Client(endpoint))
        ways = Ways(client, json.loads(gateway.line)["url"])
        pool = stack.enter_context(ThreadPoolExecutor(max(rounds)))
        for num_streams, num_rounds in rounds.items():
            late: dict[str, list[float]] = {"ipc": [], "http": []}
            for number in range(num_rounds + 2):
                for way in random.sample([ways.ipc, ways.http], 2):
                    for tokens in pool.map(way, range(num_streams)):
                        if len(tokens) != TOKENS:
                            raise RuntimeError(f"{way.__name__}: {len(tokens)} tokens came of {TOKENS}")
                        if number >= 2:  # the first rounds warm up
                            late[way.__name__] += tokens
            rows.append(_row(num_streams, late))
    return rows


def _row(num_streams: int, late: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"streams": num_streams, "tokens": len(late["http"])}
    for way, times in late.items():
        row[f"{way}_us"] = {"p50": _us(times, 50), "p99": _us(times, 99)}
    row["added_us"] = {name: round(row["http_us"][name] - row["ipc_us"][name], 1) for name in ("p50", "p99")}
    return row


def _us(times: Sequence[float], percent: int) -> float:
    ordered = sorted(times)
    return round(1e6 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 1)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table of Markdown."""
    lines = ["| streams | ipc p50 / p99, us | http p50 / p99, us | added p50 / p99, us |", "|---:|---:|---:|---:|"]
    for row in rows:
        cells = [f"{row[name]['p50']:.0f} / {row[name]['p99']:.0f}" for name in ("ipc_us", "http_us", "added_us")]
        lines.append("| " + " | ".join([str(row["streams"]), *cells]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        sys.exit(serve(options.serve))
    result = {**conditions(), "step_ms": STEP_S * 1e3, "rows": measure(ROUNDS)}
    print(table(result["rows"]))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
