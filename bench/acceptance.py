"""This program measures acceptance on held-out prompts, by domain, greedy and sampled, with and without drafts.

    python -P bench/acceptance.py --out bench/results/cpu/bundled.json
    python -P bench/acceptance.py --method eagle3 eagle3+suffix suffix --text plain repeating copying --temperature 0 \
        --num-speculative-tokens 4 7 --totals --limit 2 --max-tokens 64 --out bench/results/cpu/suffix.json
    python -P bench/acceptance.py --method ngram eagle3 --text plain repeating --num-speculative-tokens 1 2 4 7 \
        --totals --limit 2 --max-tokens 64 --out bench/results/cpu/ngram.json
    python -P bench/acceptance.py --method eagle3 peagle dflash dspark --draft-model peagle=DIR dflash=DIR dspark=DIR \
        --num-speculative-tokens 3 5 --limit 3 --max-tokens 64 --out bench/results/cpu/drafters.json

It decodes each prompt at S = 0 and at each S, compares the tokens, and writes rows with the commit, the machine and the
conditions. Nothing is simulated. Further rows leave out prompts whose completion repeats itself, since a small model's
loops are easy to draft. A repeating text is the prompt, the prompt again, and half of it; a copying text is the prompt,
the target's answer to it, and the prompt again.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowlat import (
    RequestMetrics,
    Runtime,
    SamplingParams,
    SpeculativeConfig,
    SpeculativeDecodingStats,
    __version__,
)
from lowlat.tools.bench.machine import commit_at, driver, processor

DEMO = Path(__file__).parent.parent / "lowlat" / "demo"
METHODS = ("eagle3", "eagle3+suffix", "mtp", "mtp+suffix", "ngram", "suffix", "peagle", "dflash", "dspark")
PARALLEL = ("peagle", "dflash", "dspark")
TEXTS = ("plain", "repeating", "copying")
LOOP = 8  # a text loops if a run of 8 tokens occurs in it more than twice


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write one JSON file."""
    options = _options(arguments)
    domains = read_prompts(options.prompts)
    rows, baselines = [], Baselines(options.max_tokens)
    for method in options.method:
        with _load(options, method) as runtime:
            for text, depth in itertools.product(options.text, options.num_speculative_tokens):
                for temperature in options.temperature:
                    bench = _Bench(options, runtime, baselines, text, depth, temperature)
                    labels = {"method": method, "text": text, "num_speculative_tokens": depth}
                    rows += [{**labels, **row} for row in bench.rows(domains)]
        rows[-1]["runs_on"] = runs_on(runtime)
    result = {
        "conditions": {
            "commit": options.commit or commit_at(DEMO) or "unknown",
            "lowlat": __version__,
            "torch": torch.__version__,
            "machine": f"{processor()}, {torch.get_num_threads()} threads",
            "target": options.target.name,
            "batch": 1,
            "max_tokens": options.max_tokens,
            "simulated": "nothing: trained weights, real prompts, real acceptance",
            "runs_on": sorted({row.pop("runs_on") for row in rows if "runs_on" in row}),
            "head": options.head.name if any("eagle3" in method for method in options.method) else None,
            **_trained(options),
            "prompts_a_domain": options.limit,
        },
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--head", type=Path, default=DEMO / "head")
    parser.add_argument(
        "--draft-model", nargs="+", default=[], metavar="METHOD=DIR", help="of peagle, dflash and dspark"
    )
    parser.add_argument("--prompts", type=Path, default=DEMO / "prompts.json", help="JSON: domain -> prompts")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["eagle3"])
    parser.add_argument("--text", nargs="+", choices=TEXTS, default=["plain"])
    parser.add_argument("--totals", action="store_true", help="rows over all domains alone")
    parser.add_argument("--chat", action="store_true", help="wrap each prompt with the model's chat template")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--limit", type=int, default=20, help="prompts a domain")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, nargs="+", default=[3])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.models = {"eagle3": options.head, **dict(each.split("=", 1) for each in options.draft_model)}
    missing = [method for method in options.method if method in PARALLEL and method not in options.models]
    if missing:
        parser.error(f"--draft-model has no directory for {', '.join(missing)}")
    return options


