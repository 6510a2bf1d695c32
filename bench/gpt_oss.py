"""The gpt-oss benchmark: one decode step of 120b's and 20b's shape on random weights, next to the GPU's memory wall.

    python -m bench.gpt_oss --out bench/results/h200/gpt_oss.json
    python -m bench.gpt_oss --out /tmp/oss.json --case "120b, 1 x 32K, S=0" --profile
    python -m bench.gpt_oss --out /tmp/oss.json --case "120b, 1 x 32K, S=3" --case "120b, 1 x 32K, S=3, full head"
    python -m bench.gpt_oss --soak 2000 --context 32768 65536 --out bench/results/h200/gpt_oss_soak.json
    python -m bench.gpt_oss --out /tmp/oss.json --small

Weights are made on the device. Routers spread rows evenly, or let all rows of a layer choose alike; how many experts a
layer's rows really chose is counted and stands in each row. Acceptance is imposed where steps draft; tokens/s at other
accept lengths follow from the same times. `--small` runs all of it on a tiny geometry, whose figures mean little.
`--soak` repeats a step and checks what must hold: lengths, flags, and that every pass over the same context gives the
same tokens; its rows are written after each pass over the room after the context. Run it from the root of a checkout.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.clock import Timed, own_stream, round_robin
from bench.conditions import add_timing_options, release, stamps_of, summary_of, write_json
from bench.dense_cases import Case, conditions_path
from bench.gpt_oss_cases import (
    ACCEPT_LENGTHS,
    CASES,
    MODELS,
    MORE_CASES,
    SMALL,
    SMALL_CASES,
    OssCase,
    OssModel,
    bound_speedup,
    expected_experts,
    step_bytes,
)
from bench.gpt_oss_report import show_kernels, write_report
from bench.gpt_oss_step import OssStep, Weights, make_step, make_weights, with_experts
from bench.soak import soak
from bench.wall import Wall, measure_wall

__all__ = ["beside_wall", "main", "measure_case"]

PROFILED_STEPS = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each, or soak; returns 1 if a case failed."""
    options = _options(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        return _soak(options, device) if options.soak else _measure_all(options, device)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write; cases have a table and a picture next to it")
    parser.add_argument("--case", action="append", default=[], help="a case's name; may repeat")
    add_timing_options(parser, replays=300)
    parser.add_argument("--profile", action="store_true", help="print each case's kernels, those that take most first")
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--small", action="store_true", help="a tiny geometry, to try everything")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="run N steps with checks; measure nothing")
    parser.add_argument("--context", type=int, nargs="+", default=[32768], help="of --soak: one or more, in turn")
    parser.add_argument("--drafts", type=int, default=3, help="of --soak: S")
    parser.add_argument("--model", choices=sorted(MODELS), default="120b", help="of --soak")
    options = parser.parse_args(arguments)
    if options.out is None and not options.soak:
        parser.error("--out is needed, but for --soak")
    known = {case.name for case in (SMALL_CASES if options.small else (*CASES, *MORE_CASES))}
    if set(options.case) - known:
        parser.error(f"no case {sorted(set(options.case) - known)}; there are {sorted(known)}")
    return options


def _soak(options: argparse.Namespace, device: torch.device) -> int:
    """One row a context, of the same weights; written after each pass, so that an end halfway leaves what was seen."""
    model, name = (SMALL, "small") if options.small else (MODELS[options.model], options.model)
    stamps, start = stamps_of(device, options.commit), time.perf_counter()
    vocabulary = min(32000, model.vocab_size)
    weights = make_weights(model, device, alike=False, draft_vocab_size=vocabulary)
    loaded = {"weights_in_s": round(time.perf_counter() - start, 1)}
    rows: list[dict[str, Any]] = []
    for context in options.context:
        case = OssCase(name, Case(1, context, options.drafts), draft_vocab_size=vocabulary)
        rows.append({"case": case.name, "asked_steps": options.soak, **loaded, **stamps})

        def progress(found: dict[str, Any]) -> None:
            rows[-1] |= found
            print(json.dumps({"case": rows[-1]["case"], **found}), flush=True)
            if options.out is not None:
                write_json(options.out, rows)

        def step(case: OssCase = case) -> OssStep:
            return OssStep(model, case, weights, device, simulated=None, checked=True)

        soak(step, options.soak, progress)
        release(device)
    return int(any(row["problems"] for row in rows))


def _measure_all(options: argparse.Namespace, device: torch.device) -> int:
    models = {"small": SMALL} if options.small else MODELS
    every = SMALL_CASES if options.small else (*CASES, *MORE_CASES) if options.case else CASES
    cases = [case for case in every if not options.case or case.name in options.case]
    stamps = {"replays": options.replays, **stamps_of(device, options.commit)}
    walls, rows = [measure_wall(device)], []
    made: tuple[Any, ...] = ()
    weights: Weights = {}
    for case in cases:
        start, model = time.perf_counter(), models[case.model]
        if made != (case.model, case.alike, case.draft_vocab_size):
            weights.clear()
            release(device)
            made = (case.model, case.alike, case.draft_vocab_size)
            weights = make_weights(model, device, alike=case.alike, draft_vocab_size=case.draft_vocab_size)
        try:
            row = measure_case(options, model, case, weights, device, walls[0].gb_per_s)
        except Exception as error:  # the other cases are still worth measuring
            traceback.print_exc()
            row = {**_described(model, case), "error": f"{type(error).__name__}: {error}"}
        rows.append({**row, **stamps, "measured_in_s": round(time.perf_counter() - start, 1)})
        _write(options, models, walls, rows)
        print(json.dumps(beside_wall(rows[-1], walls[0].gb_per_s)), flush=True)
        release(device)
    weights.clear()
    release(device)
    walls.append(measure_wall(device))
    _write(options, models, walls, rows)
    write_report(options.out, plot=not options.no_plot)
    return int(any("error" in row for row in rows))


def measure_case(
    options: argparse.Namespace,
    model: OssModel,
    case: OssCase,
    weights: Weights,
    device: torch.device,
    gb_per_s: float,
) -> dict[str, Any]:
    """One row, without the fields that depend on the wall."""
    step = make_step(model, case, weights, device)
    try:
        entry = Timed("ours", step.replay, step.reset)
        round_robin([entry], options.replays, options.turn, device)
        row = {
            **_described(model, case),
            "executor": step.name,
            **summary_of(entry, options.replays, options.turn, device),
        }
        step.reset()
        distinct = step.distinct_experts()
        row |= {"launches": step.num_launches, "distinct_experts": round(fmean(distinct), 3)}
        row |= {"distinct_experts_a_layer": distinct, "bytes": step_bytes(model, case, fmean(distinct))}
        summary = step.profile(PROFILED_STEPS, gb_per_s, with_experts(step.sites(), model, distinct))
        row |= {"idle_share": round(summary.idle.share, 4), "profiled_step_us": round(summary.step_us, 1)}
        if options.profile:
            show_kernels(case.name, summary)
        return row
    finally:
        step.close()


def _described(model: OssModel, case: OssCase) -> dict[str, Any]:
    step = case.step
    rows = step.batch * step.rows
    return {
        "case": case.name,
        "model": case.model,
        "batch": step.batch,
        "context": step.context,
        "num_speculative_tokens": step.num_speculative_tokens,
        "draft_vocab_size": case.draft_vocab_size if step.num_speculative_tokens else None,
        "experts": "alike" if case.alike else "random",
        "expected_experts": model.num_experts_per_token if case.alike else round(expected_experts(model, rows), 3),
    }


def beside_wall(row: dict[str, Any], gb_per_s: float) -> dict[str, Any]:
    """The row with what follows from the wall and from its times."""
    more: dict[str, Any] = {"wall_gb_per_s": round(gb_per_s, 1)}
    if "bytes" in row:
        floor = row["bytes"] / gb_per_s / 1e6
        more |= {"floor_ms": round(floor, 4), "over_floor": round(row["ms_p50"] / floor, 4)}
        lengths = ACCEPT_LENGTHS if row["num_speculative_tokens"] else (1.0,)
        speed = {str(length): round(1e3 * row["batch"] * length / row["ms_p50"], 1) for length in lengths}
        simulated = bool(row["num_speculative_tokens"])
        more |= {"tokens_per_s": speed if simulated else speed["1.0"], "tokens_per_s_is_simulated": simulated}
    return row | more


def _write(
    options: argparse.Namespace, models: dict[str, OssModel], walls: Sequence[Wall], rows: Sequence[dict[str, Any]]
) -> None:
    wall = max(measured.gb_per_s for measured in walls)
    beside = [beside_wall(row, wall) for row in rows]
    good = [row for row in beside if "error" not in row]
    for row in good:
        row["bound_speedup"] = bound_speedup(row, good)
    conditions = {
        "models": {row["model"]: asdict(models[row["model"]]) for row in rows},
        "weights": "random, bfloat16; experts random codes in MXFP4",
        "simulated": "weights, caches, the experts' choice and the number of accepted drafts",
        "accept_lengths": ACCEPT_LENGTHS,
        "bound_speedup": "accept length times the floor at S = 0 over this row's floor, where both were measured",
        "turn": options.turn,
        "small": options.small,
        "walls": [asdict(measured) for measured in walls],
    }
    for path, content in ((options.out, beside), (conditions_path(options.out), conditions)):
        write_json(path, content)


if __name__ == "__main__":
    sys.exit(main())
