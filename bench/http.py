"""This program compares the delays of tokens through a socket and through HTTP, with several streams, on one server.

    python -m bench.http --out bench/results/cpu/http.json
    python -m bench.http --model bundled --out bench/results/h200/http.json
    python -m bench.http --model /tmp/llama --write-llama --out bench/results/h200/http.json

The server is one process, the gateway another, the readers this one. Without --model the engine's steps take a constant
time, without the GIL, as a device's do. A token's text is the time at which its step ended, of any engine: so a reader
knows how long it was under way. A first token counts from the request; where more streams wait than there are slots,
from its admission. Ways are asked in turns, in an order by chance:

    socket   the blocking client, a thread a stream
    asyncio  the asyncio client, a task a stream
    raw      bare sockets in one thread, which acknowledge late (TCP_QUICKACK off) and look for the text alone
    aiohttp, openai   those clients, a task a stream, where they are installed

Streams begin at random times, which are the same for all ways; with `--spread 0` they begin at once, and a first token
is then also what a reader needs to send so many requests. Connections are open before a request is sent, as those of
clients that keep theirs are.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.host_conditions import host_conditions
from bench.http_readers import KEY, Question, Readers, Timed
from bench.http_server import MODEL, serve
from bench.lib.conditions import write_json
from bench.ready_process import ready_process
from lowlat.tools.bench.machine import driver

__all__ = ["main", "measure", "table"]

ROUNDS = {1: 60, 4: 20, 8: 20, 32: 8}  # by streams
TOKENS = 50
WARM_UP = 2
SLOTS = 8
STEP_S = 0.004
SPREAD_MS = 5.0
PACKAGES = ("aiohttp", "h11", "openai", "pyzmq", "starlette", "torch", "uvicorn")

Times = dict[str, list[float]]
"""Seconds by name: `first` and `token`."""


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The engine's facts, and rows by streams and way, us: the first token, later ones, what HTTP adds to the socket's.

    Raises RuntimeError where tokens are missing.
    """
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lowlat-")))
        endpoint = f"ipc://{folder}/s.sock"
        environment = {**os.environ, "LOWLAT_API_KEY": KEY}
        command = ("-m", "bench.http", "--serve", endpoint, *_server_options(options))
        facts = json.loads(stack.enter_context(ready_process(*command, env=environment)).line)
        command = ("-m", "lowlat.cli", "http", "0", "--json", f"--endpoint={endpoint}")
        gateway = stack.enter_context(ready_process(*command, env=environment))
        prompts = _Prompts(facts["vocab_size"], options.prompt)
        num_streams = max(options.streams)
        readers = stack.enter_context(Readers(endpoint, json.loads(gateway.line)["url"], MODEL, num_streams))
        names = options.ways or readers.names
        for num_streams in options.streams:
            times: dict[str, Times] = {name: {"first": [], "token": []} for name in names}
            num_rounds = options.rounds or ROUNDS.get(num_streams, 10)
            for number in range(WARM_UP + num_rounds):
                after_s = [1e-3 * random.uniform(0.0, options.spread) * num_streams for _ in range(num_streams)]
                for name in random.sample(names, len(names)):
                    asked = [Question(prompts.next(), options.tokens, after) for after in after_s]
                    streams = readers.ask(name, asked)
                    if number >= WARM_UP:
                        _take(times[name], name, streams, options.tokens, waits=num_streams > SLOTS)
            rows += [_row(num_streams, name, times) for name in names]
            print(table(rows[-len(names) :]), flush=True)
    return facts, rows


class _Prompts:
    """Prompts of random tokens, each its own."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self._random = random.Random(0)
        self._vocab_size, self._length = vocab_size, length

    def next(self) -> list[int]:
        """The next one."""
        return [self._random.randrange(self._vocab_size) for _ in range(self._length)]


def _take(times: Times, name: str, streams: Sequence[Timed], tokens: int, *, waits: bool) -> None:
    for stream in streams:
        if stream.num_tokens != tokens:
            raise RuntimeError(f"{name}: {stream.num_tokens} tokens came of {tokens}")
        times["first"].append(stream.arrivals[0] - (stream.admitted if waits else stream.begin))
        times["token"] += [
            arrival - stamp for arrival, stamp in zip(stream.arrivals[1:], stream.stamps[1:], strict=True)
        ]


def _row(num_streams: int, name: str, times: dict[str, Times]) -> dict[str, Any]:
    row: dict[str, Any] = {"streams": num_streams, "way": name}
    for kind, values in times[name].items():
        row[f"{kind}_us"] = _summary(values)
        row[f"num_{kind}"] = len(values)
    if "socket" in times:
        for kind, values in times["socket"].items():
            base = _summary(values)
            row[f"{kind}_over_socket_us"] = {at: round(row[f"{kind}_us"][at] - base[at], 1) for at in base}
    return row


def _summary(values: Sequence[float]) -> dict[str, float]:
    percentiles = quantiles(values, n=100, method="inclusive")
    return {"p50": round(1e6 * percentiles[49], 1), "p99": round(1e6 * percentiles[98], 1)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table of Markdown."""
    lines = [
        "| streams | way | first token p50 / p99, us | over the socket's | token p50 / p99, us | over the socket's |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [str(row["streams"]), row["way"]]
        for kind in ("first", "token"):
            for found in (row[f"{kind}_us"], row.get(f"{kind}_over_socket_us")):
                cells.append("-" if found is None else f"{found['p50']:.0f} / {found['p99']:.0f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _server_options(options: argparse.Namespace) -> list[str]:
    given = {"model": options.model, "draft-model": options.draft_model, "device": options.device}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    flags += [f"--prompt={options.prompt}", f"--tokens={options.tokens}"]
    return flags + ["--write-llama"] * options.write_llama


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face directory, or `bundled`; none: steps of a constant time")
    parser.add_argument("--draft-model", type=Path, help="the bundled model has its own")
    parser.add_argument(
        "--write-llama",
        action="store_true",
        help="write random weights of Llama-3.1-8B's shape and its draft model into --model, where they are not yet",
    )
    parser.add_argument("--device", help="cuda:0, or cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help="for every number of streams")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument(
        "--spread",
        type=float,
        default=SPREAD_MS,
        help="streams begin at random times within so many ms for each of them; 0: all at once",
    )
    parser.add_argument("--ways", nargs="+", help="of those above")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the result."""
    options = _options(arguments)
    if options.serve:
        sys.exit(serve(options, slots=SLOTS, step_s=STEP_S))
    made = host_conditions()  # the load before the measurement
    if options.commit:
        made["commit"] = options.commit
    facts, rows = measure(options)
    cuda = facts["device"].startswith("cuda")
    own = {
        "driver": driver() if cuda else "",
        "versions": _versions(),
        "prompt": options.prompt,
        "spread_ms": options.spread,
        "engine": facts,
    }
    result = {**made, **own, "slots": SLOTS, "tokens": options.tokens, "rows": rows}
    print(table(rows))
    if options.out is not None:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