def _load(options: argparse.Namespace, method: str) -> Runtime:
    """A runtime that drafts by a method, as deep as any row needs."""
    name, _, text = method.partition("+")
    own: dict[str, Any] = {"method": name, "text_drafts": text or None}
    if name in options.models:
        own["model"] = options.models[name]
    config = SpeculativeConfig(num_speculative_tokens=max(options.num_speculative_tokens), strict=True, **own)
    sizes: dict[str, Any] = {"max_batch": 1, "max_context": 1024, "prefix_reuse": False}
    return Runtime.load(options.target, config, device=options.device, **sizes)


def _trained(options: argparse.Namespace) -> dict[str, Any]:
    """How the other draft models were trained, as their trainer has written it next to them."""
    logs = {}
    for method in options.method:
        path = Path(options.models.get(method, "")) / "loss.json"
        if method in PARALLEL and path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            logs[method] = {name: found[name] for name in ("parameters", "training") if name in found}
            logs[method] |= {"steps": found["log"][-1]["step"], "tokens": found["log"][-1]["tokens"]}
    return {"trained": logs} if logs else {}


class Baselines:
    """Prompts decoded without drafts, each once at a temperature; the results are kept for all methods."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._known: dict[tuple[float, tuple[int, ...] | str], tuple[list[int], float, RequestMetrics]] = {}

    def params(self, temperature: float) -> SamplingParams:
        """The sampling of a prompt's completion."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=1)

    def of(
        self, runtime: Runtime, prompt: str | list[int], temperature: float
    ) -> tuple[list[int], float, RequestMetrics]:
        """Tokens, seconds and figures of a prompt at S = 0."""
        key = (temperature, prompt if isinstance(prompt, str) else tuple(prompt))
        if key not in self._known:
            self._known[key] = decode(runtime, prompt, self.params(temperature), 0)
        return self._known[key]

    def both(
        self, runtime: Runtime, prompt: str | list[int], temperature: float, depth: int
    ) -> tuple["Sum", list[int]]:
        """A prompt decoded with drafts, its figures next to those at S = 0; and the tokens, which are compared."""
        one = Sum()
        expected, one.baseline_seconds, before = self.of(runtime, prompt, temperature)
        tokens, one.seconds, after = decode(runtime, prompt, self.params(temperature), depth)
        one.baseline_decode_seconds, one.decode_seconds = before.decode_s or 0.0, after.decode_s or 0.0
        one.prompts, one.tokens, one.steps, one.identical = 1, len(tokens), after.num_steps, tokens == expected
        if after.speculation is not None:
            one.stats.merge(after.speculation)
        return one, tokens


@dataclass(frozen=True)
class _Bench:
    """One method at one depth and temperature over one kind of text."""

    options: argparse.Namespace
    runtime: Runtime
    baselines: Baselines
    text: str
    depth: int
    temperature: float

    def rows(self, domains: dict[str, list[str]]) -> list[dict[str, Any]]:
        """Rows over all prompts, over those whose completion does not loop, and by domain."""
        rows, every, straight = [], Sum(), Sum()
        for domain, prompts in domains.items():
            own = Sum()
            for prompt in prompts[: self.options.limit]:
                one = self._decode_both(self._prompt(prompt))
                for total in (own, every) if one.loops else (own, every, straight):
                    total.add(one)
            rows.append(own.row(domain, self.temperature))
            print(json.dumps(rows[-1]), file=sys.stderr)
        totals = [every.row("all", self.temperature), straight.row("all, not looping", self.temperature)]
        return totals if self.options.totals else [*totals, *rows]

    def _prompt(self, prompt: str) -> str | list[int]:
        if self.text == "copying":
            return self._copying(prompt)
        if self.text == "repeating":
            prompt = f"{prompt}\n{prompt}\n{prompt[: len(prompt) // 2]}"
        return given_prompt(self.runtime, prompt, chat=self.options.chat)

    def _copying(self, prompt: str) -> list[int]:
        """A prompt with its answer, and the prompt again: the target stands where it began that answer."""
        tokens = _encode(self.runtime, prompt)
        answer, _, _ = self.baselines.of(self.runtime, prompt, self.temperature)
        return [*tokens, *answer, *tokens]

    def _decode_both(self, prompt: str | list[int]) -> "Sum":
        one, tokens = self.baselines.both(self.runtime, prompt, self.temperature, self.depth)
        one.loops = text_loops(tokens)
        return one


