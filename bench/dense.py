"""The dense benchmark: one decode step of Llama-3.1-8B's shape, ours and torch's, next to the GPU's memory wall.

    python -m bench.dense --out bench/results/h200/dense.json --ours MODULE:FUNCTION
    python -m bench.dense --out /tmp/dense.json --dry-run

Weights and caches are random; a step's time does not depend on their values, but for the number of accepted drafts,
which is imposed (`simulated_accept_length`). Ours and torch's graph take turns of a few replays, so that both see the
same clocks; the wall is measured before and after, and the higher figure counts. `--ours` names a `StepFactory`
(`bench.dense_cases`); without it torch's graph is measured alone. `--dry-run` walks the same path on a CPU with a tiny
geometry and a stand-in for ours: its figures mean nothing. Run it from the root of a checkout.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.clock import Timed, own_stream, percentile, round_robin
from bench.conditions import SUMMARY, add_timing_options, release, stamps_of, summary_of, write_json
from bench.dense_cases import (
    ALL_CASES,
    CASES,
    LLAMA_8B,
    TINY,
    TINY_CASES,
    Case,
    DenseGeometry,
    StepFactory,
    StepUnderTest,
    conditions_path,
    make_weights,
    step_bytes,
)
from bench.torch_attention import WAYS
from bench.torch_step import GLUES, TorchStep
from bench.wall import Wall, measure_wall

__all__ = ["StandIn", "main", "measure_case"]

PROFILED_STEPS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each; returns 1 if a case failed."""
    options = _options(arguments)
    device = torch.device("cpu" if options.dry_run else options.device)
    with own_stream(device):
        return _measure_all(options, device)


