"""This program times decode steps by weight format, with random weights, beside the floor of their bytes.

    python -m bench.weights --out bench/results/h200/weights.json
    python -m bench.weights --out /tmp/weights.json --only "fp8" --limit-s 60
    python -m bench.weights --out /tmp/weights.json --small --device cpu
    python -m bench.weights --out /tmp/table.json --geometry qwen3-30b-a3b --case 4x16384x0 --weights bf16 fp8 int4
    python -m bench.weights --out /tmp/oss.json --geometry gpt-oss-120b --weights bf16 --case 1x4096x0 1x32768x3
    python -m bench.weights --out /tmp/table.json --geometry qwen3.6-35b-a3b --case 1x8192x0 1x8192x3 --method mtp
    python -m bench.weights --out /tmp/table.json --geometry qwen3.5-27b --case 1x8192x3 --method mtp \
        --draft-vocab 32768

Weights are drawn on the device in the format's own parts, and packed as a runtime packs them; bfloat16 runs next to the
others. `--geometry` measures any geometry of `lowlat/tools/bench/geometries.toml` in place of the listed cases, and
steps that draft with the draft model of `--method`, acceptance imposed. A row's floor is its bytes over the wall of the
same run; its predicted time is that floor plus the time that the bfloat16 step of the same case took beyond its own.
`state_bytes` are those of recurrent states, which are among the bytes. Rows are written after each case. Run it from
the root of a checkout.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from bench.lib.bytes import step_bytes
from bench.lib.case import Case
from bench.lib.clock import Timed, own_stream, percentile, round_robin
from bench.lib.conditions import stamps_of, timing_parser, write_json
from bench.lib.model import Model
from bench.lib.run import Work, run_all, wall_of
from bench.lib.step import Step, show_kernels
from bench.lib.wall import Wall
from bench.lib.weights import RandomParts

__all__ = ["CASES", "SMALL_CASES", "WeightsCase", "main"]

PROFILED_STEPS = 10
LLAMA, OSS, QWEN = "llama-8b", "gpt-oss-120b", "qwen3-30b-a3b"


@dataclass(frozen=True)
class WeightsCase:
    """One measured step of a model.

    whole  whether its bytes are those of vectors, too, see `bench.lib.bytes`
    """

    model: Model
    step: Case
    whole: bool = False

    @property
    def name(self) -> str:
        """For instance `llama-8b fp8, LM head fp8, KV bf16, 1 x 8K, S=0`."""
        model = self.model
        draft = f", draft {model.draft}" if self.step.num_speculative_tokens else ""
        draft += f" of {model.draft_vocab_size} ids" if draft and model.draft_vocab_size is not None else ""
        return f"{model.name} {model.weights}, LM head {model.lm_head}, KV {model.kv}{draft}, {self.step.name}"

    @property
    def described(self) -> dict[str, Any]:
        """The part of a row that says what was measured."""
        model, drafts = self.model, self.step.num_speculative_tokens > 0
        weights = "mxfp4" if model.weights == "bf16" and _has_mxfp4(model) else model.weights
        formats = {"weights": weights, "lm_head": model.lm_head, "kv": model.kv, "draft": model.draft}
        imposed = {"method": model.method, "imposed_accept_length": self.step.accept_length} if drafts else {}
        if drafts and model.draft_vocab_size is not None:
            imposed["draft_vocab_size"] = model.draft_vocab_size
        return {"model": model.name, **formats, **asdict(self.step), **imposed}


def _has_mxfp4(model: Model) -> bool:
    experts = model.config.experts
    return experts is not None and experts.weight_format == "mxfp4"


def _dense(model: str, places: tuple[Case, Case, Case]) -> tuple[WeightsCase, ...]:
    """The cases of a dense model, those that others are compared with first.

    places  a step of one slot, one of several, and one that drafts
    """
    alone, several, drafts = places
    cases = [
        WeightsCase(Model(model, weights, head, kv), alone)
        for weights, head, kv in (
            ("bf16", "bf16", "bf16"),
            ("fp8", "bf16", "bf16"),
            ("fp8", "fp8", "bf16"),
            ("int4_128", "bf16", "bf16"),
            ("fp8_block", "bf16", "bf16"),
            ("int4_128_zeros", "bf16", "bf16"),
            ("nvfp4", "bf16", "bf16"),
            ("fp8", "fp8", "fp8"),
        )
    ]
    cases += [WeightsCase(Model(model, kind, kind, "bf16", kind), drafts) for kind in ("bf16", "fp8")]
    cases.append(WeightsCase(Model(model, "fp8", "fp8", "fp8", "fp8"), drafts))
    for kind, kv in (("bf16", "bf16"), ("fp8", "bf16"), ("int4_128", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")):
        cases.append(WeightsCase(Model(model, kind, "bf16", kv), several))
    return tuple(cases)


CASES = (
    *_dense(LLAMA, (Case(1, 8192, 0), Case(4, 16384, 0), Case(1, 8192, 3))),
    *(WeightsCase(Model(OSS, kv=kv), Case(1, 32768, 0)) for kv in ("bf16", "fp8")),
    *(WeightsCase(Model(QWEN, kind), Case(1, 8192, 0), whole=True) for kind in ("bf16", "fp8")),
)
SMALL_CASES = tuple(
    replace(case, model=replace(case.model, weights=case.model.weights.replace("_128", "_32")))
    for case in _dense("tiny", (Case(1, 40, 0), Case(2, 24, 0), Case(1, 24, 3)))
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each; returns 1 if a case failed."""
    options = _options(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        return _measure_all(options, device)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = timing_parser(__doc__, replays=200)
    parser.add_argument("--only", action="append", default=[], help="a part of a case's name; may repeat")
    parser.add_argument("--geometry", help="a name in geometries.toml, in place of the listed cases")
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8", "int4"], help="formats with --geometry")
    parser.add_argument("--case", nargs="+", default=["1x8192x0"], metavar="BxCxS", help="steps with --geometry")
    parser.add_argument("--method", default="eagle3", help="the draft model with --geometry, where a step drafts")
    parser.add_argument("--draft-vocab", type=int, help="ids that are drafted with --geometry; all by default")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no case after so many seconds")
    parser.add_argument("--kernels", action="store_true", help="print each case's kernels, those that take most first")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try everything")
    return parser.parse_args(arguments)


def _measure_all(options: argparse.Namespace, device: torch.device) -> int:
    cases = SMALL_CASES if options.small else CASES
    if options.geometry:
        own = {"method": options.method, "draft_vocab_size": options.draft_vocab}
        models = [Model(options.geometry, kind, **own) for kind in options.weights]
        steps = [Case.parse(text) for text in options.case]
        cases = tuple(WeightsCase(model, step, whole=True) for model in models for step in steps)
    cases = tuple(case for case in cases if not options.only or any(part in case.name for part in options.only))
    wall = wall_of(device)
    works = [Work(case.name, case.described, partial(_measure, options, case, device, wall)) for case in cases]

    def write(rows: list[dict[str, Any]]) -> None:
        _predict(rows)
        write_json(options.out, rows)

    stamps = {"replays": options.replays, **stamps_of(device, options.commit)}
    rows = run_all(works, stamps, write, [device], limit_s=options.limit_s)
    return int(any("error" in row for row in rows))


def _predict(rows: list[dict[str, Any]]) -> None:
    """Complete the last row by what bfloat16 took beyond its floor in the same case."""
    row, shared = rows[-1], ("model", "batch", "context", "num_speculative_tokens")
    if "ms_p50" not in row:
        return
    for plain in rows:
        is_plain = (plain["weights"], plain["kv"]) == ("bf16", "bf16") and "ms_p50" in plain
        if is_plain and all(plain[name] == row[name] for name in shared):
            row["predicted_ms"] = round(row["floor_ms"] + plain["ms_p50"] - plain["floor_ms"], 4)


def _measure(options: argparse.Namespace, case: WeightsCase, device: torch.device, wall: Wall) -> dict[str, Any]:
    """The figures of one case."""
    begin, model = time.perf_counter(), case.model
    plan = model.plan(drafts=case.step.num_speculative_tokens > 0)
    step = Step(model.shapes(case.step), case.step, RandomParts(plan, model.config, device), device)
    made_in = time.perf_counter() - begin
    try:
        timed = Timed(case.name, step.replay, step.reset)
        round_robin([timed], options.replays, options.turn, device)
        step.reset()
        chosen = step.distinct_experts()
        distinct = fmean(chosen) if chosen else None
        moved = step_bytes(step.program, plan, model.config, case.step, distinct, matrices_only=not case.whole)
        if options.kernels and step.num_launches:
            spec = model.config.experts
            read = 0.0 if distinct is None or spec is None else distinct + spec.shared
            show_kernels(case.name, step.profile(PROFILED_STEPS, wall.gb_per_s, read))
        launches = step.num_launches
    finally:
        step.close()
    floor = moved.total / wall.gb_per_s / 1e6
    return {
        "ms_p50": round(timed.median, 4),
        "ms_p99": round(percentile(timed.ms, 99), 4),
        "floor_ms": round(floor, 4),
        "predicted_ms": None,
        "over_floor": round(timed.median / floor, 4),
        "bytes": moved.total,
        "state_bytes": moved.state,
        "launches": launches,
        "distinct_experts": None if distinct is None else round(distinct, 3),
        "wall_gb_per_s": round(wall.gb_per_s, 1),
        "made_in_s": round(made_in, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
