"""SpecPV beside full attention: time of steps, tokens/s over a whole schedule, and how long the tokens agree.

    python -m bench.specpv --model llama-8b --context 65536 131072 --out bench/results/h200/specpv.json
    python -m bench.specpv --model bundled --context 512 1024 --retrieval 4 8 16 --refresh 8 32 --threshold 64 \\
        --out specpv.json

    python -m bench.specpv --model llama-8b --context 65536 98304 131072 --threshold 8192 --lossless --out specpv.json
    python -m bench.specpv agreement --texts held_out.json.xz --out agreement.json        see bench/specpv_agreement.py

SpecPV is lossy, except with `--lossless`, where a step is a cycle of proposals and their verification. `bundled` is the
bundled pair, greedy, on its own texts: rows give the share of tokens that equal those of full attention at the same
place, and the place of each prompt's first different token. Other models are geometries with random weights: acceptance
is imposed, in tokens a step, and the tokens mean nothing, so nothing is said of them. Cycles take no imposed
acceptance: of a geometry lossy rows stand beside them, whose partial steps are the same, and what is left of a cycle
is its verification; `gain_by_agreement` is what these times give where a proposal is right with such a chance and
every step brings the tokens that are imposed elsewhere: above 1 it pays. A row is a context, a budget
(`specpv_n_retrieval_blocks`), a number of partial steps between refreshes and a buffer; the first of each context is
full attention, by a runtime without SpecPV. `--batch` requests decode at once; times are the host's, of steps that
bring tokens to all of them, from one's tokens to the next's, refreshes between them included.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import specpv_agreement
from bench.clock import percentile
from bench.conditions import release, stamps_of, write_json
from bench.specpv_agreement import DEMO, agreement, bundled_text
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.models.partial_kv import PartialKV, cycle_gain
from lowlat.models.target import OpenedTarget
from lowlat.tools.bench.geometry import random_target, read_geometries
from lowlat.tools.bench.step_bytes import step_bytes
from lowlat.tools.draft_model.random_models import write_draft_model
from lowlat.tools.profile.recording import random_prompts

__all__ = ["main", "run_requests"]

BUNDLED = "bundled"
AGREEMENTS = (0.9, 0.95, 0.97, 0.99, 1.0)


@dataclass
class Run:
    """The requests of one row: tokens of each, milliseconds of each step of all of them, and what the runtime counted.

    proposed   of each step, the partial steps before it that proposed and whose time it has, a request
    refreshed  of each step, the refreshes that its time has, of all requests; both of lossless SpecPV alone
    """

    tokens: list[list[int]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    proposed: list[float] = field(default_factory=list)
    refreshed: list[int] = field(default_factory=list)
    num_timed: int = 0
    accept_length: float = 1.0
    counts: dict[str, Any] = field(default_factory=dict)
    gigabytes: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every row, print it, and write all of them where that is asked for."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["agreement"]:
        return specpv_agreement.main(given[1:])
    options = _options(given)
    device = torch.device(options.device)
    stamps, rows = stamps_of(device, options.commit), []
    full: dict[int, Run] = {}
    partial: dict[int, Run] = {}
    with tempfile.TemporaryDirectory() as folder:
        for specpv in _settings(options):
            target, draft = _pair(options, Path(folder))
            config = SpeculativeConfig(
                model=draft, num_speculative_tokens=options.depth, strict=True, **_simulated(options, specpv), **specpv
            )
            with Runtime.load(target, config, **_sizes(options)) as runtime:
                for context in options.context:
                    found = run_requests(runtime, context, options)
                    full.setdefault(context, found)
                    row = _row(options, context, specpv, found, full[context])
                    sizes = runtime.geometry.partial
                    if sizes is not None:
                        row["specpv_n_spec_tokens_buf"] = sizes.buffer
                    if sizes is not None and not sizes.lossless:
                        partial[context] = found
                    elif sizes is not None and context in partial:
                        row |= _cycle(sizes, options, found, full[context], partial[context])
                    rows.append({**row, **stamps})
                    print(json.dumps(rows[-1]), flush=True)
                    if options.out is not None:
                        write_json(options.out, rows)
            release(device)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[BUNDLED, *sorted(read_geometries())], default="llama-8b")
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
    parser.add_argument("--depth", type=int, default=3, help="S")
    parser.add_argument("--accept", type=float, default=3.0, help="tokens a step that are imposed")
    parser.add_argument("--tokens", type=int, default=384, help="of each request's completion")
    parser.add_argument("--batch", type=int, default=1, help="requests that decode at once")
    parser.add_argument("--warm-up", type=int, default=4, help="steps of all requests that are not timed")
    parser.add_argument("--prompts", type=int, default=1, help="such batches of a row")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    if min(options.context) <= options.tokens:
        parser.error(f"--context {min(options.context)} leaves no prompt before --tokens {options.tokens}")
    return options


def _settings(options: argparse.Namespace) -> list[dict[str, Any]]:
    """SpecPV's options of every runtime; none for the first."""
    common = {"enable_specpv": True, "specpv_partial_threshold": options.threshold}
    lossless = {**common, "specpv_lossless": True}
    forms = [common] if not options.lossless else [lossless] if options.model == BUNDLED else [common, lossless]
    sweep = product(options.retrieval, options.refresh, options.buffer)
    keys = ("specpv_n_retrieval_blocks", "specpv_full_refresh_steps", "specpv_n_spec_tokens_buf")
    return [{}, *({**form, **dict(zip(keys, each, strict=True))} for each in sweep for form in forms)]


