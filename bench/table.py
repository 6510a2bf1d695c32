"""One decode step of a geometry of the table with random weights in several formats, beside the card's memory wall.

    python -m bench.table --geometry qwen3-30b-a3b --weights bf16 fp8 int4 --out /tmp/table.json
    python -m bench.table --geometry llama-8b --weights fp8 --case 4x16384x0 --profile --out /tmp/table.json

A row has its step's time, the bytes that it must read, of a mixture its chosen experts, and what these
take at the wall that the same run measured.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.clock import Timed, own_stream, round_robin
from bench.conditions import release, stamps_of, summary_of, write_json
from bench.dense_cases import Case
from bench.gpt_oss_report import show_kernels
from bench.table_step import TableModel, TableStep
from bench.wall import measure_wall

__all__ = ["main"]

PROFILED_STEPS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every format and case, and write the rows after each."""
    options = _options(arguments)
    device = torch.device(options.device)
    stamps, rows = stamps_of(device, options.commit), []
    with own_stream(device):
        wall = measure_wall(device).gb_per_s
        for weights in options.weights:
            for case in options.case:
                rows.append({**_measure(options, TableModel(options.geometry, weights), case, device, wall), **stamps})
                print(json.dumps(rows[-1]), flush=True)
                write_json(options.out, rows)
                release(device)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-30b-a3b", help="a name in geometries.toml")
    parser.add_argument("--weights", nargs="+", choices=("bf16", "fp8", "int4"), default=["bf16", "fp8", "int4"])
    parser.add_argument("--case", type=_case, nargs="+", default=[Case(1, 8192, 0)], metavar="BxCx0")
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--turn", type=int, default=20, help="replays between resets")
    parser.add_argument("--profile", action="store_true", help="print kernels, those that take most first")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser.parse_args(arguments)


def _case(text: str) -> Case:
    batch, context, depth = map(int, text.split("x"))
    return Case(batch, context, depth)


def _measure(
    options: argparse.Namespace, model: TableModel, case: Case, device: torch.device, gb_per_s: float
) -> dict[str, Any]:
    start = time.perf_counter()
    step = TableStep(model, case, device)
    loaded = time.perf_counter() - start
    try:
        entry = Timed("ours", step.replay, step.reset)
        round_robin([entry], options.replays, options.turn, device)
        times = summary_of(entry, options.replays, options.turn, device)
        step.reset()
        distinct = None if model.config.experts is None else fmean(step.distinct_experts())
        moved = step.bytes(distinct)
        floor = moved / gb_per_s / 1e6
        if options.profile:
            show_kernels(f"{model.geometry}, {model.weights}, {case.name}", step.profile(PROFILED_STEPS, gb_per_s))
        return {
            "model": model.geometry,
            "weights": model.weights,
            "lm_head": "bf16",
            "kv": "bf16",
            "batch": case.batch,
            "context": case.context,
            "num_speculative_tokens": 0,
            **times,
            "floor_ms": round(floor, 4),
            "over_floor": round(times["ms_p50"] / floor, 4),
            "bytes": moved,
            "distinct_experts": distinct,
            "wall_gb_per_s": round(gb_per_s, 1),
            "launches": step.num_launches,
            "loaded_in_s": round(loaded, 1),
        }
    finally:
        step.close()


if __name__ == "__main__":
    sys.exit(main())
