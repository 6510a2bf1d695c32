"""The dense benchmark: one decode step of Llama-3.1-8B's shape, ours and torch's, next to the GPU's memory wall.

    python -m bench.dense --out bench/results/h200/dense.json
    python -m bench.dense --out /tmp/dense.json --small --device cpu

Weights and caches are random; a step's time does not depend on their values, but for the number of accepted drafts,
which is imposed (`simulated_accept_length`). Ours and torch's graph take turns of a few replays, so that both see the
same clocks; the wall is measured before and after, and the higher figure counts. `--small` walks the same path with a
tiny geometry, on any device: its figures mean nothing. Run it from the root of a checkout.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.lib.bytes import step_bytes
from bench.lib.case import Case
from bench.lib.clock import Timed, own_stream, round_robin
from bench.lib.conditions import SUMMARY, add_timing_options, release, stamps_of, summary_of, write_json
from bench.lib.model import Model
from bench.lib.run import Work, conditions_path, run_all, tokens_per_s, wall_of
from bench.lib.step import Step
from bench.lib.wall import Wall
from bench.lib.weights import hold
from bench.torch_attention import WAYS
from bench.torch_step import GLUES, TorchStep

__all__ = ["CASES", "main"]

PROFILED_STEPS = 10
LLAMA_8B, TINY = Model("llama-8b"), Model("tiny")
TITLES = {"llama-8b": "Llama-3.1-8B", "tiny": "tiny"}
PLACES = ((1, 8192), (1, 32768), (4, 16384))
CASES = tuple(Case(batch, context, depth) for depth in (0, 3) for batch, context in PLACES)
ALL_CASES = (
    *CASES,
    *(Case(batch, context, depth) for depth in (1, 5, 7) for batch, context in PLACES),
    *(Case(batch, 16384, depth) for depth in (0, 3) for batch in (2, 8)),
)
SMALL_CASES = (Case(1, 40, 0), Case(2, 24, 3))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each; returns 1 if a case failed."""
    options = _options(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        return _measure_all(options, device)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--all", action="store_true", help="other depths and batches too")
    parser.add_argument(
        "--case", action="append", default=[], metavar="BxCxS", help="for instance 1x8192x3; may repeat"
    )
    add_timing_options(parser, replays=300)
    parser.add_argument("--attention", nargs="+", choices=list(WAYS), default=None, help="torch's, to choose from")
    parser.add_argument("--glue", nargs="+", choices=GLUES, default=list(GLUES), help="torch's, to choose from")
    parser.add_argument("--skip-torch", action="store_true", help="measure ours alone")
    parser.add_argument("--small", action="store_true", help="a tiny geometry, to try everything")
    return parser.parse_args(arguments)


def _measure_all(options: argparse.Namespace, device: torch.device) -> int:
    model = TINY if options.small else LLAMA_8B
    chosen = [Case.parse(text) for text in options.case]
    cases = chosen or (SMALL_CASES if options.small else ALL_CASES if options.all else CASES)
    wall = wall_of(device)
    plan = model.plan(drafts=True)
    weights: Any = hold(plan, model.config, device)
    works = [
        Work(case.name, _described(case), partial(_measure, options, model, case, weights, device)) for case in cases
    ]
    stamps = {"replays": options.replays, **stamps_of(device, options.commit)}
    write = partial(_write, options, model, [wall])
    rows = run_all(works, stamps, write, [device], shown=lambda row: beside_wall(row, wall.gb_per_s))
    del works
    weights.clear()
    release(device)
    _write(options, model, [wall, wall_of(device)], rows)
    return int(any("error" in row for row in rows))


def _described(case: Case) -> dict[str, Any]:
    return {"case": case.name, **asdict(case), "simulated_accept_length": case.accept_length}


def _measure(
    options: argparse.Namespace,
    model: Model,
    case: Case,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """One row, without the fields that depend on the wall; torch's fields are None without torch."""
    step = Step(model.shapes(case), case, weights, device)
    baseline: TorchStep | None = None
    try:
        entries = [Timed("ours", step.replay, step.reset)]
        if not options.skip_torch:
            baseline = TorchStep(model, case, weights, device, attention=options.attention)
            baseline.capture(options.glue)
            entries.append(Timed("torch", baseline.replay, lambda: None))
        round_robin(entries, options.replays, options.turn, device)
        times = {entry.name: summary_of(entry, options.replays, options.turn, device) for entry in entries}
        plan = model.plan(drafts=case.num_speculative_tokens > 0)
        row: dict[str, Any] = {
            "bytes": step_bytes(step.program, plan, model.config, case, matrices_only=True).total,
            "executor": step.name,
            **times["ours"],
            "launches": step.num_launches,
            "idle_share": round(step.profile(PROFILED_STEPS, 1.0).idle.share, 4) if step.num_launches else None,
        }
    finally:
        step.close()
    theirs = times.get("torch", dict.fromkeys(SUMMARY))
    row |= {f"torch_graph_{name}": value for name, value in theirs.items()}
    return row | ({} if baseline is None else baseline.described())


def beside_wall(row: dict[str, Any], gb_per_s: float) -> dict[str, Any]:
    """The row with what follows from the wall, and from both times."""
    if "bytes" not in row:
        return row
    floor, length = row["bytes"] / gb_per_s / 1e6, row["simulated_accept_length"]
    more: dict[str, Any] = {"wall_gb_per_s": round(gb_per_s, 1), "floor_ms": round(floor, 4)}
    for prefix, ratio in (("", "over_floor"), ("torch_graph_", "torch_graph_over_floor")):
        took = row[f"{prefix}ms_p50"]
        more[ratio] = None if not took else round(took / floor, 4)
        more[f"{prefix}tokens_per_s"] = None if not took else tokens_per_s(row["batch"], took, length)
    more["tokens_per_s_is_simulated"] = length is not None
    mine, theirs = row["ms_p50"], row["torch_graph_ms_p50"]
    more["speed_up_over_torch_graph"] = round(theirs / mine, 4) if theirs else None
    return row | more


def _write(options: argparse.Namespace, model: Model, walls: Sequence[Wall], rows: list[dict[str, Any]]) -> None:
    wall = max(measured.gb_per_s for measured in walls)
    conditions = {
        "model": {**asdict(model), "name": TITLES[model.name], "geometry": model.name, "weights": "random, bfloat16"},
        "baseline": "torch's operations in one torch.cuda.CUDAGraph; its lengths stay fixed, every draft counts as "
        "accepted, and it neither samples, commits nor publishes",
        "simulated": "weights, caches and the number of accepted drafts; times do not depend on the values",
        "turn": options.turn,
        "small": options.small,
        "walls": [asdict(measured) for measured in walls],
    }
    beside = [beside_wall(row, wall) for row in rows]
    for path, content in ((options.out, beside), (conditions_path(options.out), conditions)):
        write_json(path, content)


if __name__ == "__main__":
    sys.exit(main())
