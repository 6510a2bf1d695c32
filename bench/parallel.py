"""Decode steps and prompts of a target cut for several GPUs, next to one GPU's: milliseconds and the floor of a GPU.

    python -m bench.parallel --out bench/results/h200x2/parallel.json
    python -m bench.parallel --out /tmp/parallel.json --only "llama-8b, 1 x 8K, S=0" --kernels 12
    python -m bench.parallel --out /tmp/parallel.json --small --device cpu
    python -m bench.parallel --out bench/results/h200x2/soak.json --soak 2000

Weights are random, drawn on the first GPU and cut as a checkpoint's are; routers spread their rows. Steps that draft
have imposed acceptance. A floor counts the bytes of the GPU that reads most, over the wall of the first GPU in the
same run. Steps are started as a runtime starts them, one after the other, and timed by events on the first GPU's
stream. `exchange_us` is the time that an all-reduce adds to a step: the step's time less that of the same GEMMs,
attention and rows on one GPU without exchanges (`alone_ms_p50`), over the number of exchanges. vLLM's figures on two
such GPUs were measured elsewhere (0.24.0, two H200s), and stand next to for comparison. Rows are written after each
case. `--soak` runs steps on all GPUs with real acceptance and checks after every few what must hold on each rank and
between them; it measures nothing. Run it from the root of a checkout.
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.clock import Timed, own_stream, percentile, round_robin
from bench.conditions import release, stamps_of, write_json
from bench.dense_cases import Case
from bench.parallel_step import ParallelModel, ParallelPrompts, ParallelStep, alone_step, devices_of
from bench.soak import soak
from bench.wall import Wall, measure_wall

__all__ = ["CASES", "PROMPTS", "ParallelCase", "main", "table"]

OTHERS = "vllm_two_cards_ms"
VLLM_STEPS = {("llama-8b", 1, 8192, 0): 3.65, ("llama-8b", 4, 16384, 0): 4.52, ("llama-70b", 1, 8192, 0): 21.0,
              ("gpt-oss-120b", 1, 4096, 0): 3.94}  # fmt: skip
VLLM_PROMPTS = {("llama-8b", 2048): 33.5, ("llama-8b", 8192): 130.0, ("llama-8b", 32768): 706.0,
                ("llama-70b", 2048): 254.0, ("llama-70b", 8192): 1058.0}  # fmt: skip


@dataclass(frozen=True)
class ParallelCase:
    """One measured step of a geometry in `lowlat/tools/bench/geometries.toml`, on so many GPUs.

    draft_size  GPUs that a draft model is cut for
    invariant   with `tp_invariant`
    """

    model: str
    size: int
    step: Case
    draft_size: int = 1
    invariant: bool = False

    @property
    def name(self) -> str:
        """For instance `llama-8b, 1 x 8K, S=3, 2 cards, draft on 1`."""
        draft = f", draft on {self.draft_size}" if self.step.num_speculative_tokens and self.size > 1 else ""
        kind = ", tp_invariant" if self.invariant else ""
        return f"{self.model}, {self.step.name}, {self.size} GPUs{draft}{kind}"


def _cases(*given: tuple[str, Case, tuple[int, ...]], invariant: bool = False) -> tuple[ParallelCase, ...]:
    """Each step on all its numbers of GPUs; one that drafts on several GPUs with the draft model cut and whole."""
    found = []
    for model, step, sizes in given:
        for size in sizes:
            drafts = (size, 1) if step.num_speculative_tokens and size > 1 else (size,)
            found += [ParallelCase(model, size, step, draft, invariant) for draft in drafts]
    return tuple(found)


CASES = _cases(
    ("llama-8b", Case(1, 8192, 0), (1, 2, 4)),
    ("llama-8b", Case(1, 8192, 3), (1, 2, 4)),
    ("llama-8b", Case(4, 16384, 0), (1, 2, 4)),
    ("gpt-oss-120b", Case(1, 4096, 0), (1, 2, 4)),
    ("gpt-oss-120b", Case(1, 32768, 3), (1, 2, 4)),
    ("llama-70b", Case(1, 8192, 0), (2, 4)),
) + _cases(
    ("llama-8b", Case(1, 8192, 0), (1, 2)),
    ("llama-8b", Case(1, 8192, 3), (1, 2)),
    ("gpt-oss-120b", Case(1, 4096, 0), (1, 2)),
    invariant=True,
)
PROMPTS = (("llama-8b", (1, 2, 4), (2048, 8192)), ("llama-70b", (2, 4), (2048,)))
SOAKS = (
    *(ParallelCase("llama-8b", 2, Case(1, 32768, depth), 2) for depth in (0, 3)),
    *(ParallelCase("gpt-oss-120b", 2, Case(1, 32768, depth), 1) for depth in (0, 3)),
    ParallelCase("llama-8b", 2, Case(1, 32768, 3), 2, invariant=True),
)
SMALL_SOAKS = (ParallelCase("tiny", 2, Case(2, 24, 3), 2), ParallelCase("tiny", 2, Case(1, 24, 0), invariant=True))
SMALL_CASES = _cases(
    ("tiny", Case(1, 40, 0), (1, 2)), ("tiny", Case(2, 24, 3), (2,)), ("tiny-experts", Case(1, 40, 0), (2,))
) + _cases(("tiny", Case(1, 40, 0), (2,)), invariant=True)
SMALL_PROMPTS = (("tiny", (1, 2), (300,)),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each; returns 1 if a case failed."""
    options, begin = _options(arguments), time.perf_counter()
    device = torch.device(options.device)
    if options.soak:
        stamps, work = {"asked_steps": options.soak, "weights": "random"}, _soaks(options, device)
    else:
        wall = _wall(device)
        stamps = {"replays": options.replays, "weights": "random", "wall_gb_per_s": round(wall.gb_per_s, 1)}
        work = _work(options, device, wall)
    stamps |= stamps_of(device, options.commit)
    rows: list[dict[str, Any]] = []
    for name, row, measure in work:
        start = time.perf_counter()
        if options.only and not any(part in name for part in options.only):
            continue
        if start - begin > options.limit_s:
            row["skipped"] = f"{options.limit_s:g} s were over"
        else:
            try:
                row |= measure()
            except Exception as error:  # the other cases are still worth measuring
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"
        rows.append({**row, **stamps, "measured_in_s": round(time.perf_counter() - start, 1)})
        print(json.dumps(rows[-1]), flush=True)
        write_json(options.out, rows)
        for each in devices_of(device, options.gpus):
            release(each)
    return int(any("error" in row or row.get("problems") for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", action="append", default=[], help="a part of a case's name; may repeat")
    parser.add_argument("--cards", type=int, default=8, help="GPUs at most; cases of more are left out")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no case after so many seconds")
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--turn", type=int, default=50, help="replays between resets")
    parser.add_argument("--runs", type=int, default=5, help="of a prompt")
    parser.add_argument("--kernels", type=int, default=0, help="kernels to list for each step, those that take most")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="run N steps of each case with checks")
    parser.add_argument("--small", action="store_true", help="tiny models, to try everything")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args(arguments)
    if torch.device(given.device).type == "cuda":
        given.gpus = min(given.gpus, torch.cuda.device_count())
    return given


def _wall(device: torch.device) -> Wall:
    if device.type != "cuda":
        return Wall(100.0, 0, 0, {})
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return measure_wall(device)


def _work(options: argparse.Namespace, device: torch.device, wall: Wall) -> list[tuple[str, dict[str, Any], Any]]:
    """The name, the described row and the measurement of every case."""
    found: list[tuple[str, dict[str, Any], Any]] = []
    for case in SMALL_CASES if options.small else CASES:
        if case.size <= options.gpus:
            row = {"model": case.model, "tensor_parallel_size": case.size, **asdict(case.step)}
            if case.invariant:
                row["tp_invariant"] = True
            if case.step.num_speculative_tokens:
                row |= {"draft_tensor_parallel_size": case.draft_size, "imposed_accept_length": case.step.accept_length}
            key = case.model, *asdict(case.step).values()
            if case.size == 2 and key in VLLM_STEPS:
                row[OTHERS] = VLLM_STEPS[key]
            found.append((case.name, row, lambda case=case: _measure_step(options, case, device, wall)))
    for model, sizes, lengths in SMALL_PROMPTS if options.small else PROMPTS:
        for size in sizes:
            if size <= options.gpus:
                row = {"model": model, "tensor_parallel_size": size, "prompts": list(lengths)}
                measure: Any = lambda model=model, size=size, lengths=lengths: _measure_prompts(  # noqa: E731
                    options, model, size, lengths, device
                )
                found.append((f"{model}, prompts, {size} GPUs", row, measure))
    return found


def _soaks(options: argparse.Namespace, device: torch.device) -> list[tuple[str, dict[str, Any], Any]]:
    """The name, the described row and the run of every soak, on all GPUs."""
    found: list[tuple[str, dict[str, Any], Any]] = []
    for case in SMALL_SOAKS if options.small else SOAKS:
        if case.size <= options.gpus:
            row = {"model": case.model, "tensor_parallel_size": case.size, **asdict(case.step)}
            row |= {"draft_tensor_parallel_size": case.draft_size, "tp_invariant": case.invariant}
            found.append((case.name, row, lambda case=case: _soak(options, case, device)))
    return found


def _soak(options: argparse.Namespace, case: ParallelCase, device: torch.device) -> dict[str, Any]:
    model = ParallelModel(case.model, devices_of(device, case.size), case.draft_size, case.invariant)
    return soak(lambda: ParallelStep(model, case.step, imposed=False), options.soak)


def _measure_step(options: argparse.Namespace, case: ParallelCase, device: torch.device, wall: Wall) -> dict[str, Any]:
    begin = time.perf_counter()
    model = ParallelModel(case.model, devices_of(device, case.size), case.draft_size, case.invariant)
    step = ParallelStep(model, case.step)
    made_in = time.perf_counter() - begin
    try:
        ms: list[float] = []
        while len(ms) < options.replays:
            ms += step.times(min(options.turn, options.replays - len(ms)))
        experts = step.expected_experts()
        moved = step.bytes(experts)
        all_reduces = step.num_all_reduces
        if options.kernels and device.type == "cuda":
            print("\n".join(step.list_kernels(options.kernels, wall.gb_per_s)), flush=True)
    finally:
        step.close()
    compared = all_reduces and not case.invariant  # a model of one rank's widths has no parts of K
    alone = _alone(options, model, case, device) if compared else {}
    if compared:
        alone["exchanges"] = all_reduces
        alone["exchange_us"] = round(1e3 * (percentile(ms, 50) - alone["alone_ms_p50"]) / all_reduces, 3)
    floor = moved / wall.gb_per_s / 1e6
    return {
        "ms_p50": round(percentile(ms, 50), 4),
        "ms_p99": round(percentile(ms, 99), 4),
        "floor_ms": round(floor, 4),
        "over_floor": round(percentile(ms, 50) / floor, 4),
        "bytes_of_a_card": moved,
        "expected_experts": experts,
        **alone,
        "made_in_s": round(made_in, 1),
    }


def table(rows: Sequence[Mapping[str, Any]], size: int = 2) -> str:
    """The rows of a README's table: a step on one GPU and on two, or another number of them, and prompts."""
    word = {2: "two", 4: "four", 8: "eight"}[size]
    heads = ["one GPU", f"{word} GPUs", f"floor of {word}", "an all-reduce, us", "vLLM on two"]
    heads = heads if size == 2 else heads[:-1]
    lines = [f"| | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    measured = [row for row in rows if "error" not in row and "skipped" not in row]
    for row in (row for row in measured if row["tensor_parallel_size"] == size):
        alone = next((one for one in measured if one["tensor_parallel_size"] == 1 and _key(one) == _key(row)), {})
        others = row.get(OTHERS)
        if "prompts" in row:
            for length, ms in row["prompt_ms_p50"].items():
                one = alone.get("prompt_ms_p50", {}).get(length)
                cells = [_figure(one, 1), _figure(ms, 1), "-", "-", _figure((others or {}).get(length), 1)]
                lines.append(f"| {row['model']}, a prompt of {length} | {' | '.join(cells[: len(heads)])} |")
            continue
        step = Case(row["batch"], row["context"], row["num_speculative_tokens"])
        draft = row.get("draft_tensor_parallel_size")
        whole = "" if draft is None else f", the draft model {'cut, too' if draft > 1 else 'whole on each'}"
        cells = [
            _figure(alone.get("ms_p50"), 2), _figure(row["ms_p50"], 2), _figure(row["floor_ms"], 2),
            _figure(row.get("exchange_us"), 1), _figure(others, 2),
        ]  # fmt: skip
        kind = ", `tp_invariant`" if row.get("tp_invariant") else ""
        lines.append(f"| {row['model']}, {step.name}{whole}{kind} | {' | '.join(cells[: len(heads)])} |")
    return "\n".join(lines)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        str(row.get(name))
        for name in ("model", "batch", "context", "num_speculative_tokens", "tp_invariant", "prompts")
    )


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _alone(
    options: argparse.Namespace, model: ParallelModel, case: ParallelCase, device: torch.device
) -> dict[str, Any]:
    """What a rank's work takes without exchanges."""
    for each in model.devices:
        release(each)
    step = alone_step(model, case.step)
    try:
        timed = Timed(case.name, step.replay, step.reset)
        with own_stream(device):
            round_robin([timed], options.replays, options.turn, device)
    finally:
        step.close()
    return {"alone_ms_p50": round(timed.median, 4)}


def _measure_prompts(
    options: argparse.Namespace, model: str, size: int, lengths: Sequence[int], device: torch.device
) -> dict[str, Any]:
    prompts = ParallelPrompts(ParallelModel(model, devices_of(device, size), 1), max(lengths))
    try:
        found = {str(length): prompts.times(length, options.runs) for length in lengths}
    finally:
        prompts.close()
    others = {str(length): VLLM_PROMPTS[model, length] for length in lengths if (model, length) in VLLM_PROMPTS}
    row: dict[str, Any] = {"prompt_ms_p50": {length: round(percentile(ms, 50), 3) for length, ms in found.items()}}
    return row | ({OTHERS: others} if size == 2 and others else {})


if __name__ == "__main__":
    sys.exit(main())
