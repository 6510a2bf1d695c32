"""Decode steps by the format of weights, on random ones: milliseconds next to the floor of their bytes.

    python -m bench.weights --out bench/results/h200/weights.json
    python -m bench.weights --out /tmp/weights.json --only "fp8" --limit-s 60
    python -m bench.weights --out /tmp/weights.json --small --device cpu
    python -m bench.weights --out /tmp/table.json --geometry qwen3-30b-a3b --case 4x16384x0 --weights bf16 fp8 int4

Weights are drawn on the device in the format's own parts, and packed as a runtime packs them; bfloat16 runs next to the
others. `--geometry` measures any geometry of `lowlat/tools/bench/geometries.toml` in place of the listed cases, without
drafts but for Llama-3.1-8B's. A row's floor is its bytes over the wall of the same run; its predicted time is that
floor plus the time that the bfloat16 step of the same case took beyond its own. Rows are written after each case. Run
it from the root of a checkout.
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.clock import Timed, own_stream, percentile, round_robin
from bench.conditions import add_timing_options, release, stamps_of, write_json
from bench.dense_cases import LLAMA_8B, TINY, Case, DenseGeometry, weight_shapes
from bench.gpt_oss_cases import MODELS, OssCase
from bench.gpt_oss_cases import step_bytes as oss_bytes
from bench.gpt_oss_report import show_kernels
from bench.gpt_oss_step import OssStep
from bench.gpt_oss_step import make_weights as make_oss_weights
from bench.lowlat_step import ExecutorStep, GraphStep, step_geometry
from bench.table_step import TableModel, TableStep
from bench.wall import Wall, measure_wall
from lowlat.kernels.formats import MATRIX_FORMATS
from lowlat.models.target import coded
from lowlat.speculators.tree.topology import TreeTopology

__all__ = ["CASES", "SMALL_CASES", "WeightsCase", "main", "make_weights", "weight_bytes"]

PROFILED_STEPS = 10
LLAMA, OSS, QWEN = "llama-8b", "gpt-oss-120b", "qwen3-30b-a3b"
SPREAD = {"fp8": 60.0, "fp8_block": 60.0, "nvfp4": 30.0}  # deviations of random codes, about; INT4's are 4.6
GEOMETRIES: dict[str, DenseGeometry] = {LLAMA: LLAMA_8B, "tiny": TINY}


@dataclass(frozen=True)
class WeightsCase:
    """One measured step.

    weights, lm_head  formats of the target's layers and of its LM head
    kv                of the KV cache: "bf16" or "fp8"
    draft             of the draft model's matrices
    """

    model: str
    weights: str
    lm_head: str
    kv: str
    step: Case
    draft: str = "bf16"

    @property
    def name(self) -> str:
        """For instance `llama-8b fp8, LM head fp8, KV bf16, 1 x 8K, S=0`."""
        draft = f", draft {self.draft}" if self.step.num_speculative_tokens else ""
        return f"{self.model} {self.weights}, LM head {self.lm_head}, KV {self.kv}{draft}, {self.step.name}"

    def format_of(self, weight: str) -> str:
        """The format of a matrix, by its canonical name."""
        if weight.startswith("head."):
            return self.draft
        if weight == "lm_head.weight":
            return self.lm_head
        return "bf16" if weight == "embed.weight" else self.weights


def _dense(model: str, places: tuple[Case, Case, Case]) -> tuple[WeightsCase, ...]:
    """The cases of a dense model, those that others are compared with first.

    places  a step of one slot, one of several, and one that drafts
    """
    alone, several, drafts = places
    cases = [
        WeightsCase(model, weights, head, kv, alone)
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
    cases += [WeightsCase(model, kind, kind, "bf16", drafts, kind) for kind in ("bf16", "fp8")]
    cases.append(WeightsCase(model, "fp8", "fp8", "fp8", drafts, "fp8"))
    for kind, kv in (("bf16", "bf16"), ("fp8", "bf16"), ("int4_128", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")):
        cases.append(WeightsCase(model, kind, "bf16", kv, several))
    return tuple(cases)


CASES = (
    *_dense(LLAMA, (Case(1, 8192, 0), Case(4, 16384, 0), Case(1, 8192, 3))),
    *(WeightsCase(OSS, "mxfp4", "bf16", kv, Case(1, 32768, 0)) for kv in ("bf16", "fp8")),
    *(WeightsCase(QWEN, kind, "bf16", "bf16", Case(1, 8192, 0)) for kind in ("bf16", "fp8")),
)
SMALL_CASES = tuple(
    replace(case, weights=case.weights.replace("_128", "_32"))
    for case in _dense("tiny", (Case(1, 40, 0), Case(2, 24, 0), Case(1, 24, 3)))
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each; returns 1 if a case failed."""
    options = _options(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        return _measure_all(options, device)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", action="append", default=[], help="a part of a case's name; may repeat")
    parser.add_argument("--geometry", help="a name in geometries.toml, in place of the listed cases")
    parser.add_argument("--weights", nargs="+", default=["bf16", "fp8", "int4"], help="formats with --geometry")
    parser.add_argument("--case", nargs="+", default=["1x8192x0"], metavar="BxCxS", help="steps with --geometry")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no case after so many seconds")
    add_timing_options(parser, replays=200)
    parser.add_argument("--kernels", action="store_true", help="print each case's kernels, those that take most first")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try everything")
    return parser.parse_args(arguments)


def _measure_all(options: argparse.Namespace, device: torch.device) -> int:
    begin, cases = time.perf_counter(), SMALL_CASES if options.small else CASES
    if options.geometry:
        steps = [Case(*map(int, text.split("x"))) for text in options.case]
        whole = {"int4": "int4_128"} if options.geometry in GEOMETRIES else {}  # as a dense model's parts are named
        kinds = [whole.get(kind, kind) for kind in options.weights]
        cases = tuple(WeightsCase(options.geometry, kind, "bf16", "bf16", step) for kind in kinds for step in steps)
    cases = tuple(case for case in cases if not options.only or any(part in case.name for part in options.only))
    stamps = {"replays": options.replays, **stamps_of(device, options.commit)}
    wall = measure_wall(device) if device.type == "cuda" else Wall(100.0, 0, 0, {})
    rows: list[dict[str, Any]] = []
    for case in cases:
        start = time.perf_counter()
        row = _described(case)
        if start - begin > options.limit_s:
            row["skipped"] = f"{options.limit_s:g} s were over"
        else:
            try:
                row |= measure_case(options, case, device, wall)
            except Exception as error:  # the other cases are still worth measuring
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"
        rows.append({**row, **stamps, "measured_in_s": round(time.perf_counter() - start, 1)})
        _predict(rows)
        print(json.dumps(rows[-1]), flush=True)
        write_json(options.out, rows)
        release(device)
    return int(any("error" in row for row in rows))


def _described(case: WeightsCase) -> dict[str, Any]:
    return {**{name: value for name, value in asdict(case).items() if name != "step"}, **asdict(case.step)}


def _predict(rows: list[dict[str, Any]]) -> None:
    """Complete the last row by what bfloat16 took beyond its floor in the same case."""
    row, shared = rows[-1], ("model", "batch", "context", "num_speculative_tokens")
    if "ms_p50" not in row:
        return
    for plain in rows:
        is_plain = (plain["weights"], plain["kv"]) == ("bf16", "bf16") and "ms_p50" in plain
        if is_plain and all(plain[name] == row[name] for name in shared):
            row["predicted_ms"] = round(row["floor_ms"] + plain["ms_p50"] - plain["floor_ms"], 4)


def measure_case(options: argparse.Namespace, case: WeightsCase, device: torch.device, wall: Wall) -> dict[str, Any]:
    """The figures of one case."""
    begin = time.perf_counter()
    step, moved = _make_step(case, device)
    made_in = time.perf_counter() - begin
    try:
        timed = Timed(case.name, step.replay, step.reset)
        round_robin([timed], options.replays, options.turn, device)
        if options.kernels and device.type == "cuda":
            show_kernels(case.name, step.profile(PROFILED_STEPS, wall.gb_per_s))
    finally:
        step.close()
    floor = moved / wall.gb_per_s / 1e6
    return {
        "ms_p50": round(timed.median, 4),
        "ms_p99": round(percentile(timed.ms, 99), 4),
        "floor_ms": round(floor, 4),
        "predicted_ms": None,
        "over_floor": round(timed.median / floor, 4),
        "bytes": moved,
        "wall_gb_per_s": round(wall.gb_per_s, 1),
        "made_in_s": round(made_in, 1),
    }


def _make_step(case: WeightsCase, device: torch.device) -> tuple[ExecutorStep, int]:
    """The step, ready to be replayed, and the bytes that it must read."""
    if case.model == OSS:
        model, oss = MODELS["120b"], OssCase("120b", case.step)
        weights = make_oss_weights(model, device, alike=False, draft_vocab_size=64)
        made = OssStep(model, oss, weights, device, has_codes=case.kv == "fp8")
        return made, oss_bytes(model, oss, fmean(made.distinct_experts()), 1 if case.kv == "fp8" else 2)
    if case.model not in GEOMETRIES:
        table = TableStep(TableModel(case.model, case.weights), case.step, device)
        has_experts = table.model.config.experts is not None
        return table, table.bytes(fmean(table.distinct_experts()) if has_experts else None)
    geometry, chain = GEOMETRIES[case.model], TreeTopology.chain(case.step.num_speculative_tokens)
    shapes = step_geometry(geometry, case.step, chain)
    if case.kv == "fp8":
        shapes = replace(shapes, config=coded(shapes.config))
    dense = make_weights(geometry, case, device)
    return GraphStep(geometry, case.step, dense, device, shapes=shapes), weight_bytes(geometry, case)


def make_weights(geometry: DenseGeometry, case: WeightsCase, device: torch.device) -> dict[str, torch.Tensor]:
    """Random weights of a target, and of its head where it drafts, by canonical names, in the case's formats."""
    weights: dict[str, torch.Tensor] = {}
    for name, shape in weight_shapes(geometry).items():
        if name.startswith("head.") and not case.step.num_speculative_tokens:
            continue
        kind = case.format_of(name)
        if len(shape) == 1 or kind == "bf16":
            mean, spread = (1.0, 0.1) if len(shape) == 1 else (0.0, 1.0 if name == "embed.weight" else shape[1] ** -0.5)
            weights[name] = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(mean, spread)
            continue
        rows, columns = shape
        scale = columns**-0.5 / SPREAD.get(kind, 4.6)
        for part, (extents, dtype) in MATRIX_FORMATS[kind].specs(rows, columns, torch.bfloat16).items():
            made = torch.empty(extents, dtype=dtype, device=device)
            if dtype == torch.float32:
                made = made.fill_(scale).bfloat16().to(torch.bfloat16 if part == "int4_scales" else dtype)
            elif part == "nvfp4_scales":
                made.fill_(0x38)  # 1.0
            else:
                made.random_(0, 16 if part.endswith("zeros") else 256)
                if part == "fp8":
                    made.bitwise_and_(0xF7)  # no NaN
            weights[f"{name.removesuffix('.weight')}.{part}"] = made
    if case.step.num_speculative_tokens:
        drafted = torch.randperm(geometry.vocab_size, device=device)[: geometry.draft_vocab_size]
        weights["head.draft_to_target"] = drafted.sort().values.to(torch.int32)
    return weights


def weight_bytes(geometry: DenseGeometry, case: WeightsCase) -> int:
    """Bytes that a step must read: every matrix once each use, in its format, and the KV cache; as `dense_cases` counts
    them."""
    depth, total = case.step.num_speculative_tokens, 0
    for name, shape in weight_shapes(geometry).items():
        if len(shape) > 1 and name != "embed.weight":
            uses = 1 if not name.startswith("head.") else min(depth, 1) if name == "head.fc.weight" else depth
            kind = case.format_of(name)
            scales = 2 if kind.startswith("int4") else 0  # a group's are bfloat16 numbers
            held = MATRIX_FORMATS[kind]
            rows, columns = shape
            groups = rows * columns // held.block if scales else 0
            total += uses * (held.num_bytes(rows, columns) - scales * groups)
    layers = geometry.num_layers + depth
    kept = 1 if case.kv == "fp8" else 2
    return total + layers * case.step.batch * case.step.context * 2 * geometry.kv_size * kept


if __name__ == "__main__":
    sys.exit(main())