def _simulated(options: argparse.Namespace, specpv: dict[str, Any]) -> dict[str, Any]:
    imposed = options.model != BUNDLED and not specpv.get("specpv_lossless")
    return {"simulated_accept_length": options.accept} if imposed else {}


def _pair(options: argparse.Namespace, folder: Path) -> tuple[str | OpenedTarget, Path]:
    """The target and the draft model, which is written once."""
    if options.model == BUNDLED:
        return str(DEMO / "target"), DEMO / "head"
    geometry = read_geometries()[options.model]
    target, draft = random_target(geometry, folder / "target"), folder / "draft"
    return target, draft if draft.exists() else write_draft_model(geometry, target.config, draft)


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    sizes = {"max_batch": options.batch, "max_context": max(options.context), "device": options.device}
    if options.batch > 1:  # who decodes waits for the others' prompts, and is soon joined
        sizes |= {"max_stall_ms": 10000.0, "max_prefill_chunks": 64}
    return {**sizes, "prefix_reuse": False}


def run_requests(runtime: Runtime, context: int, options: argparse.Namespace) -> Run:
    """Run the requests of a context, a batch after the other."""
    found, before = Run(), _counts(runtime)
    accepted = drafted = 0
    for number in range(options.prompts):
        names = []
        for each in range(number * options.batch, (number + 1) * options.batch):
            prompt = _prompt(runtime, context - options.tokens, each, options)
            names.append(runtime.submit(prompt, SamplingParams(max_tokens=options.tokens, ignore_eos=True)))
        found.tokens += _drive(runtime, found, names, options.warm_up)
        for name in names:
            speculation = runtime.metrics(name).speculation
            if speculation is not None:
                accepted, drafted = accepted + speculation.total_accepted_tokens, drafted + speculation.num_drafts
    found.accept_length = 1 + accepted / max(drafted, 1)
    found.counts = {key: value - before[key] for key, value in _counts(runtime).items()}
    bucket = runtime.ladder.choose(options.batch, options.depth)
    found.gigabytes = step_bytes(runtime, bucket, [context - options.tokens / 2] * options.batch, None) / 1e9
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
        if is_lossless:
            counts = _counts(runtime)
            if is_timed:
                found.proposed += [(counts["partial_steps"] - before["partial_steps"]) / len(tokens)] * count
                found.refreshed += [counts["refreshes"] - before["refreshes"]] * count
            before = counts
        num_steps = num_steps + count if is_whole else -1
        last = now
    return list(tokens.values())


