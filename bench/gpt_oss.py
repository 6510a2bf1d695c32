"""The gpt-oss benchmark: one decode step of 120b's and 20b's shape on random weights, next to the GPU's memory wall.

    python -m bench.gpt_oss --out bench/results/h200/gpt_oss.json
    python -m bench.gpt_oss --out /tmp/oss.json --case "120b, 1 x 32K, S=0" --profile
    python -m bench.gpt_oss --out /tmp/oss.json --case "120b, 1 x 32K, S=3" --case "120b, 1 x 32K, S=3, full head"
    python -m bench.gpt_oss --soak 2000 --context 32768 65536 --out bench/results/h200/gpt_oss_soak.json
    python -m bench.gpt_oss --out /tmp/oss.json --small --device cpu

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch

from bench.lib.bytes import step_bytes
from bench.lib.case import Case
from bench.lib.clock import Timed, own_stream, round_robin
from bench.lib.conditions import release, stamps_of, summary_of, timing_parser, write_json
from bench.lib.model import Model
from bench.lib.run import Work, conditions_path, run_all, tokens_per_s, wall_of
from bench.lib.step import Step, show_kernels
from bench.lib.wall import Wall
from bench.lib.weights import Weights, hold
from bench.soak import soak
from lowlat.step.checks import CheckedKinds

__all__ = ["CASES", "OssCase", "main"]

PROFILED_STEPS = 20
ACCEPT_LENGTHS = (2.3, 2.7, 3.0)  # tokens a step, bonus included: what published heads reach at three drafts, and above
DRAFT_VOCABULARY, FULL_VOCABULARY = 32000, 201088  # a draft model of the latter may draft every id
MODELS = {"120b": "gpt-oss-120b", "20b": "gpt-oss-20b", "small": "tiny-experts"}


@dataclass(frozen=True)
class OssCase:
    """One measured step of a model; `alike`: all rows of a layer choose the same experts."""

    size: str
    step: Case
    alike: bool = False
    draft_vocab_size: int = DRAFT_VOCABULARY

    @property
    def name(self) -> str:
        """For instance `120b, 1 x 32K, S=3, experts alike`, or `.., full head`."""
        known = {DRAFT_VOCABULARY: "", FULL_VOCABULARY: ", full head"}
        vocabulary = known.get(self.draft_vocab_size, f", draft vocabulary {self.draft_vocab_size}")
        drafting = vocabulary if self.step.num_speculative_tokens else ""
        return f"{self.size}, {self.step.name}{', experts alike' if self.alike else ''}{drafting}"

    @property
    def model(self) -> Model:
        """The geometry."""
        return Model(MODELS[self.size], draft_vocab_size=self.draft_vocab_size)


CASES = (
    OssCase("120b", Case(1, 4096, 0)),
    OssCase("120b", Case(1, 32768, 0)),
    OssCase("120b", Case(1, 32768, 3)),
    OssCase("120b", Case(1, 32768, 3), alike=True),
    OssCase("120b", Case(4, 16384, 0)),
    OssCase("120b", Case(4, 16384, 3)),
    OssCase("20b", Case(1, 32768, 0)),
)
MORE_CASES = (OssCase("120b", Case(1, 32768, 3), draft_vocab_size=FULL_VOCABULARY),)  # run where asked for by name
SMALL_CASES = (
    OssCase("small", Case(1, 320, 0)),
    OssCase("small", Case(2, 192, 3), draft_vocab_size=160),
    OssCase("small", Case(2, 192, 3), alike=True, draft_vocab_size=160),
)


class Held:
    """The weights of the last model that was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._weights = device, Weights()
        self._key: tuple[Model, bool] | None = None

    def of(self, case: OssCase) -> Weights:
        """Those of a case; the ones before are dropped first."""
        key = (case.model, case.alike)
        if key != self._key:
            self.drop()
            self._weights = hold(case.model.plan(drafts=True), case.model.config, self._device, alike=case.alike)
            self._key = key
        return self._weights

    def drop(self) -> None:
        """Release them."""
        self._weights.clear()
        self._key = None
        release(self._device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each, or soak; returns 1 if a case failed."""
    options = _options(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        return _soak(options, device) if options.soak else _measure_all(options, device)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = timing_parser(__doc__, replays=300, must_write=False)
    parser.add_argument("--case", action="append", default=[], help="a case's name; may repeat")
    parser.add_argument("--profile", action="store_true", help="print each case's kernels, those that take most first")
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
    size = "small" if options.small else options.model
    vocabulary = min(DRAFT_VOCABULARY, Model(MODELS[size]).config.vocab_size)
    stamps, start = stamps_of(device, options.commit), time.perf_counter()
    cases = [OssCase(size, Case(1, length, options.drafts), draft_vocab_size=vocabulary) for length in options.context]
    weights = Held(device).of(cases[0])
    loaded = {"weights_in_s": round(time.perf_counter() - start, 1)}
    every = CheckedKinds(masks=True, spans=True, lengths=True, falls_back=False)
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append({"case": case.name, "asked_steps": options.soak, **loaded, **stamps})
        shapes = case.model.shapes(case.step, checks=every, simulated_acceptance=None)

        def progress(found: dict[str, Any]) -> None:
            rows[-1] |= found
            print(json.dumps({"case": rows[-1]["case"], **found}), flush=True)
            if options.out is not None:
                write_json(options.out, rows)

        soak(partial(Step, shapes, case.step, weights, device), options.soak, progress)
        release(device)
    return int(any(row["problems"] for row in rows))


def _measure_all(options: argparse.Namespace, device: torch.device) -> int:
    every = SMALL_CASES if options.small else (*CASES, *MORE_CASES) if options.case else CASES
    cases = [case for case in every if not options.case or case.name in options.case]
    held, wall = Held(device), wall_of(device)
    works = [Work(case.name, _described(case), partial(_measure, options, case, held, device, wall)) for case in cases]
    stamps = {"replays": options.replays, **stamps_of(device, options.commit)}
    write = partial(_write, options, [wall])
    rows = run_all(works, stamps, write, [device], shown=lambda row: beside_wall(row, wall.gb_per_s))
    held.drop()
    _write(options, [wall, wall_of(device)], rows)
    return int(any("error" in row for row in rows))


def _measure(
    options: argparse.Namespace, case: OssCase, held: Held, device: torch.device, wall: Wall
) -> dict[str, Any]:
    """One row, without the fields that depend on the wall."""
    model, weights = case.model, held.of(case)
    step = Step(model.shapes(case.step), case.step, weights, device)
    try:
        entry = Timed("ours", step.replay, step.reset)
        round_robin([entry], options.replays, options.turn, device)
        row = {"executor": step.name, **summary_of(entry, options.replays, options.turn, device)}
        step.reset()
        distinct = step.distinct_experts()
        plan = model.plan(drafts=case.step.num_speculative_tokens > 0)
        moved = step_bytes(step.program, plan, model.config, case.step, fmean(distinct), matrices_only=True)
        row |= {"launches": step.num_launches, "distinct_experts": round(fmean(distinct), 3)}
        row |= {"distinct_experts_a_layer": distinct, "bytes": moved.total}
        row |= {"idle_share": None, "profiled_step_us": None}
        if step.num_launches:
            summary = step.profile(PROFILED_STEPS, wall.gb_per_s, fmean(distinct))
            row |= {"idle_share": round(summary.idle.share, 4), "profiled_step_us": round(summary.step_us, 1)}
            if options.profile:
                show_kernels(case.name, summary)
        return row
    finally:
        step.close()


def _described(case: OssCase) -> dict[str, Any]:
    config, drafts = case.model.config, case.step.num_speculative_tokens > 0
    rows = 1 if case.alike else case.step.batch * case.step.rows
    expected = 0.0 if config.experts is None else config.experts.expected_distinct(rows)
    return {
        "case": case.name,
        "model": case.size,
        **asdict(case.step),
        "draft_vocab_size": case.draft_vocab_size if drafts else None,
        "experts": "alike" if case.alike else "random",
        "expected_experts": round(expected, 3),
    }


def beside_wall(row: dict[str, Any], gb_per_s: float) -> dict[str, Any]:
    """The row with what follows from the wall and from its times."""
    more: dict[str, Any] = {"wall_gb_per_s": round(gb_per_s, 1)}
    if "bytes" in row:
        floor, simulated = row["bytes"] / gb_per_s / 1e6, bool(row["num_speculative_tokens"])
        more |= {"floor_ms": round(floor, 4), "over_floor": round(row["ms_p50"] / floor, 4)}
        speed = {str(each): tokens_per_s(row["batch"], row["ms_p50"], each) for each in ACCEPT_LENGTHS}
        more["tokens_per_s"] = speed if simulated else tokens_per_s(row["batch"], row["ms_p50"], None)
        more["tokens_per_s_is_simulated"] = simulated
    return row | more


def bound_speedup(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """The most that speculation can gain, by accept length: that length times the floor at S = 0 over the row's floor.

    None at S = 0, and where S = 0 was not measured for the same model, batch and context.
    """
    if not row["num_speculative_tokens"]:
        return None
    names = ("model", "batch", "context")
    for other in rows:
        same = all(other[name] == row[name] for name in names)
        if same and not other["num_speculative_tokens"] and other.get("floor_ms"):
            return {str(length): round(length * other["floor_ms"] / row["floor_ms"], 4) for length in ACCEPT_LENGTHS}
    return None


def _write(options: argparse.Namespace, walls: Sequence[Wall], rows: Sequence[dict[str, Any]]) -> None:
    wall = max(measured.gb_per_s for measured in walls)
    beside = [beside_wall(row, wall) for row in rows]
    good = [row for row in beside if "error" not in row]
    for row in good:
        row["bound_speedup"] = bound_speedup(row, good)
    conditions = {
        "models": {row["model"]: MODELS[row["model"]] for row in rows},
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
