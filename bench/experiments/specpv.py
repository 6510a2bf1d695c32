"""SpecPV next to full attention: time of steps, tokens/s over a whole schedule, memory, and how long the tokens agree.

    python -m bench.experiments.specpv --model gpt-oss-120b llama-8b --context 16384 65536 --depth 3 5 --out FILE
    python -m bench.experiments.specpv --model bundled --context 512 --retrieval 4 8 16 --refresh 8 --out FILE
    python -m bench.experiments.specpv --model llama-8b --context 65536 131072 --lossless --out specpv.json
    python -m bench.experiments.specpv agreement --texts held_out.json.xz --out FILE      see `specpv_agreement`

SpecPV is lossy, except with `--lossless`, where a step is a cycle of proposals and their verification. `bundled` is the
bundled pair, greedy, on its own texts: rows give the share of tokens that equal those of full attention at the same
place, and the place of each prompt's first different token. Other models are geometries with random weights: each draft
is accepted with a probability that is imposed (`simulated_acceptance`), the same at every place and on both sides, and
the tokens mean nothing, so nothing is said of them. Cycles take no imposed acceptance: of a geometry lossy rows stand
next to them, whose partial steps are the same, and what is left of a cycle is its verification; `gain_by_agreement` is
what these times give where a proposal is right with such a chance and every step brings the tokens that the imposed
probability comes to: above 1 it pays.

A row is a model, `--batch` requests that decode at once, a context, a draft length, and SpecPV's budget
(`specpv_n_retrieval_blocks`), partial steps between refreshes and buffer; full attention, by a runtime without SpecPV,
comes first. All contexts and draft lengths of a row's other conditions share a runtime of the largest of each. Times
are the host's, of steps that bring tokens to all requests, from one's tokens to the next's, refreshes between them
included. `kv_cache_mib`, `key_summary_mib` and `block_lists_mib` are of the row's requests and context; `plan_mib` is
the runtime's whole plan. Rows are written as they come. A batch above the first that the device has no memory for is
left out, and named.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.experiments import specpv_agreement
from bench.experiments.specpv_agreement import DEMO, bundled_text
from bench.experiments.specpv_rows import COLUMNS, Case, Run, cycle, memory, row, table
from bench.lib.conditions import release, stamps_of, write_json
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.models.target import OpenedTarget
from lowlat.options.acceptance import expected_accept_length
from lowlat.tools.bench.geometry import random_target, read_geometries
from lowlat.tools.bench.step_bytes import step_bytes
from lowlat.tools.draft_model.random_models import write_draft_model
from lowlat.tools.profile.recording import chosen_experts, random_prompts

__all__ = ["main", "run_requests"]

BUNDLED = "bundled"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every row, print it, write all of them where that is asked for, and print a table."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["agreement"]:
        return specpv_agreement.main(given[1:])
    options = _options(given)
    bench = _Bench(options, stamps_of(torch.device(options.device), options.commit))
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        for batch, model in product(options.batch, options.model):
            for specpv in _settings(options, model):
                if time.monotonic() > end:
                    break
                if not bench.measure(model, batch, specpv, Path(folder)):
                    break
    print("\n".join(table(bench.rows, COLUMNS)))
    return 0


@dataclass
class _Bench:
    """Rows as they are measured, and the runs of full attention and of lossy SpecPV that others stand next to."""

    options: argparse.Namespace
    stamps: Mapping[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    full: dict[Case, Run] = field(default_factory=dict)
    partial: dict[Case, Run] = field(default_factory=dict)

    def measure(self, model: str, batch: int, specpv: dict[str, Any], folder: Path) -> bool:
        """Measure a runtime at every context and draft length; False where the device has no memory for it."""
        options = self.options
        acceptance = options.simulated_acceptance if _is_imposed(model, specpv) else None
        target, draft = _pair(options, model, folder)
        config = SpeculativeConfig(
            model=draft,
            num_speculative_tokens=max(options.depth),
            strict=True,
            simulated_acceptance=acceptance,
            **specpv,
        )
        try:
            runtime = Runtime.load(target, config, **_sizes(options, batch))
        except ConfigError as error:
            if batch == min(options.batch):
                raise
            print(f"left out: {model}, batch {batch}: {error}", flush=True)
            return False
        with runtime:
            for context, depth in product(options.context, options.depth):
                runtime.speculate(depth)
                self._add(runtime, Case(model, batch, context, depth, acceptance), specpv)
        release(torch.device(options.device))
        return True

    def _add(self, runtime: Runtime, case: Case, specpv: dict[str, Any]) -> None:
        key = replace(case, simulated_acceptance=None)
        found = run_requests(runtime, case, self.options)
        full = self.full.setdefault(key, found)
        made = row(case, specpv, found, full) | memory(runtime, case.context)
        sizes = runtime.geometry.partial
        if sizes is not None:
            made["specpv_n_spec_tokens_buf"] = sizes.buffer
        if sizes is not None and not sizes.lossless:
            self.partial[key] = found
        elif sizes is not None and key in self.partial:
            tokens_a_step = expected_accept_length(self.options.simulated_acceptance, case.depth)
            made |= cycle(sizes, case.batch, tokens_a_step, found, full, self.partial[key])
        self.rows.append({**made, **self.stamps})
        print(json.dumps(self.rows[-1]), flush=True)
        if self.options.out is not None:
            write_json(self.options.out, self.rows)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [BUNDLED, *sorted(read_geometries())]
    parser.add_argument("--model", choices=models, nargs="+", default=["llama-8b"])
    parser.add_argument("--context", type=int, nargs="+", default=[65536, 131072], help="positions, text included")
    parser.add_argument("--retrieval", type=int, nargs="+", default=[256], help="blocks that each head chooses")
    parser.add_argument("--refresh", type=int, nargs="+", default=[32], help="partial steps between refreshes")
    parser.add_argument("--threshold", type=int, default=4096)
    parser.add_argument(
        "--buffer",
        type=int,
        nargs="+",
        default=[128],
        help="positions that partial steps may write; lossless, 128: what the runtime takes by itself",
    )
    parser.add_argument("--lossless", action="store_true", help="what they say is verified; of a geometry besides")
    parser.add_argument("--depth", type=int, nargs="+", default=[3], help="S")
    parser.add_argument(
        "--simulated-acceptance",
        type=float,
        default=0.7,
        help="of a geometry, the probability with which each draft is accepted, at every S and on both sides",
    )
    parser.add_argument("--tokens", type=int, default=384, help="of each request's completion")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="requests that decode at once")
    parser.add_argument("--warm-up", type=int, default=8, help="steps of all requests that are not timed")
    parser.add_argument("--prompts", type=int, default=1, help="such batches of a row")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no other runtime is loaded")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if min(options.context) <= options.tokens:
        parser.error(f"--context {min(options.context)} leaves no prompt before --tokens {options.tokens}")
    if options.lossless and len(options.depth) > 1:
        parser.error("--lossless takes one --depth: what a step verifies is sized for it")
    options.batch, options.context = sorted(options.batch), sorted(options.context)
    return options


def _settings(options: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """SpecPV's options of every runtime; none for the first."""
    common = {"enable_specpv": True, "specpv_partial_threshold": options.threshold}
    lossless = {**common, "specpv_lossless": True}
    forms = [common] if not options.lossless else [lossless] if model == BUNDLED else [common, lossless]
    sweep = product(options.retrieval, options.refresh, options.buffer)
    keys = ("specpv_n_retrieval_blocks", "specpv_full_refresh_steps", "specpv_n_spec_tokens_buf")
    return [{}, *({**form, **dict(zip(keys, each, strict=True))} for each in sweep for form in forms)]


