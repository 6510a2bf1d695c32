"""This program times the prefill of prompts, by a whole model with random weights, in a runtime's chunks.

    python -m bench.prompts --model llama-8b --out /tmp/prompts.json
    python -m bench.prompts --model 120b --prompt 100 8192 --at-once 1 4 --out /tmp/prompts.json
    python -m bench.prompts --model llama-8b-fp8 --prompt 2048 8192 --at-once 16
    python -m bench.prompts --model llama-8b-fp8-rows --prompt 2048 8192 --at-once 16
    python -m bench.prompts --small --device cpu --prompt 50 200 --out /tmp/prompts.json
    python -m bench.prompts --prompt 8192 --at-once 16 --kernels 12
    python -m bench.prompts --model qwen3.5-27b --prompt 2048 8192 --at-once 16 --limit-s 300 --out /tmp/prompts.json

A row is a prompt's length and how many chunks ran at once (`max_prefill_chunks`): from the first chunk's arguments on
the host to the end of the last chunk, by the host's clock, nothing else running. `bench.first_token` measures the whole
way to the first token. `--kernels` adds where a prompt's time goes: its kernels by name, those that take most.
"""

import argparse
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch

from bench.lib.case import Case
from bench.lib.clock import percentile
from bench.lib.conditions import bench_parser, stamps_of, write_json
from bench.lib.model import Model
from bench.lib.step import executor_of
from bench.lib.weights import RandomParts
from lowlat.checkpoint.source import WeightSource
from lowlat.engine.mailbox.prefill_inputs import PrefillInputs
from lowlat.executors.distributed.parallel import ParallelExecutor
from lowlat.graphs import Paging
from lowlat.sequence.snapshot_book import NO_SNAPSHOTS, PREFILL_STATES
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.state import StepGeometry
from lowlat.tools.profile.recording import OURS

__all__ = ["Prompts", "main"]

WARM_UP = 2
LLAMA, QWEN3_MOE = "llama-8b", "qwen3-30b-a3b"
MODELS = {"120b": Model("gpt-oss-120b"), "20b": Model("gpt-oss-20b"), LLAMA: Model(LLAMA), QWEN3_MOE: Model(QWEN3_MOE)}
HYBRIDS, GEMMAS = ("qwen3.6-35b-a3b", "qwen3.5-27b"), ("gemma-4-31b", "gemma-4-26b-a4b", "gemma-4-e4b")
MODELS |= {name: Model(name) for name in (*HYBRIDS, *GEMMAS)}
MODELS |= {f"{name}-{kind}": Model(name, kind) for name in (LLAMA, QWEN3_MOE) for kind in ("fp8", "int4")}
MODELS[f"{LLAMA}-fp8-rows"] = Model(LLAMA, "fp8", activations="fp8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every prompt, print its row, and write the rows where that is asked for."""
    options = _options(arguments)
    device = torch.device(options.device)
    model = MODELS[options.model]
    model = Model("tiny", model.weights, activations=model.activations) if options.small else model
    shapes = model.shapes(Case(1, max(options.prompt), 0), max_prefill_chunks=max(options.at_once))
    prompts = Prompts(shapes, RandomParts(model.plan(drafts=False), model.config, device), [device])
    stamps, rows = stamps_of(device, options.commit), []
    begin = time.perf_counter()
    for length, at_once in product(options.prompt, options.at_once):
        if time.perf_counter() - begin < options.limit_s:
            ms = prompts.times(length, at_once, options.runs)
            row: dict[str, Any] = {
                "model": "tiny" if options.small else options.model,
                "prompt": length,
                "max_prefill_chunks": at_once,
                "prefill_chunk": shapes.prefill_chunk,
                "ms_p50": round(percentile(ms, 50), 3),
                "ms_least": round(min(ms), 3),
                "tokens_per_s": round(1e3 * length / percentile(ms, 50), 1),
                "runs": len(ms),
            }
            rows.append({**row, "weights": "random", **stamps})
            print(json.dumps(row), flush=True)
            if options.out is not None:
                write_json(options.out, rows)
            if options.kernels and device.type == "cuda":
                print("\n".join(prompts.list_kernels(length, at_once)[: options.kernels]), flush=True)
    prompts.close()
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = bench_parser(__doc__, must_write=False)
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-8b")
    parser.add_argument("--small", action="store_true", help="a tiny model in its format, to try everything")
    parser.add_argument("--prompt", type=int, nargs="+", default=[64, 128, 512, 2048, 8192, 32768], help="tokens")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4], help="chunks, see above")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no row after so many seconds")
    parser.add_argument("--kernels", type=int, default=0, help="kernels to list for each row, those that take most")
    options = parser.parse_args(arguments)
    if min((*options.prompt, *options.at_once, options.runs)) < 1:
        parser.error("--prompt, --at-once and --runs want at least 1")
    return options


