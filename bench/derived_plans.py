"""Whole decode steps with a GPU's tuning table and without it, next to each other.

    python -m bench.derived_plans --out bench/results/h200/derived_plans.json

Both steps have the same random weights and are replayed in turns; they differ in the plans of their launches alone, and
no plan changes a bit: what they commit is compared. A row has both times, their ratio and the launches whose plans
differ. Fails where the GPU has no table, where tokens differ, and where derived steps take more than a tenth longer.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch

from bench.lib.case import Case
from bench.lib.clock import Timed, own_stream, round_robin
from bench.lib.conditions import release, stamps_of, summary_of, timing_parser, write_json
from bench.lib.model import Model
from bench.lib.step import Step
from bench.lib.wall import measure_wall
from bench.lib.weights import Weights, hold
from lowlat.errors import ConfigError, LowlatError
from lowlat.lowering.lower import LoweredGroup

__all__ = ["differing", "summary", "tables"]

TUNING = "LOWLAT_TUNING"
LIMIT = 1.10
MODELS = {"llama-8b": Model("llama-8b"), "120b": Model("gpt-oss-120b"), "20b": Model("gpt-oss-20b")}


@contextmanager
def tables(*, are_used: bool) -> Iterator[None]:
    """Make launchers that are made within look plans up, or derive all of them."""
    before = os.environ.get(TUNING)
    if not are_used:
        os.environ[TUNING] = "off"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TUNING, None)
        else:
            os.environ[TUNING] = before


def differing(tabled: Iterable[LoweredGroup], derived: Iterable[LoweredGroup]) -> dict[str, Any]:
    """Launches of a step that a GPU cuts, those that a table has a plan of, and those whose plans differ, by key.

    The launches are the same in both, in the same order; each names its kernel, which has the plan's numbers.
    """
    found: dict[str, dict[str, Any]] = {}
    counts = {"cut_launches": 0, "tabled_launches": 0, "differing_launches": 0}
    pairs = zip(_cut(tabled), _cut(derived), strict=True)
    for (planned, mine), (other, theirs) in pairs:
        if (planned.kind, planned.key) != (other.kind, other.key) or other.is_tuned:
            raise LowlatError(f"{other.kind} {other.key} is no derived twin of {planned.kind} {planned.key}")
        counts["cut_launches"] += 1
        counts["tabled_launches"] += planned.is_tuned
        if mine != theirs:
            counts["differing_launches"] += 1
            place = f"{planned.kind} {planned.key}"
            entry = found.setdefault(place, {"launch": place, "count": 0, "tabled": mine, "derived": theirs})
            entry["count"] += 1
    return {**counts, "plans": list(found.values())}


def _cut(groups: Iterable[LoweredGroup]) -> Iterator[tuple[Any, str]]:
    for group in groups:
        for call in group.kernel_calls:
            if call.planned is not None:
                yield call.planned, f"{call.kernel.name}, grid {call.grid[0]}"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The ratios of the rows that were measured: median, most, and of all steps together."""
    ratios = [row["ratio"] for row in rows]
    return {
        "median_ratio": round(median(ratios), 4),
        "most_ratio": round(max(ratios), 4),
        "total_ratio": round(sum(r["derived"]["ms_p50"] for r in rows) / sum(r["tabled"]["ms_p50"] for r in rows), 4),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all cases; return 1 where a case failed or the derived steps are beyond the limit."""
    options = _options(arguments)
    if not torch.cuda.is_available():
        raise ConfigError("bench.derived_plans compares plans of an NVIDIA GPU, and there is none")
    device = torch.device(options.device)
    with own_stream(device):
        return _measure_all(options, device)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = timing_parser(__doc__, replays=300)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama-8b", "20b"], help="shapes")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 3], help="S")
    parser.add_argument("--context", type=int, default=8192)
    return parser.parse_args(arguments)


def _measure_all(options: argparse.Namespace, device: torch.device) -> int:
    rows: list[dict[str, Any]] = []
    content: dict[str, Any] = {
        **stamps_of(device, options.commit), "replays": options.replays, "wall": asdict(measure_wall(device)),
        "simulated": "random weights, keys and values; imposed acceptance", "limit": LIMIT, "complete": False,
        "rows": rows,
    }  # fmt: skip
    for name in options.model:
        weights = hold(MODELS[name].plan(drafts=True), MODELS[name].config, device)
        for depth in options.drafts:
            for batch in options.batch:
                start, case = time.perf_counter(), Case(batch, options.context, depth)
                row = _measure(options, name, case, weights, device)
                rows.append({"model": name, "case": case.name, **row})
                rows[-1]["measured_in_s"] = round(time.perf_counter() - start, 1)
                content |= summary(rows)
                write_json(options.out, content)
                print(json.dumps({key: value for key, value in rows[-1].items() if key != "plans"}), flush=True)
                release(device)
        weights.clear()
        del weights
        release(device)
    content["complete"] = True
    write_json(options.out, content)
    print(json.dumps(summary(rows)))
    return int(content["total_ratio"] > LIMIT or content["median_ratio"] > LIMIT)


def _measure(
    options: argparse.Namespace, name: str, case: Case, weights: Weights, device: torch.device
) -> dict[str, Any]:
    """A row of both steps. Raises LowlatError where the GPU has no table, or tokens differ."""
    steps: dict[str, Step] = {}
    try:
        for kind in ("tabled", "derived"):
            torch.manual_seed(0)  # of keys and values
            with tables(are_used=kind == "tabled"):
                steps[kind] = Step(MODELS[name].shapes(case), case, weights, device)
        plans = differing(*(step.executor.groups(step.bucket) for step in steps.values()))
        if not plans["tabled_launches"]:
            raise LowlatError(
                f"no launch of {name} has a plan in a table of {torch.cuda.get_device_name(device)}: nothing to "
                "compare; `lowlat tune` makes one"
            )
        tokens, logits = ([read(step) for step in steps.values()] for read in (_tokens, _logits))
        if not torch.equal(*tokens):
            raise LowlatError(f"{name}, {case.name}: derived plans give other tokens than tabled ones")
        same = {"same_tokens": True, "same_logits": torch.equal(*logits)}
        entries = {kind: Timed(kind, step.replay, step.reset) for kind, step in steps.items()}
        round_robin(list(entries.values()), options.replays, options.turn, device)
        found = {kind: summary_of(each, options.replays, options.turn, device) for kind, each in entries.items()}
        return {**found, "ratio": round(found["derived"]["ms_p50"] / found["tabled"]["ms_p50"], 4), **same, **plans}
    finally:
        for step in steps.values():
            step.close()


def _tokens(step: Step) -> torch.Tensor:
    """The tokens that slots have committed after their first steps."""
    step.executor.synchronize()
    return step.executor.state["tokens"].clone()


def _logits(step: Step) -> torch.Tensor:
    """The bits that lie where the last step's logits were, which later operations of the step may have taken."""
    return step.executor.scratch(step.bucket)["target.logits"].clone().view(torch.int32)


if __name__ == "__main__":
    sys.exit(main())
