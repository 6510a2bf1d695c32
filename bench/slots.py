"""Times of steps of many slots: 8, 16 and 32 requests of 4K tokens each, without drafts and with three.

    python -m bench.slots --out bench/results/h200/slots.json
    python -m bench.slots --model gpt-oss-20b --case 32x4096x0 --out /tmp/slots.json
    python -m bench.slots --small --device cpu --replays 1 --turn 1 --out /tmp/slots.json

Every slot is live, and steps of up to 128 rows are one graph's, as a runtime captures it. Beyond eight slots tokens/s
count more than a request's own latency: a row has both, next to the bytes of its step and the GPU's wall, which is
measured before and after. Weights and caches are random; the number of accepted drafts is imposed. `--small` walks
the same path with a tiny geometry, on any device: its figures mean nothing.
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
from bench.lib.conditions import release, stamps_of, summary_of, timing_parser, write_json
from bench.lib.model import Model
from bench.lib.run import Work, run_all, tokens_per_s, wall_of
from bench.lib.step import Step
from bench.lib.wall import Wall
from bench.lib.weights import hold

__all__ = ["CASES", "main"]

CONTEXT, DEPTHS = 4096, (0, 3)
CASES = tuple(Case(batch, CONTEXT, depth) for batch in (8, 16, 32) for depth in DEPTHS)
SMALL_CASES = (Case(9, 24, 0), Case(16, 24, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each; returns 1 if a case failed."""
    parser = timing_parser(__doc__, replays=200)
    parser.add_argument("--model", default="llama-8b", help="geometry by its name")
    parser.add_argument("--case", action="append", default=[], metavar="BxCxS", help="such as 32x4096x3; may repeat")
    parser.add_argument("--small", action="store_true", help="a tiny geometry, to try everything")
    options = parser.parse_args(arguments)
    device, model = torch.device(options.device), Model("tiny" if options.small else options.model)
    with own_stream(device):
        return _measure_all(options, model, device)


def _measure_all(options: argparse.Namespace, model: Model, device: torch.device) -> int:
    cases = [Case.parse(text) for text in options.case] or (SMALL_CASES if options.small else CASES)
    wall = wall_of(device)
    weights: Any = hold(model.plan(drafts=True), model.config, device)
    works = [
        Work(case.name, _described(model, case), partial(_measure, options, model, case, weights, device))
        for case in cases
    ]
    stamps = {"replays": options.replays, "turn": options.turn, **stamps_of(device, options.commit)}
    write = partial(_write, options.out, [wall])
    rows = run_all(works, stamps, write, [device], shown=partial(_beside_wall, wall=wall))
    del works
    weights.clear()
    release(device)
    _write(options.out, [wall, wall_of(device)], rows)
    return int(any("error" in row for row in rows))


def _described(model: Model, case: Case) -> dict[str, Any]:
    more = {"rows": case.batch * case.rows, "simulated_accept_length": case.accept_length, "weights": "random"}
    return {"model": model.name, "case": case.name, **asdict(case), **more}


def _measure(
    options: argparse.Namespace,
    model: Model,
    case: Case,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, Any]:
    """One row, without the fields that depend on the wall."""
    step = Step(model.shapes(case), case, weights, device)
    try:
        entry = Timed("lowlat", step.replay, step.reset)
        round_robin([entry], options.replays, options.turn, device)
        plan = model.plan(drafts=case.num_speculative_tokens > 0)
        return {
            "bytes": step_bytes(step.program, plan, model.config, case).total,
            "executor": step.name,
            "launches": step.num_launches,
            **summary_of(entry, options.replays, options.turn, device),
        }
    finally:
        step.close()


def _beside_wall(row: dict[str, Any], wall: Wall) -> dict[str, Any]:
    """The row with its floor, and tokens a second of all slots and of one."""
    if "bytes" not in row:
        return row
    floor, took = row["bytes"] / wall.gb_per_s / 1e6, row["ms_p50"]
    whole = tokens_per_s(row["batch"], took, row["simulated_accept_length"])
    return row | {
        "wall_gb_per_s": round(wall.gb_per_s, 1),
        "floor_ms": round(floor, 4),
        "over_floor": round(took / floor, 4),
        "tokens_per_s": whole,
        "tokens_per_s_of_one": round(whole / row["batch"], 1),
        "tokens_per_s_is_simulated": row["simulated_accept_length"] is not None,
    }


def _write(path: Path, walls: Sequence[Wall], rows: list[dict[str, Any]]) -> None:
    wall = max(walls, key=lambda measured: measured.gb_per_s)
    write_json(path, [_beside_wall(row, wall) for row in rows])


if __name__ == "__main__":
    sys.exit(main())