class Prompts:
    """Prompts that are prefilled by a model whose step drafts nothing, on one device or several.

    shapes   of the programs; its context is the longest prompt's
    weights  of the target
    ranks    the shapes of each of several devices; (): there is one
    """

    def __init__(
        self,
        shapes: StepGeometry,
        weights: WeightSource,
        devices: Sequence[torch.device],
        ranks: Sequence[StepGeometry] = (),
    ) -> None:
        self._shapes = shapes
        self._executor = executor_of(ranks or (shapes,), Case(1, 0, 0), weights, devices, TreeTopology.chain(0))
        of_ranks = self._executor.ranks if isinstance(self._executor, ParallelExecutor) else [self._executor]
        for rank in of_ranks:
            for name, spec in rank.state.specs.items():
                if spec.paging is Paging.POSITIONS:
                    rank.state[name].zero_()

    def times(self, length: int, at_once: int, runs: int) -> list[float]:
        """Milliseconds of each of `runs` prefills of a prompt of so many random tokens, so many chunks at once."""
        run, found = self._prompt(length, at_once), []
        for _ in range(WARM_UP + runs):
            self._executor.synchronize()
            begin = time.perf_counter()
            run()
            self._executor.synchronize()
            found.append(1e3 * (time.perf_counter() - begin))
        return found[WARM_UP:]

    def _prompt(self, length: int, at_once: int) -> Callable[[], None]:
        """A function that prefills a prompt of so many random tokens."""
        shapes, executor = self._shapes, self._executor
        inputs = PrefillInputs(executor.state)
        tokens = torch.randint(shapes.config.vocab_size, (length,)).tolist()
        table, most = list(range(1, shapes.table_width + 1)), at_once * shapes.prefill_chunk
        names = ("", *(pool.suffix for pool in shapes.window_pools))
        commands: dict[str, Sequence[int]] = {f"prefill_table{name}": table for name in names}
        commands |= {PREFILL_STATES: NO_SNAPSHOTS}

        def run() -> None:
            for start in range(0, length, most):
                chunk = tokens[start : start + most]
                inputs.write_chunk(0, chunk, start, commands)
                executor.prefill(shapes.prefill_size(len(chunk)))

        return run

    def list_kernels(self, length: int, at_once: int) -> list[str]:
        """Where a prompt's time goes on one GPU: milliseconds, share, launches and name of kernels, the longest first.

        What no kernel fills is "(no kernel runs)"; kernels that overlap count twice, so that it may be less than zero.
        """
        from torch.profiler import ProfilerActivity, profile

        run, most = self._prompt(length, at_once), at_once * self._shapes.prefill_chunk
        run()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            run()
            self._executor.synchronize()
        events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
        events.sort(key=lambda event: event.time_range.start)
        names = self._launched(length, most)
        total_us, counts = defaultdict[str, float](float), defaultdict[str, int](int)
        for event in events:
            known = next(names, event.name) if all(part in event.name for part in OURS) else event.name
            label = re.sub(r"<.*|\(.*", "", known)
            total_us[label] += event.time_range.end - event.time_range.start
            counts[label] += 1
        whole = events[-1].time_range.end - events[0].time_range.start
        total_us["(no kernel runs)"] = whole - sum(total_us.values())
        return [
            f"{length:6} by {most:5} {time_us / 1e3:9.3f} ms {time_us / whole:6.1%} {counts[label]:5} {label}"
            for label, time_us in sorted(total_us.items(), key=lambda item: -item[1])
        ]

    def _launched(self, length: int, most: int) -> Iterator[str]:
        """The names of our kernels with their constants, in the order in which a prompt launches them."""
        for start in range(0, length, most):
            for group in self._executor.groups(self._shapes.prefill_size(min(most, length - start))):
                for call in group.kernel_calls:
                    yield call.kernel.name

    def close(self) -> None:
        """Release graphs and memory of all devices."""
        self._executor.close()


if __name__ == "__main__":
    raise SystemExit(main())
