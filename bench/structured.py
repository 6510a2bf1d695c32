"""A decode step with a grammar and without, by the host's clock between outputs of `Runtime.step`.

    python -m bench.structured --out bench/results/h200/structured.json
    python -m bench.structured --geometry tiny --context 40 --steps 40 --batch 1 --device cpu --out structured.json

The subjects are Llama-3.1-8B's shape, with random weights and imposed acceptance, and the bundled pair with its own;
passes without and with a grammar take turns. The grammar is a stand-in whose time is imposed: it copies masks that
forbid one token in a hundred and takes as long for each row as a library was measured to for a nested JSON schema
(`ROW_US`). Where acceptance is the draft model's own, text of which `FORCED` of `PERIOD` tokens are forced is decoded
with forced tokens offered as drafts and without.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.clock import percentile
from bench.conditions import stamps_of, write_json
from bench.subjects import open_subject
from lowlat.host.runtime import Runtime
from lowlat.options.request import SamplingParams
from lowlat.tools.bench.subject import Subject

__all__ = ["StandIn", "main", "measure"]

# us that a row's mask takes, by share of rows: medians, 90th and 99th percentiles of a library on a nested JSON schema
ROW_US = ((0.89, 7.0), (0.09, 50.0), (0.02, 60.0))
POOL = 64  # masks
ALLOWED = 0.99  # of the tokens
PERIOD, FORCED = 16, 12
ROOM = 64  # tokens that a slot may be behind another when its steps are timed


class StandIn:
    """A grammar that allows most tokens, or forces runs of them; see `GrammarState`.

    forced  tokens that follow each other, then as many free ones as fill PERIOD; none: all are free
    offers  whether forced tokens are offered as drafts
    """

    def __init__(self, vocab_size: int, forced: Sequence[int] = (), *, offers: bool = False) -> None:
        source = np.random.default_rng(0)
        words = -(-vocab_size // 32)
        bits = source.random((POOL, words * 32)) < ALLOWED
        self._pool = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self._times = source.choice([us for _, us in ROW_US], POOL, p=[share for share, _ in ROW_US]) * 1e-6
        self._forced, self._offers, self._place = tuple(forced), offers, 0

    def fill(self, tokens: Sequence[int], parents: Sequence[int], masks: np.ndarray) -> None:
        """Copy a mask for each row, and take the time."""
        places: list[int] = []
        for row, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            end = time.perf_counter() + self._times[token % POOL]
            places.append(self._place if row == 0 else places[parent] + 1)
            place = places[row] % PERIOD
            if place < len(self._forced):
                masks[row] = 0
                masks[row].view(np.uint32)[self._forced[place] >> 5] = 1 << (self._forced[place] & 31)
            else:
                masks[row] = self._pool[token % POOL]
            while time.perf_counter() < end:
                pass

    def advance(self, tokens: Sequence[int]) -> None:
        """Count them: imposed acceptance takes what is forbidden, too."""
        self._place += len(tokens)

    @property
    def active(self) -> bool:
        """Always."""
        return True

    @property
    def terminated(self) -> bool:
        """Never."""
        return False

    def forced(self, limit: int) -> list[int]:
        """The rest of a run."""
        place = self._place % PERIOD
        return list(self._forced[place : place + limit]) if self._offers else []


class _Passes:
    """Requests of one batch, decoded together; its figures by kind of pass."""

    def __init__(self, runtime: Runtime, prompts: list[list[int]], depth: int, window: int) -> None:
        self.runtime, self._prompts, self._window = runtime, prompts, window
        runtime.speculate(depth)

    def run(self, grammars: Sequence[StandIn | None]) -> Iterator[tuple[float, int]]:
        """us and tokens of each step that all slots took part in and none ended."""
        runtime = self.runtime
        params = SamplingParams(max_tokens=self._window, ignore_eos=True, temperature=0.0)
        for prompt, grammar in zip(self._prompts, grammars, strict=True):
            name = runtime.submit(prompt, params)
            if grammar is not None:
                runtime._sessions[name].grammar = grammar
        while runtime.busy:
            start = time.perf_counter()
            outputs = runtime.step()
            taken = (time.perf_counter() - start) * 1e6
            whole = len(outputs) == len(self._prompts) and not any(output.finish_reason for output in outputs)
            if whole and len({output.request_id for output in outputs}) == len(outputs):
                yield taken, sum(len(output.token_ids) for output in outputs)


def measure(runtime: Runtime, prompts: list[list[int]], depth: int, *, steps: int, window: int) -> dict[str, Any]:
    """The times of steps of one batch, plain and under a grammar, in turns; us."""
    passes = _Passes(runtime, prompts, depth, window)
    vocab_size, batch = runtime.model_config.vocab_size, len(prompts)
    times: dict[str, list[float]] = {"plain": [], "grammar": []}
    tokens = dict.fromkeys(times, 0)
    filled = _figures(runtime)
    while min(map(len, times.values())) < steps:
        for kind in times:
            guided = [StandIn(vocab_size) if kind == "grammar" else None for _ in range(batch)]
            found = list(passes.run(guided))[2:]
            times[kind] += [taken for taken, _ in found]
            tokens[kind] += sum(count for _, count in found)
    row: dict[str, Any] = {"num_speculative_tokens": depth, "batch": batch}
    for kind, values in times.items():
        p50, p99 = percentile(values, 50), percentile(values, 99)
        own = {"p50_us": round(p50, 1), "p99_us": round(p99, 1), "steps": len(values)}
        row[kind] = own | {"tokens_per_step": round(tokens[kind] / len(values) / batch, 3)}
    for name in ("p50_us", "p99_us"):
        row[f"{name[:3]}_over_plain"] = round(row["grammar"][name] / row["plain"][name], 4)
    since = {name: value - filled[name] for name, value in _figures(runtime).items()}
    row["mask_us"] = round(since["mask_s"] * 1e6 / since["num_mask_steps"], 1)
    row["rows_wait_us"] = round(since["rows_wait_s"] * 1e6 / since["num_mask_steps"], 1)
    return row


def _figures(runtime: Runtime) -> dict[str, float]:
    names = ("mask_s", "rows_wait_s", "num_mask_steps")
    found = runtime.summary().get("structured_output", {})
    return {name: found.get(name, 0) for name in names}


def measure_forced(runtime: Runtime, prompt: list[int], depth: int, *, steps: int, window: int) -> dict[str, Any]:
    """Tokens a second of text that is mostly forced, with forced tokens offered as drafts and without."""
    passes = _Passes(runtime, [prompt], depth, window)
    vocab_size = runtime.model_config.vocab_size
    run = np.random.default_rng(1).integers(0, vocab_size, FORCED).tolist()
    figures = {}
    for name, offers in (("without", False), ("with", True)):
        taken, tokens, count = 0.0, 0, 0
        while count < steps:
            found = list(passes.run([StandIn(vocab_size, run, offers=offers)]))[2:]
            taken, tokens = taken + sum(us for us, _ in found), tokens + sum(number for _, number in found)
            count += len(found)
        figures[name] = {"tokens_per_s": round(tokens / taken * 1e6, 1), "tokens_per_step": round(tokens / count, 3)}
    ratio = figures["with"]["tokens_per_s"] / figures["without"]["tokens_per_s"]
    return {"num_speculative_tokens": depth, "forced_share": FORCED / PERIOD, **figures, "ratio": round(ratio, 3)}


def _measure_subject(subject: Subject, options: argparse.Namespace, *, imposed: bool) -> dict[str, Any]:
    rows, forced = [], []
    context = options.context + options.window + ROOM
    prompts = subject.prompts.some([options.context] * max(options.batch))
    for depth in options.depth:
        with subject.load(depth, max_batch=max(options.batch), max_context=context) as runtime:
            sizes = {"steps": options.steps, "window": options.window}
            for batch in options.batch:
                rows.append(measure(runtime, prompts[:batch], depth, **sizes))
                print(subject.name, rows[-1], flush=True)
            if depth and not imposed:
                forced.append(measure_forced(runtime, prompts[0], depth, **sizes))
                print(subject.name, forced[-1], flush=True)
    return {"subject": subject.name, "imposed_acceptance": imposed, "rows": rows, "forced": forced}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every subject, print its rows, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="result file")
    parser.add_argument("--geometry", default="llama-8b", help="of the subject with random weights; none: left out")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--window", type=int, default=256, help="tokens that a request decodes")
    parser.add_argument("--steps", type=int, default=2000, help="that are timed of each kind, at least")
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 3], help="S")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="where there is no git checkout to ask")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    running = {"device": options.device}
    subjects = []
    if options.geometry != "none":
        with open_subject(running, geometry=options.geometry, accept_length=3.0) as subject:
            subjects.append(_measure_subject(subject, options, imposed=True))
    with open_subject(running) as subject:
        subjects.append(_measure_subject(subject, options, imposed=False))
    settings = {name: getattr(options, name) for name in ("context", "window", "steps")}
    settings |= {"row_us": ROW_US, "allowed": ALLOWED}
    stamps = stamps_of(torch.device(options.device), options.commit)
    write_json(options.out, {**stamps, "settings": settings, "subjects": subjects})
    return 0


if __name__ == "__main__":
    sys.exit(main())
