"""This program compares derived plans, without a table, with measured times of plans.

    python -m bench.plan_times bench/results/h200/plan_times.json bench/results/h100/plan_times.json

prints for each GPU and kind of launch how far derived plans lie above the fastest that were measured, where the derived
plan was timed, too. `lowlat tune --times FILE` measures more on a GPU. No GPU is needed here.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lowlat.errors import ConfigError
from lowlat.kernels.attention.launch_plan import AttentionWork
from lowlat.kernels.attention.launch_plan import candidate_plans as attention_plans
from lowlat.kernels.formats import DENSE_FORMATS
from lowlat.kernels.gemm.decode.plan import (
    ALL_REDUCE,
    ArgmaxShape,
    DecodeGemmShape,
    candidate_plans,
    steps_to_hold,
)
from lowlat.kernels.gemm.decode.shared_rows_plan import shared_plans
from lowlat.kernels.gemm.k_parts import KParts
from lowlat.kernels.gemm.prefill.plan import plans_of
from lowlat.kernels.gemm.tiles import BF16_TILES, CODED_ROWS_TILES, TileFormat
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.kernels.tuning.table import Plan
from lowlat.tools.tune.times import PlanTimes, read_times

__all__ = ["KINDS", "Judged", "judge", "plans_of_key", "summary"]

KINDS = ("decode_gemm", "prefill_gemm", "attention")
LIMIT = 1.10


@dataclass(frozen=True)
class Judged:
    """A launch, and its derived plan's time over the fastest one's; None where that plan was not timed."""

    kind: str
    key: str
    ratio: float | None
    best_us: float


def plans_of_key(kind: str, key: str, gpu: Gpu) -> Sequence[Plan]:
    """The plans of a launch by its key in tables, the derived one first.

    Raises ConfigError for a kind whose keys do not say what plans depend on.
    """
    facts = dict(part.split("=") for part in key.split())
    if kind == "decode_gemm" and "shared_rows" in facts:
        best = ArgmaxShape(1, 0) if facts["argmax"] == "1" else None
        shape = DecodeGemmShape(
            int(facts["N"]), int(facts["K"]), facts["epilogue"], False, False, best=best, weights=_weights(facts)
        )
        return shared_plans(int(facts["shared_rows"]), shape, gpu)
    if kind == "decode_gemm":
        rows, width, depth = (int(facts[name]) for name in ("rows", "N", "K"))
        return candidate_plans(
            rows, width, gpu, steps_to_hold(rows, depth, gpu) if facts["normed"] == "1" else 0,
            keeps_argmax=facts["argmax"] == "1", weights=_weights(facts), depth=depth, parts=_parts(facts),
            all_reduces=facts["epilogue"] == ALL_REDUCE,
        )  # fmt: skip
    if kind == "prefill_gemm":
        rows, width, depth = (int(facts[name]) for name in ("rows", "N", "K"))
        return plans_of(rows, width, depth, gpu, _weights(facts), _parts(facts))
    if kind == "attention":
        return attention_plans(_work(facts), gpu)
    raise ConfigError(f"plans of {kind!r} do not follow from a key; there are {', '.join(KINDS)}")


def _weights(facts: Mapping[str, str]) -> TileFormat:
    label = facts.get("weights", BF16_TILES.label)
    layouts = [each.tiles(wide=wide) for each in DENSE_FORMATS.values() for wide in (False, True)]
    found = next((each for each in (BF16_TILES, CODED_ROWS_TILES, *layouts) if each.label == label), None)
    if found is None:
        raise ConfigError(f"weights {label!r} are not known")
    return found


def _parts(facts: Mapping[str, str]) -> KParts | None:
    return KParts(int(facts["parts"]), 1) if "parts" in facts else None


def _work(facts: Mapping[str, str]) -> AttentionWork:
    group, tiles, coded = int(facts["group"]), int(facts["query_tiles"]), "coded" in facts
    rows = 16 * tiles // group if tiles > 1 or facts.get("few") == "0" else 1
    return AttentionWork(
        int(facts["batch"]), rows, group, int(facts["kv_heads"]), int(facts["head_dim"]), int(facts["window"]) or None,
        int(facts["keeps"]), int(facts["split"]) or 256, coded,
    )  # fmt: skip


def judge(times: PlanTimes) -> list[Judged]:
    """Each launch of the kinds whose plans follow from their keys."""
    found = []
    for kind in KINDS:
        for key, plans in times.launches.get(kind, {}).items():
            best = min(plan.us for plan in plans)
            derived = dict(plans_of_key(kind, key, times.facts)[0].knobs)
            took = next((plan.us for plan in plans if plan.knobs == derived), None)
            found.append(Judged(kind, key, None if took is None else took / best, best))
    return found


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Launches, those whose derived plan was timed, and how far these lie above the fastest; `total` is of all their
    times together."""
    timed = [(each.ratio, each.best_us) for each in judged if each.ratio is not None]
    if not timed:
        return {"launches": len(judged), "timed": 0}
    ratios = sorted(ratio for ratio, _ in timed)
    return {
        "launches": len(judged),
        "timed": len(timed),
        "median": round(median(ratios), 4),
        "p99": round(ratios[min(len(ratios) - 1, len(ratios) * 99 // 100)], 4),
        "most": round(ratios[-1], 4),
        "total": round(sum(ratio * us for ratio, us in timed) / sum(us for _, us in timed), 4),
        "beyond_limit": sum(ratio > LIMIT for ratio in ratios),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each GPU and kind. Returns 1 where a median or a total is beyond the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--worst", type=int, default=0, metavar="N", help="launches to show that lose most")
    options = parser.parse_args(arguments)
    failed = False
    for path in options.files:
        times = read_times(path)
        judged = judge(times)
        for kind in KINDS:
            found = summary([each for each in judged if each.kind == kind])
            print(json.dumps({"gpu": times.gpu, "kind": kind, **found}))
            failed |= max(found.get("median", 0.0), found.get("total", 0.0)) > LIMIT
        worst = sorted(judged, key=lambda each: each.ratio or 0.0, reverse=True)[: options.worst]
        for each in worst:
            print(json.dumps({"gpu": times.gpu, "kind": each.kind, "key": each.key, "ratio": each.ratio}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