def _is_imposed(model: str, specpv: dict[str, Any]) -> bool:
    return model != BUNDLED and not specpv.get("specpv_lossless")


def _pair(options: argparse.Namespace, model: str, folder: Path) -> tuple[str | OpenedTarget, Path]:
    """The target and the draft model, which is written once."""
    if model == BUNDLED:
        return str(DEMO / "target"), DEMO / "head"
    geometry, device = read_geometries()[model], torch.device(options.device)
    target, draft = random_target(geometry, folder / model, device=device), folder / f"{model}-draft"
    return target, draft if draft.exists() else write_draft_model(geometry, target.config, draft)


def _sizes(options: argparse.Namespace, batch: int) -> dict[str, Any]:
    sizes = {"max_batch": batch, "max_context": max(options.context), "device": options.device}
    if batch > 1:  # who decodes waits for the others' prompts, and is soon joined
        sizes |= {"max_stall_ms": 10000.0, "max_prefill_chunks": 64}
    return sizes


def run_requests(runtime: Runtime, case: Case, options: argparse.Namespace) -> Run:
    """Run the requests of a case, a batch after the other."""
    found, before = Run(), _counts(runtime)
    accepted = drafted = 0
    for number in range(options.prompts):
        names = []
        for each in range(number * case.batch, (number + 1) * case.batch):
            prompt = _prompt(runtime, case, options.tokens, each)
            names.append(runtime.submit(prompt, SamplingParams(max_tokens=options.tokens, ignore_eos=True, seed=each)))
        found.tokens += _drive(runtime, found, names, options.warm_up)
        for name in names:
            speculation = runtime.metrics(name).speculation
            if speculation is not None:
                accepted, drafted = accepted + speculation.total_accepted_tokens, drafted + speculation.num_drafts
    found.accept_length = 1 + accepted / max(drafted, 1)
    found.counts = {key: value - before[key] for key, value in _counts(runtime).items()}
    bucket = runtime.ladder.choose(case.batch, case.depth)
    lengths = [case.context - options.tokens / 2] * case.batch
    experts = fmean(found.experts) if found.experts else None
    found.gigabytes = step_bytes(runtime, bucket, lengths, experts) / 1e9
    return found