def _counts(runtime: Runtime) -> dict[str, int]:
    figures = runtime.summary().get("specpv", {})
    names = ("partial_steps", "full_steps", "refreshes", "refreshed_tokens", "verified_tokens", "accepted_tokens")
    return {name: figures.get(name, 0) for name in names}


def _prompt(runtime: Runtime, length: int, number: int, options: argparse.Namespace) -> list[int]:
    """The bundled texts one after the other, each prompt from another one on; else random tokens."""
    if options.model != BUNDLED or runtime.codec is None:
        return random_prompts(min(1000, runtime.geometry.config.vocab_size), 1, length, number)[0]
    return bundled_text(runtime.codec, length, number)


def _row(options: argparse.Namespace, context: int, specpv: dict[str, Any], found: Run, full: Run) -> dict[str, Any]:
    median = percentile(found.step_ms, 50)
    total = sum(found.step_ms)
    speed, full_speed = 1e3 * found.num_timed / total, 1e3 * full.num_timed / sum(full.step_ms)
    row: dict[str, Any] = {
        "model": options.model,
        "weights": "bundled" if options.model == BUNDLED else "random",
        "batch": options.batch,
        "context": context,
        "num_speculative_tokens": options.depth,
        "attention": "partial" if specpv else "full",
        "lossy": bool(specpv) and not specpv.get("specpv_lossless", False),
        **specpv,
        "ms_p50": round(median, 4),
        "ms_p99": round(percentile(found.step_ms, 99), 4),
        "gigabytes": round(found.gigabytes, 3),
        "tokens_per_s": round(speed, 1),
        "accept_length": round(found.accept_length, 3),
        "simulated": bool(_simulated(options, specpv)),
        "steps": len(found.step_ms),
        **found.counts,
        "ms_of_full": round(median / percentile(full.step_ms, 50), 4),
        "gigabytes_of_full": round(found.gigabytes / full.gigabytes, 4),
        "tokens_per_s_of_full": round(speed / full_speed, 4),
    }
    if found.counts["refreshes"]:
        row["ms_a_refresh"] = round(max(0.0, total - median * len(found.step_ms)) / found.counts["refreshes"], 3)
    if options.model == BUNDLED:
        share, firsts = agreement(found.tokens, full.tokens)
        row |= {"agreement": round(share, 4), "diverged_at": firsts}
    return row


def _cycle(sizes: PartialKV, options: argparse.Namespace, found: Run, full: Run, partial: Run) -> dict[str, Any]:
    """The times of a cycle of lossless SpecPV, and what they give by the chance that a proposal is right.

    A cycle is taken to be a whole buffer of proposals and their verification, and a step to bring `--accept` tokens.
    """
    proposal = percentile(partial.step_ms, 50)
    cycles = zip(found.step_ms, found.proposed, found.refreshed, strict=True)
    left: dict[int, list[float]] = {}
    for cycle, count, refreshes in cycles:
        left.setdefault(refreshes, []).append(cycle - count * proposal)
    verification, refresh = _line({refreshes: percentile(each, 50) for refreshes, each in left.items()})
    times = {"partial": proposal, "verification": verification, "full": percentile(full.step_ms, 50)}
    times["refresh"] = options.batch * refresh
    gains = {str(each): round(cycle_gain(sizes, each, options.accept, **times), 3) for each in AGREEMENTS}
    return {
        "partial_steps_a_cycle": percentile(found.proposed, 50),
        "ms_a_proposal": round(proposal, 4),
        "ms_a_verification": round(verification, 4),
        "ms_a_refresh": round(refresh, 4),
        "gain_by_agreement": gains,
    }


def _line(medians: Mapping[int, float]) -> tuple[float, float]:
    """Where the straight line nearest to values by a count begins, and how much each adds; one value: nothing."""
    if len(medians) < 2:
        return next(iter(medians.values())), 0.0
    slope, start = np.polyfit(list(medians), list(medians.values()), 1)
    return float(start), float(slope)


if __name__ == "__main__":
    raise SystemExit(main())
