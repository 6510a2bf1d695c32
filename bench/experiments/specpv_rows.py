"""The rows of `bench.experiments.specpv`: times of steps, memory, and what cycles of lossless SpecPV take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.experiments.specpv_agreement import agreement
from bench.lib.clock import percentile
from lowlat import Runtime
from lowlat.models.partial_kv import PartialKV, cycle_gain

__all__ = ["COLUMNS", "Case", "Run", "cycle", "memory", "row", "table"]

AGREEMENTS = (0.9, 0.95, 0.97, 0.99, 1.0)
COLUMNS = (
    ("model", "model"),
    ("batch", "batch"),
    ("context", "context"),
    ("num_speculative_tokens", "S"),
    ("attention", "attention"),
    ("ms_p50", "ms"),
    ("tokens_per_s", "tokens/s"),
    ("tokens_per_s_of_full", "of full"),
    ("accept_length", "tokens a step"),
    ("ms_a_refresh", "ms a refresh"),
    ("kv_cache_mib", "KV MiB"),
    ("key_summary_mib", "summaries MiB"),
    ("block_lists_mib", "lists MiB"),
)


@dataclass(frozen=True)
class Case:
    """The conditions that a row of full attention and those of SpecPV share.

    simulated_acceptance  the probability with which each draft is accepted; None: nothing is imposed
    """

    model: str
    batch: int
    context: int
    depth: int
    simulated_acceptance: float | None


@dataclass
class Run:
    """The requests of one row: tokens of each, milliseconds of each step of all of them, and what the runtime counted.

    proposed   of each step, the partial steps before it that proposed and whose time it has, a request
    refreshed  of each step, the refreshes that its time has, of all requests; both of lossless SpecPV alone
    experts    distinct experts a layer of steps that were not timed, of an MoE layer
    """

    tokens: list[list[int]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    proposed: list[float] = field(default_factory=list)
    refreshed: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    num_timed: int = 0
    accept_length: float = 1.0
    counts: dict[str, Any] = field(default_factory=dict)
    gigabytes: float = 0.0


def row(case: Case, specpv: Mapping[str, Any], found: Run, full: Run) -> dict[str, Any]:
    """The row of a case, next to the run of full attention.

    specpv  its options; none: this is full attention
    """
    middle, total = percentile(found.step_ms, 50), sum(found.step_ms)
    speed, full_speed = 1e3 * found.num_timed / total, 1e3 * full.num_timed / sum(full.step_ms)
    is_bundled = case.simulated_acceptance is None and case.model == "bundled"
    values: dict[str, Any] = {
        "model": case.model,
        "weights": "bundled" if case.model == "bundled" else "random",
        "batch": case.batch,
        "context": case.context,
        "num_speculative_tokens": case.depth,
        "attention": "partial" if specpv else "full",
        "lossy": bool(specpv) and not specpv.get("specpv_lossless", False),
        **specpv,
        "ms_p50": round(middle, 4),
        "ms_p99": round(percentile(found.step_ms, 99), 4),
        "gigabytes": round(found.gigabytes, 3),
        "tokens_per_s": round(speed, 1),
        "accept_length": round(found.accept_length, 3),
        "simulated": case.simulated_acceptance is not None,
        "simulated_acceptance": case.simulated_acceptance,
        "steps": len(found.step_ms),
        **found.counts,
        "ms_of_full": round(middle / percentile(full.step_ms, 50), 4),
        "gigabytes_of_full": round(found.gigabytes / full.gigabytes, 4),
        "tokens_per_s_of_full": round(speed / full_speed, 4),
    }
    if found.experts:
        values["distinct_experts"] = round(sum(found.experts) / len(found.experts), 2)
    if found.counts["refreshes"]:
        values["ms_a_refresh"] = round(max(0.0, total - middle * len(found.step_ms)) / found.counts["refreshes"], 3)
    if is_bundled:
        share, firsts = agreement(found.tokens, full.tokens)
        values |= {"agreement": round(share, 4), "diverged_at": firsts}
    return values


def memory(runtime: Runtime, context: int) -> dict[str, Any]:
    """MiB of the target's keys and values, of SpecPV's summaries and lists, for all slots with so long a context; and
    the plan of the whole runtime, whose `max_context` may be longer."""
    share = context / runtime.config.max_context / 2**20
    sizes = dict.fromkeys(("kv_cache", "key_summary", "block_lists"), 0.0)
    for name, buffer in runtime.executor.state.items():
        kind = "kv_cache" if name.startswith(("k_cache.", "v_cache.")) else name.partition(".")[0]
        if kind in sizes:
            sizes[kind] += share * buffer.numel() * buffer.element_size()
    plan = {name: round(value / 2**20, 1) for name, value in runtime.memory[0].need.parts().items()}
    own = {f"{name}_mib": round(value, 3) for name, value in sizes.items()}
    return {**own, "max_context": runtime.config.max_context, "plan_mib": plan}


def cycle(sizes: PartialKV, batch: int, tokens_a_step: float, found: Run, full: Run, partial: Run) -> dict[str, Any]:
    """The times of a cycle of lossless SpecPV, and what they give by the chance that a proposal is right.

    A cycle is taken to be a whole buffer of proposals and their verification.
    """
    proposal = percentile(partial.step_ms, 50)
    cycles = zip(found.step_ms, found.proposed, found.refreshed, strict=True)
    left: dict[int, list[float]] = {}
    for ms, count, refreshes in cycles:
        left.setdefault(refreshes, []).append(ms - count * proposal)
    verification, refresh = _line({refreshes: percentile(each, 50) for refreshes, each in left.items()})
    times = {"partial": proposal, "verification": verification, "full": percentile(full.step_ms, 50)}
    times["refresh"] = batch * refresh
    gains = {str(each): round(cycle_gain(sizes, each, tokens_a_step, **times), 3) for each in AGREEMENTS}
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


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, of a column each the key and the title; what a row lacks stays empty."""
    yield f"| {' | '.join(title for _, title in columns)} |"
    yield "|---" * len(columns) + "|"
    for each in rows:
        yield f"| {' | '.join(str(each.get(key, '')) for key, _ in columns)} |"