def _drive(runtime: Runtime, found: Run, names: Sequence[str], warm_up: int) -> list[list[int]]:
    """Step requests to their end; timed are steps of all of them, but the first ones. Returns the tokens of each."""
    tokens: dict[str, list[int]] = {name: [] for name in names}
    last, num_steps = 0.0, -1  # what comes first comes out of prefill
    is_lossless = runtime.geometry.partial is not None and runtime.geometry.partial.lossless
    before = _counts(runtime)
    while runtime.busy:
        outputs = runtime.step()
        now = time.perf_counter()
        for output in outputs:
            tokens[output.request_id] += output.token_ids
        if not outputs:  # steps that only propose count with the one that verifies
            continue
        is_whole = {output.request_id for output in outputs} == tokens.keys()
        is_timed, count = is_whole and num_steps >= warm_up, len(outputs) // len(tokens)
        if is_timed:
            found.step_ms += [1e3 * (now - last) / count] * count
            found.num_timed += sum(len(output.token_ids) for output in outputs)
        elif is_whole and num_steps >= 0:
            found.experts += _chosen_experts(runtime)
            now = time.perf_counter()
        if is_lossless:
            counts = _counts(runtime)
            if is_timed:
                found.proposed += [(counts["partial_steps"] - before["partial_steps"]) / len(tokens)] * count
                found.refreshed += [counts["refreshes"] - before["refreshes"]] * count
            before = counts
        num_steps = num_steps + count if is_whole else -1
        last = now
    return list(tokens.values())


def _chosen_experts(runtime: Runtime) -> list[int]:
    """Distinct experts a layer of the step before; it waits for the device."""
    if runtime.model_config.experts is None or not runtime.scheduler.num_active:
        return []
    return [chosen_experts(runtime, runtime.scheduler.choose_bucket(runtime.num_speculative_tokens))]


def _counts(runtime: Runtime) -> dict[str, int]:
    figures = runtime.summary().get("specpv", {})
    names = ("partial_steps", "full_steps", "refreshes", "refreshed_tokens", "verified_tokens", "accepted_tokens")
    return {name: figures.get(name, 0) for name in names}


def _prompt(runtime: Runtime, case: Case, room: int, number: int) -> list[int]:
    """A prompt that leaves room for a completion: bundled texts, or random tokens."""
    length = case.context - room
    if case.model != BUNDLED or runtime.codec is None:
        return random_prompts(min(1000, runtime.geometry.config.vocab_size), 1, length, number)[0]
    return bundled_text(runtime.codec, length, number)


if __name__ == "__main__":
    raise SystemExit(main())
