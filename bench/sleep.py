"""This program measures a runtime's sleep and wake: freed memory, times beside a pinned copy's, tokens, prefixes.

    python -m bench.sleep --geometry llama-8b --out bench/results/h200/sleep.json
    python -m bench.sleep --geometry tiny --device cpu --prompt 200 --out /tmp/sleep.json

Weights are random. `copy_s` is the best of some copies of as many bytes as weights have, from pinned host memory: what
no wake can beat. `step_ms` stands next to that of a runtime that cannot sleep, which lies in torch's own memory.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.lib.clock import percentile
from bench.lib.conditions import bench_parser, release, stamps_of, write_json
from bench.lib.subjects import known_geometry
from lowlat import Runtime, SamplingParams
from lowlat.executors.residence.host_memory import HostMemory
from lowlat.tools.bench.geometry import random_target

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the file; returns 1 where tokens differ after a wake."""
    options = _options(arguments)
    device = torch.device(options.device)
    plain = _measure(options, device, can_sleep=False)
    release(device)
    found = _measure(options, device, can_sleep=True)
    release(device)
    copy_s = _copy_s(found["host_bytes"], device, options.repeats)
    wake_s = percentile(found["wake_s"], 50)
    result = {
        "model": options.geometry,
        "weights": "random",
        **{name: getattr(options, name) for name in ("max_context", "prompt", "tokens", "repeats")},
        **stamps_of(device, options.commit),
        "copy_s": copy_s,
        "copy_gb_per_s": found["host_bytes"] / copy_s / 1e9 if copy_s else None,
        "wake_over_copy": wake_s / copy_s if copy_s else None,
        "plain": plain,
        "can_sleep": found,
        "same_tokens": found["same_tokens"] and plain["tokens"] == found["tokens"],
    }
    for each in (plain, found):
        del each["tokens"]
    write_json(options.out, result)
    print(json.dumps({name: result[name] for name in ("copy_s", "wake_over_copy", "same_tokens")} | {"wake_s": wake_s}))
    return int(not result["same_tokens"])


def _measure(options: argparse.Namespace, device: torch.device, *, can_sleep: bool) -> dict[str, Any]:
    """One runtime's figures: of steps, and of sleeps and wakes where it can."""
    with TemporaryDirectory() as folder:
        begin = time.perf_counter()
        model = random_target(known_geometry(options.geometry), Path(folder), device=device)
        with Runtime.load(
            model, device=options.device, max_batch=1, max_context=options.max_context, can_sleep=can_sleep,
            host_cache_gib=options.host_cache_gib,
        ) as runtime:  # fmt: skip
            found: dict[str, Any] = {"load_s": time.perf_counter() - begin}
            prompt = [1 + number * 7919 % (runtime.model_config.vocab_size - 1) for number in range(options.prompt)]
            _answer(runtime, prompt[:9], options.tokens)  # the first launch of a program loads it
            first_s, step_ms, found["tokens"] = _answer(runtime, prompt, options.tokens)
            found |= {"cold_first_token_s": first_s, "step_ms": percentile(step_ms, 50)}
            found["step_ms_p99"] = percentile(step_ms, 99)
            if can_sleep:
                found |= _sleeps(runtime, options, device, prompt, found["tokens"])
            return found


def _sleeps(
    runtime: Runtime, options: argparse.Namespace, device: torch.device, prompt: list[int], expected: list[int]
) -> dict[str, Any]:
    rows: dict[str, list[float]] = {name: [] for name in ("sleep_s", "wake_s", "first_token_s", "step_ms_after_wake")}
    free: dict[str, list[int]] = {"awake": [_free(device)], "asleep": []}
    same = True
    for _ in range(options.repeats):
        runtime.sleep()
        free["asleep"].append(_free(device))
        runtime.wake()
        free["awake"].append(_free(device))
        first_s, step_ms, tokens = _answer(runtime, prompt, options.tokens)
        same = same and tokens == expected
        own = runtime.summary()["sleep"]
        for name, value in zip(rows, (own["sleep_s"], own["wake_s"], first_s, percentile(step_ms, 50)), strict=True):
            rows[name].append(value)
    kept = {name: own[name] for name in ("device_bytes", "host_bytes")}
    return {**rows, "free_bytes": free, **kept, "same_tokens": same, "tiers": runtime.summary()["kv"]["tiers"]}


def _answer(runtime: Runtime, prompt: list[int], count: int) -> tuple[float, list[float], list[int]]:
    """Seconds to the first token, milliseconds of each step after it, and the tokens."""
    begin = last = time.perf_counter()
    runtime.submit(prompt, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
    tokens: list[int] = []
    first_s, step_ms = 0.0, []
    while runtime.busy:
        for output in runtime.step():
            now = time.perf_counter()
            if tokens:
                step_ms.append(1e3 * (now - last))
            elif output.token_ids:
                first_s = now - begin
            last = now
            tokens.extend(output.token_ids)
    return first_s, step_ms, tokens


def _free(device: torch.device) -> int:
    """Free bytes of a GPU, whoever's; 0 for a CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def _copy_s(num_bytes: int, device: torch.device, repeats: int) -> float:
    """The best time of a copy from pinned memory; 0.0 on a CPU, where nothing is copied."""
    if device.type != "cuda" or not num_bytes:
        return 0.0
    host, there = HostMemory(num_bytes, device), torch.empty(num_bytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        there.copy_(host.bytes, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    host.close()
    return min(times[1:])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__)
    parser.add_argument("--geometry", default="llama-8b", help="with random weights")
    parser.add_argument("--max-context", type=int, default=16384)
    parser.add_argument("--prompt", type=int, default=8200, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5, help="sleeps and wakes")
    parser.add_argument("--host-cache-gib", type=float, default=4.0)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
