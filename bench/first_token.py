"""This program measures the time from submission to the caller's first token, in the process and through a socket.

    python -m bench.first_token --directory /tmp/checkpoint --out bench/results/h200/first_token.json
    python -m bench.first_token --directory /tmp/tiny --tiny --device cpu --prompt 5 40 --runs 2

Llama-3.1-8B's shape with its head, random weights, written to the directory once as `bench.start` writes them. Every
request has a prompt of its own of random tokens and is alone; nothing of it is cached. `process`: from `Runtime.submit`
to the step that returns its first token. `socket`: the same through `lowlat serve` in another process and the blocking
client over ipc, from `generate` to the first chunk. `next_ms_p50` is from there to the next tokens: a whole step. It
uses public names alone, so that a copy of this file can measure a commit that lacks it.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.lib.clock import percentile
from bench.lib.conditions import bench_parser, stamps_of, write_json
from bench.lib.model import Model
from bench.ready_process import ready_process
from bench.start import write_checkpoint

if TYPE_CHECKING:
    from lowlat import Runtime

__all__ = ["MAX_TOKENS", "WARM_UP", "Ask", "ask_often", "asking", "asking_server", "main"]

WARM_UP = 3
GREEDY = ("--sampling-defaults", "lowlat")  # whatever a model's authors advise
MAX_TOKENS = 12

Ask = Callable[[list[int]], tuple[float, float]]  # a prompt to the seconds to its first token, and to the next


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every prompt at every depth, in the process and through a socket; print the rows and write them."""
    options = _options(arguments)
    target, head = options.directory / "target", options.directory / "head"
    model = Model("tiny" if options.tiny else "llama-8b")
    if not (head / "config.json").is_file():
        write_checkpoint(model, options.directory, torch.device(options.device))
    rows = []
    for depth in options.depth:
        for through, ways in (("process", _in_process), ("socket", _by_socket)):
            with ways(target, head if depth else None, depth, options) as ask:
                for length in options.prompt:
                    row = {"through": through, "prompt": length, "num_speculative_tokens": depth}
                    rows.append({**row, **_measure(ask, model.config.vocab_size, length, options.runs)})
                    print(json.dumps(rows[-1]), flush=True)
    if options.out is not None:
        stamps = stamps_of(torch.device(options.device), options.commit)
        conditions = {**stamps, "cores": os.cpu_count(), "geometry": model.name, "weights": "random"}
        write_json(options.out, {**conditions, "rows": rows})


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, must_write=False)
    parser.add_argument("--directory", type=Path, required=True, help="where the checkpoint is, or is written")
    parser.add_argument("--prompt", type=int, nargs="+", default=[128, 2048, 8192], help="tokens")
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 3], help="drafts a step")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="a tiny geometry: its figures mean nothing")
    options = parser.parse_args(arguments)
    if min((*options.prompt, options.runs)) < 1:
        parser.error("--prompt and --runs want at least 1")
    return options


def _measure(ask: Ask, vocab_size: int, length: int, runs: int) -> dict[str, Any]:
    """A row of `runs` requests."""
    first, later = ask_often(ask, vocab_size, length, runs)
    return {
        "ms_p50": round(percentile(first, 50), 3),
        "ms_p99": round(percentile(first, 99), 3),
        "ms_least": round(min(first), 3),
        "next_ms_p50": round(percentile(later, 50), 3),
        "runs": runs,
    }


def ask_often(ask: Ask, vocab_size: int, length: int, runs: int) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token, and from it to the next, of `runs` requests in a row, after some to warm up."""
    generator = torch.Generator().manual_seed(length)
    found = []
    for _ in range(WARM_UP + runs):
        found.append(ask(torch.randint(vocab_size, (length,), generator=generator).tolist()))
    first, later = ([1e3 * each[place] for each in found[WARM_UP:]] for place in range(2))
    return first, later


@contextmanager
def _in_process(target: Path, head: Path | None, depth: int, options: argparse.Namespace) -> Iterator[Ask]:
    """Requests of a Runtime here."""
    from lowlat import Runtime, SpeculativeConfig

    draft = None if head is None else SpeculativeConfig(model=head, num_speculative_tokens=depth, strict=True)
    with Runtime.load(target, draft, device=options.device, max_batch=1, max_context=_context(options)) as runtime:
        yield asking(runtime)


def asking(runtime: "Runtime") -> Ask:
    """A function that times a request of a runtime in this process, which decodes nothing else."""
    from lowlat import SamplingParams

    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

    def ask(prompt: list[int]) -> tuple[float, float]:
        begin, seen = time.perf_counter(), list[float]()
        runtime.submit(prompt, sampling)
        while runtime.busy:
            if any(output.token_ids for output in runtime.step()):
                seen.append(time.perf_counter())
        return seen[0] - begin, seen[1] - seen[0]

    return ask


def _by_socket(target: Path, head: Path | None, depth: int, options: argparse.Namespace) -> AbstractContextManager[Ask]:
    """Requests of a client of a server in another process."""
    return asking_server(target, head, depth, max_context=_context(options), device=options.device)


@contextmanager
def asking_server(target: Path, head: Path | None, depth: int, *, max_context: int, device: str) -> Iterator[Ask]:
    """A function that times a request of the blocking client, with `lowlat serve` in another process."""
    from lowlat.ipc import Client

    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/s.sock"
        draft = [] if head is None else ["--draft-model", head, "--num-speculative-tokens", depth]
        size = ["--max-batch", 1, "--max-context", max_context, "--device", device]
        command = (
            "-m",
            "lowlat.cli",
            "serve",
            "--model",
            target,
            *draft,
            *size,
            *GREEDY,
            "--endpoint",
            endpoint,
            "--json",
        )
        with ready_process(*command, stderr=subprocess.DEVNULL), Client(endpoint) as client:

            def ask(prompt: list[int]) -> tuple[float, float]:
                begin, seen = time.perf_counter(), list[float]()
                for chunk in client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True):
                    if chunk.token_ids:
                        seen.append(time.perf_counter())
                return seen[0] - begin, seen[1] - seen[0]

            yield ask


def _context(options: argparse.Namespace) -> int:
    return int(max(options.prompt)) + 2 * MAX_TOKENS


if __name__ == "__main__":
    main()