def _measure_all(options: argparse.Namespace, device: torch.device) -> int:
    geometry, cases, ours = _choose_work(options)
    stamps = {"replays": options.replays, **stamps_of(device, options.commit)}
    wall = _wall(options, device)
    weights = make_weights(geometry, device)
    rows: list[dict[str, Any]] = []
    for case in cases:
        start = time.perf_counter()
        try:
            row = measure_case(options, geometry, case, weights, device, ours)
        except Exception as error:  # the other cases are still worth measuring
            traceback.print_exc()
            row = {**_described(geometry, case), "error": f"{type(error).__name__}: {error}"}
        row = {**row, **stamps, "measured_in_s": round(time.perf_counter() - start, 1)}
        rows.append(row)
        _write(options, geometry, [wall], rows)
        print(json.dumps(_beside_wall(row, wall.gb_per_s)), flush=True)
        release(device)
    del weights
    release(device)
    _write(options, geometry, [wall, _wall(options, device)], rows)
    return int(any("error" in row for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--ours", default="", help="MODULE:FUNCTION, a StepFactory")
    parser.add_argument("--all", action="store_true", help="other depths and batches too")
    parser.add_argument(
        "--case", action="append", default=[], metavar="BxCxS", help="for instance 1x8192x3; may repeat"
    )
    add_timing_options(parser, replays=300)
    parser.add_argument("--attention", nargs="+", choices=list(WAYS), default=None, help="torch's, to choose from")
    parser.add_argument("--glue", nargs="+", choices=GLUES, default=list(GLUES), help="torch's, to choose from")
    parser.add_argument("--skip-torch", action="store_true", help="measure ours alone")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, with a stand-in for ours")
    return parser.parse_args(arguments)


def _choose_work(options: argparse.Namespace) -> tuple[DenseGeometry, Sequence[Case], StepFactory | None]:
    ours: StepFactory | None = None
    if options.ours:
        module, _, function = options.ours.partition(":")
        ours = getattr(importlib.import_module(module), function)
    chosen = [Case(*map(int, text.split("x"))) for text in options.case]
    if options.dry_run:
        options.replays, options.turn = min(options.replays, 5), min(options.turn, 2)
        return TINY, chosen or TINY_CASES, ours or StandIn
    return LLAMA_8B, chosen or (ALL_CASES if options.all else CASES), ours


def measure_case(
    options: argparse.Namespace,
    geometry: DenseGeometry,
    case: Case,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    ours: StepFactory | None,
) -> dict[str, Any]:
    """One row, without the fields that depend on the wall. Our fields are None without ours, torch's without torch."""
    entries, row = [], _described(geometry, case)
    step: StepUnderTest | None = None
    baseline: TorchStep | None = None
    if ours is not None:
        step = ours(geometry, case, weights, device)
        entries.append(Timed("ours", step.replay, step.reset))
    if not options.skip_torch:
        baseline = TorchStep(geometry, case, weights, device, attention=options.attention)
        baseline.capture(options.glue)
        entries.append(Timed("torch", baseline.replay, baseline.reset))
    round_robin(entries, options.replays, options.turn, device)
    times = {entry.name: summary_of(entry, options.replays, options.turn, device) for entry in entries}
    mine, theirs = times.get("ours", dict.fromkeys(SUMMARY)), times.get("torch", dict.fromkeys(SUMMARY))
    row |= {"executor": None if step is None else step.name, **mine}
    row["launches"] = None if step is None else step.num_launches
    row["device_loop_ms_p50"] = _device_loop(step, options)
    row["idle_share"] = _idle_share(step)
    row |= {f"torch_graph_{name}": value for name, value in theirs.items()}
    return row | (_torch_fields(baseline) if baseline is not None else {})


def _device_loop(step: StepUnderTest | None, options: argparse.Namespace) -> float | None:
    """The median step of a loop on the device, where ours offers one."""
    measure = getattr(step, "measure_device_loop", None)
    return None if measure is None else round(percentile(measure(options.replays), 50), 4)


def _idle_share(step: StepUnderTest | None) -> float | None:
    """The share of some steps in which no kernel ran, where ours can be profiled."""
    profile = getattr(step, "profile", None)
    return None if profile is None else round(profile(PROFILED_STEPS, 1.0).idle.share, 4)


def _torch_fields(baseline: TorchStep) -> dict[str, Any]:
    head = baseline.head_attention
    return {
        "torch_attention": baseline.attention.name,
        "torch_attention_us": baseline.attention.microseconds,
        "torch_head_attention": None if head is None else head.name,
        "torch_head_attention_us": None if head is None else head.microseconds,
        "torch_glue": baseline.glue,
        "torch_glue_ms": baseline.glue_ms,
        "torch_launches": baseline.num_launches,
    }


def _described(geometry: DenseGeometry, case: Case) -> dict[str, Any]:
    return {
        "case": case.name,
        "batch": case.batch,
        "context": case.context,
        "num_speculative_tokens": case.num_speculative_tokens,
        "simulated_accept_length": case.accept_length,
        "bytes": step_bytes(geometry, case),
    }


def _beside_wall(row: dict[str, Any], gb_per_s: float) -> dict[str, Any]:
    """The row with what follows from the wall, and from both times."""
    floor = row["bytes"] / gb_per_s / 1e6
    more: dict[str, Any] = {"wall_gb_per_s": round(gb_per_s, 1), "floor_ms": round(floor, 4)}
    tokens = row["batch"] * (row["simulated_accept_length"] or 1.0)
    for prefix, ratio in (("", "over_floor"), ("torch_graph_", "torch_graph_over_floor")):
        took = row.get(f"{prefix}ms_p50")
        more[ratio] = None if not took else round(took / floor, 4)
        more[f"{prefix}tokens_per_s"] = None if not took else round(1e3 * tokens / took, 1)
    more["tokens_per_s_is_simulated"] = row["simulated_accept_length"] is not None
    mine, theirs = row.get("ms_p50"), row.get("torch_graph_ms_p50")
    more["speed_up_over_torch_graph"] = round(theirs / mine, 4) if mine and theirs else None
    return row | more


def _wall(options: argparse.Namespace, device: torch.device) -> Wall:
    return Wall(100.0, 0, 0, {}) if options.dry_run else measure_wall(device)


def _write(
    options: argparse.Namespace, geometry: DenseGeometry, walls: Sequence[Wall], rows: list[dict[str, Any]]
) -> None:
    wall = max(measured.gb_per_s for measured in walls)
    conditions = {
        "model": {**asdict(geometry), "weights": "random, bfloat16"},
        "baseline": "torch's operations in one torch.cuda.CUDAGraph; its lengths stay fixed, every draft counts as "
        "accepted, and it neither samples, commits nor publishes",
        "simulated": "weights, caches and the number of accepted drafts; times do not depend on the values",
        "turn": options.turn,
        "dry_run": options.dry_run,
        "walls": [asdict(measured) for measured in walls],
    }
    beside = [_beside_wall(row, wall) for row in rows]
    for path, content in ((options.out, beside), (conditions_path(options.out), conditions)):
        write_json(path, content)


class StandIn:
    """The step of a dry run, in place of ours: one matrix product."""

    def __init__(
        self, geometry: DenseGeometry, case: Case, weights: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        self.name = f"stand-in of {geometry.name}"
        self.num_launches = 1
        self.resets = 0
        self._weight = weights["lm_head.weight"]
        self._x = torch.ones(case.batch * case.rows, geometry.hidden_size, dtype=self._weight.dtype, device=device)

    def replay(self) -> None:
        """Run the product."""
        torch.mm(self._x, self._weight.t())

    def reset(self) -> None:
        """Count the reset."""
        self.resets += 1

    def measure_device_loop(self, steps: int) -> list[float]:
        """Return made-up times."""
        return [1.0] * steps


if __name__ == "__main__":
    sys.exit(main())