def runs_on(runtime: Runtime) -> str:
    """The device, its driver and the executor."""
    device = runtime.device_choice.device
    if device.type != "cuda":
        return f"{device}, {runtime.device_choice.executor} executor"
    name = torch.cuda.get_device_name(device)
    return f"{name}, driver {driver()}, CUDA {torch.version.cuda}, {runtime.device_choice.executor} executor"


def read_prompts(path: Path) -> dict[str, list[str]]:
    """The prompts of a JSON file by domain; a list is one domain, "all"."""
    found: dict[str, list[str]] | list[str] = json.loads(path.read_text(encoding="utf-8"))
    return {"all": found} if isinstance(found, list) else found


def given_prompt(runtime: Runtime, prompt: str, *, chat: bool) -> str | list[int]:
    """A prompt as it is, or in the model's chat template."""
    if not chat:
        return prompt
    if runtime.codec is None:
        raise SystemExit("--chat needs a tokenizer")
    text = runtime.codec.apply_chat_template([{"role": "user", "content": prompt}])
    ids: list[int] = runtime.codec.encode(text, add_special_tokens=False, allow_special=True)
    return ids


def _encode(runtime: Runtime, prompt: str) -> list[int]:
    if runtime.codec is None:
        raise SystemExit("--text copying needs a tokenizer")
    ids: list[int] = runtime.codec.encode(prompt, add_special_tokens=False)
    return ids


class Sum:
    """Figures added up over prompts."""

    def __init__(self) -> None:
        self.prompts = self.tokens = self.steps = 0
        self.seconds = self.baseline_seconds = 0.0  # from submission to the end
        self.decode_seconds = self.baseline_decode_seconds = 0.0  # without prefill
        self.identical = True
        self.loops = False
        self.stats = SpeculativeDecodingStats()

    def add(self, other: "Sum") -> None:
        self.prompts += other.prompts
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds
        self.baseline_seconds += other.baseline_seconds
        self.decode_seconds += other.decode_seconds
        self.baseline_decode_seconds += other.baseline_decode_seconds
        self.identical &= other.identical
        self.stats.merge(other.stats)

    @property
    def decoded(self) -> int:
        """Tokens of steps: each prompt's first comes out of prefill."""
        return self.tokens - self.prompts

    def row(self, domain: str, temperature: float) -> dict[str, Any]:
        stats = self.stats.to_dict()
        return {
            "domain": domain,
            "temperature": temperature,
            "prompts": self.prompts,
            "tokens": self.tokens,
            "identical": self.identical,
            "tokens_per_step": round(self.decoded / self.steps, 3) if self.steps else 0.0,
            "steps_that_verified_drafts": round(self.stats.num_drafts / self.steps, 3) if self.steps else 0.0,
            "mean_acceptance_length": round(stats["mean_acceptance_length"], 3),
            "acceptance_by_position": [round(share, 3) for share in stats["acceptance_by_position"][:3]],
            "tokens_per_s": round(self.tokens / self.seconds, 1) if self.seconds else 0.0,
            "baseline_tokens_per_s": round(self.tokens / self.baseline_seconds, 1) if self.baseline_seconds else 0.0,
            "decode_tokens_per_s": round(self.decoded / self.decode_seconds, 1) if self.decode_seconds else 0.0,
            "baseline_decode_tokens_per_s": (
                round(self.decoded / self.baseline_decode_seconds, 1) if self.baseline_decode_seconds else 0.0
            ),
        }


def decode(
    runtime: Runtime, prompt: str | list[int], params: SamplingParams, depth: int
) -> tuple[list[int], float, RequestMetrics]:
    """Tokens, seconds and figures of one request."""
    name = runtime.submit(prompt, params)
    tokens: list[int] = []
    start = time.perf_counter()
    while runtime.busy:
        for output in runtime.step(depth):
            tokens.extend(output.token_ids)
    return tokens, time.perf_counter() - start, runtime.metrics(name)


def text_loops(tokens: list[int]) -> bool:
    """Whether a run of LOOP tokens occurs in a completion more than twice."""
    runs = [tuple(tokens[k : k + LOOP]) for k in range(len(tokens) - LOOP + 1)]
    return any(runs.count(run) > 2 for run in set(runs))


if __name__ == "__main__":
    main()
