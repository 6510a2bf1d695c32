"""The time from a prompt's last word to the first token, where all before it was read while it was written.

    python -m bench.growing_prompts --geometry llama-8b --out bench/results/h200/growing_prompts.json
    python -m bench.growing_prompts --geometry tiny --device cpu --prompt 300 --runs 2 --out /tmp/growing.json

Prompts of random tokens, of which nothing is cached. `whole`: sent at once, from `submit` to the step that returns the
first token. `grown`: the same prompt, appended in pieces that are read as they come, and then its last tokens with
`finish`, from that `append` on. `confirmed`: finished on trial a while before, from the last `finish` on. The tokens of
all are compared: the file says whether they are the same. `pause`: what `Runtime.pause` takes of a request that decodes
after such a prompt, and `resume` to its next token, where its blocks stay and where they were needed meanwhile.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.lib.clock import percentile
from bench.lib.conditions import stamps_of, write_json
from bench.lib.subjects import known_geometry
from lowlat import Runtime, SamplingParams
from lowlat.tools.bench.geometry import random_target

__all__ = ["main"]

SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)
LONGER = SamplingParams(max_tokens=64, ignore_eos=True)
PIECE = 64  # tokens that are appended at once
LAST = 4  # tokens of the last word
STEPS_ON_TRIAL = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the file; returns 1 where tokens differ."""
    options = _options(arguments)
    rows: list[dict[str, Any]] = []
    same = True
    longest = max(options.prompt) + LONGER.max_tokens
    with TemporaryDirectory() as folder:
        device = torch.device("cuda:0" if options.device == "auto" else options.device)
        model = random_target(known_geometry(options.geometry), Path(folder), device=device)
        with Runtime.load(
            model, device=options.device, max_batch=1, max_context=longest, kv_blocks=options.kv_blocks,
            prefix_reuse=False,
        ) as runtime:  # fmt: skip
            for length in options.prompt:
                found, equal = _measure(runtime, length, options.runs)
                rows += found
                same = same and equal
    for row in rows:
        print(json.dumps(row), flush=True)
    stamps = stamps_of(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"), options.commit)
    facts = {"model": options.geometry, "weights": "random", "piece": PIECE, "last": LAST, "same_tokens": same}
    write_json(options.out, {**facts, **stamps, "rows": rows})
    print(json.dumps({"same_tokens": same}))
    return int(not same)


def _measure(runtime: Runtime, length: int, runs: int) -> tuple[list[dict[str, Any]], bool]:
    ways: dict[str, Callable[[Runtime, list[int]], tuple[list[int], float]]] = {
        "whole": _whole, "grown": _grown, "confirmed": _confirmed,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(length)
    times: dict[str, list[float]] = {name: [] for name in (*ways, "pause", "resume", "pause_moved", "resume_moved")}
    same = True
    for run in range(runs + 1):
        prompt = torch.randint(runtime.model_config.vocab_size, (length,), generator=generator).tolist()
        found = {}
        for name, way in ways.items():
            found[name], seconds = way(runtime, prompt)
            times[name] += [seconds] * (run > 0)  # the first launch of a program loads it
        same = same and found["grown"] == found["whole"] == found["confirmed"]
        for ending, moves in (("", False), ("_moved", True)):
            tokens, paused, resumed = _paused(runtime, prompt, moves=moves)
            same = same and tokens[: len(found["whole"])] == found["whole"]
            times[f"pause{ending}"] += [paused] * (run > 0)
            times[f"resume{ending}"] += [resumed] * (run > 0)
    rows = [
        {"prompt": length, "way": name, "ms_p50": 1e3 * percentile(each, 50), "ms_most": 1e3 * max(each), "runs": runs}
        for name, each in times.items()
    ]
    return rows, same


def _to_first(runtime: Runtime, begin: float) -> tuple[list[int], float]:
    """Step to the first token, and to the end; the tokens, and the seconds from `begin` to the first."""
    tokens: list[int] = []
    seconds = 0.0
    while runtime.busy:
        for output in runtime.step():
            seconds = seconds if tokens else time.perf_counter() - begin
            tokens += output.token_ids
    return tokens, seconds


def _whole(runtime: Runtime, prompt: list[int]) -> tuple[list[int], float]:
    begin = time.perf_counter()
    runtime.submit(prompt, SAMPLING)
    return _to_first(runtime, begin)


def _grown(runtime: Runtime, prompt: list[int]) -> tuple[list[int], float]:
    handle = runtime.open_prompt(SAMPLING)
    for start in range(0, len(prompt) - LAST, PIECE):
        handle.append(prompt[start : min(start + PIECE, len(prompt) - LAST)])
        while runtime.busy:
            runtime.step()
    begin = time.perf_counter()
    handle.append(prompt[-LAST:])
    handle.finish()
    return _to_first(runtime, begin)


def _confirmed(runtime: Runtime, prompt: list[int]) -> tuple[list[int], float]:
    handle = runtime.open_prompt(SAMPLING)
    handle.append(prompt)
    handle.finish(speculative=True)
    while runtime.busy and runtime.metrics(handle.request_id).completion_tokens < STEPS_ON_TRIAL:
        runtime.step()
    begin = time.perf_counter()
    handle.finish()
    return _to_first(runtime, begin)


def _paused(runtime: Runtime, prompt: list[int], *, moves: bool) -> tuple[list[int], float, float]:
    """The tokens of a request that is paused once, and the seconds of `pause` and from `resume` to its next token.

    moves  another request needs its blocks meanwhile, or as many of them as that one is long
    """
    name = runtime.submit(prompt, LONGER)
    tokens: list[int] = []
    while len(tokens) < 8:
        tokens += [token for output in runtime.step() for token in output.token_ids]
    begin = time.perf_counter()
    runtime.pause(name)
    paused = time.perf_counter() - begin
    if moves:
        runtime.submit(prompt[::-1], SAMPLING)
        while runtime.busy:
            for output in runtime.step():
                tokens += output.token_ids if output.request_id == name else ()
    begin = time.perf_counter()
    runtime.resume(name)
    later: list[int] = []
    while not later:
        later = [token for output in runtime.step() for token in output.token_ids]
    resumed = time.perf_counter() - begin
    tokens += later
    while runtime.busy:
        tokens += [token for output in runtime.step() for token in output.token_ids]
    return tokens, paused, resumed


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="llama-8b")
    parser.add_argument("--prompt", type=int, nargs="+", default=[8192 + LAST], help="tokens")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kv-blocks", type=int, default=None, help="default: what one request needs")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if min(options.prompt) <= PIECE or options.runs < 1:
        parser.error(f"--prompt wants more than {PIECE} tokens, and --runs at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
