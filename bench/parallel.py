"""This program times decode steps and prompts on several GPUs and on one: milliseconds, and the floor of a GPU.

    python -m bench.parallel --out bench/results/h200x2/parallel.json
    python -m bench.parallel --out /tmp/parallel.json --only "llama-8b, 1 x 8K, S=0" --kernels 12
    python -m bench.parallel --out /tmp/parallel.json --small --device cpu

Weights are random, drawn on the first GPU and cut as a checkpoint's are; routers spread their rows. Steps that draft
have imposed acceptance. A floor counts the bytes of the GPU that reads most, over the wall of the first GPU in the
same run. Steps are started as a runtime starts them, one after the other, and timed by events on the first GPU's
stream. `exchange_us` is the time that an all-reduce adds to a step: the step's time less that of the same GEMMs,
attention and rows on one GPU without exchanges (`alone_ms_p50`), over the number of exchanges. vLLM's figures on two
such GPUs were measured elsewhere (0.24.0, two H200s), and stand next to for comparison. Rows are written after each
case. Run it from the root of a checkout.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.lib.bytes import step_bytes
from bench.lib.case import Case
from bench.lib.clock import Timed, own_stream, percentile, round_robin
from bench.lib.conditions import release, stamps_of, timing_parser, write_json
from bench.lib.model import Model
from bench.lib.run import Work, run_all, wall_of
from bench.lib.step import Step, devices_of, show_kernels
from bench.lib.weights import RandomParts, planned
from bench.prompts import Prompts
from lowlat.engine.loading.geometry import rank_geometries
from lowlat.models.weight_plan import weight_plan
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.step.state import StepGeometry

__all__ = ["CASES", "PROMPTS", "ParallelCase", "main", "table"]

PROFILED_STEPS = 10
CHUNKS_AT_ONCE = 16
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

    def shapes(self) -> StepGeometry:
        """The shapes of the whole model's programs."""
        return Model(self.model).shapes(self.step)

    def rank_shapes(self, shapes: StepGeometry) -> list[StepGeometry]:
        """The shapes of each rank's programs."""
        options = RuntimeConfig(tensor_parallel_size=self.size, tp_invariant=self.invariant)
        draft = SpeculativeConfig(method="eagle3", model="random", draft_tensor_parallel_size=self.draft_size)
        return rank_geometries(shapes, options, draft if shapes.speculator is not None else None)

    def weights(self, device: torch.device) -> RandomParts:
        """Random weights of the whole model, drawn on a device."""
        model = Model(self.model)
        return RandomParts(model.plan(drafts=self.step.num_speculative_tokens > 0), model.config, device)

    def make_step(self, device: torch.device) -> Step:
        """The step on all its devices."""
        shapes, devices = self.shapes(), devices_of(device, self.size)
        return Step(shapes, self.step, self.weights(devices[0]), devices, ranks=self.rank_shapes(shapes))


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
    ("qwen3.5-27b", Case(1, 8192, 0), (1, 4)),
    ("qwen3.6-35b-a3b", Case(1, 8192, 0), (1, 4)),
    ("gemma-4-31b", Case(1, 8192, 0), (1, 4)),
) + _cases(
    ("llama-8b", Case(1, 8192, 0), (1, 2)),
    ("llama-8b", Case(1, 8192, 3), (1, 2)),
    ("gpt-oss-120b", Case(1, 4096, 0), (1, 2)),
    invariant=True,
)
PROMPTS = (("llama-8b", (1, 2, 4), (2048, 8192)), ("llama-70b", (2, 4), (2048,)))
SMALL_CASES = _cases(
    ("tiny", Case(1, 40, 0), (1, 2)), ("tiny", Case(2, 24, 3), (2,)), ("tiny-experts", Case(1, 40, 0), (2,))
) + _cases(("tiny", Case(1, 40, 0), (2,)), invariant=True)
SMALL_PROMPTS = (("tiny", (1, 2), (300,)),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every case and write the rows after each; returns 1 if a case failed."""
    options = _options(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        wall = wall_of(device)
    stamps = {"replays": options.replays, "weights": "random", "wall_gb_per_s": round(wall.gb_per_s, 1)}
    works = _works(options, device, wall.gb_per_s)
    works = [work for work in works if not options.only or any(part in work.name for part in options.only)]
    stamps |= stamps_of(device, options.commit)
    devices = devices_of(device, options.gpus)
    rows = run_all(works, stamps, partial(write_json, options.out), devices, limit_s=options.limit_s)
    return int(any("error" in row for row in rows))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = timing_parser(__doc__, replays=300, turn=50)
    parser.add_argument("--only", action="append", default=[], help="a part of a case's name; may repeat")
    parser.add_argument("--gpus", "--cards", type=int, default=8, help="GPUs at most; cases of more are left out")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no case after so many seconds")
    parser.add_argument("--runs", type=int, default=5, help="of a prompt")
    parser.add_argument("--kernels", type=int, default=0, help="kernels to list for each step, those that take most")
    parser.add_argument("--small", action="store_true", help="tiny models, to try everything")
    given = parser.parse_args(arguments)
    if torch.device(given.device).type == "cuda":
        given.gpus = min(given.gpus, torch.cuda.device_count())
    return given


def _works(options: argparse.Namespace, device: torch.device, gb_per_s: float) -> list[Work]:
    """The measurement of every case."""
    found: list[Work] = []
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
            found.append(Work(case.name, row, partial(_measure_step, options, case, device, gb_per_s)))
    for model, sizes, lengths in SMALL_PROMPTS if options.small else PROMPTS:
        for size in sizes:
            if size <= options.gpus:
                row = {"model": model, "tensor_parallel_size": size, "prompts": list(lengths)}
                measure = partial(_measure_prompts, options, model, size, lengths, device)
                found.append(Work(f"{model}, prompts, {size} GPUs", row, measure))
    return found


def _measure_step(
    options: argparse.Namespace, case: ParallelCase, device: torch.device, gb_per_s: float
) -> dict[str, Any]:
    begin, model = time.perf_counter(), Model(case.model)
    step = case.make_step(device)
    made_in = time.perf_counter() - begin
    try:
        ms: list[float] = []
        while len(ms) < options.replays:
            ms += step.times(min(options.turn, options.replays - len(ms)))
        spec, num_rows = model.config.experts, case.step.batch * case.step.rows
        experts = None if spec is None else spec.expected_distinct(num_rows)
        plan = model.plan(drafts=case.step.num_speculative_tokens > 0)
        ranks = [each.config for each in case.rank_shapes(step.shapes)]
        moved = step_bytes(step.program, plan, model.config, case.step, experts, ranks=ranks).total
        all_reduces = sum(op.kind == "gather_ranks" for op in step.program.ops)
        if options.kernels and device.type == "cuda":
            show_kernels(case.name, step.profile(PROFILED_STEPS, gb_per_s), options.kernels)
    finally:
        step.close()
    compared = all_reduces and not case.invariant  # a model of one rank's widths has no parts of K
    alone = _alone(options, case, device) if compared else {}
    if compared:
        alone["exchanges"] = all_reduces
        alone["exchange_us"] = round(1e3 * (percentile(ms, 50) - alone["alone_ms_p50"]) / all_reduces, 3)
    floor = moved / gb_per_s / 1e6
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


def _alone(options: argparse.Namespace, case: ParallelCase, device: torch.device) -> dict[str, Any]:
    """The time of a rank's work without exchanges."""
    for each in devices_of(device, case.size):
        release(each)
    step = _alone_step(case, devices_of(device, case.size)[0])
    try:
        timed = Timed(case.name, step.replay, step.reset)
        with own_stream(device):
            round_robin([timed], options.replays, options.turn, device)
    finally:
        step.close()
    return {"alone_ms_p50": round(timed.median, 4)}


def _alone_step(case: ParallelCase, device: torch.device) -> Step:
    """The first rank's work as a step of one device that exchanges nothing: a model of its heads, widths and ids."""
    shapes = case.rank_shapes(case.shapes())[0]
    shard, speculator = shapes.config.shard, shapes.speculator
    if shard is None:
        raise ValueError("one device has the whole target")
    first, last = shard.vocabulary(Model(case.model).config.vocab_size)
    own = replace(shapes.config, shard=None, vocab_size=last - first)
    plain = dict(weight_plan(own))
    if speculator is not None and speculator.draft_config is not None:
        draft = replace(speculator.draft_config, shard=None, vocab_size=last - first)
        if shard.draft is not None:
            start, stop = shard.draft.vocabulary(draft.draft_vocab_size)
            draft = replace(draft, draft_vocab_size=stop - start)
        speculator = speculator.with_config(draft)
        plain |= speculator.weight_plan(own.dtype)
    shapes = replace(shapes, config=own, speculator=speculator)
    weights = RandomParts(planned(plain, lambda name: "bf16"), own, device)
    return Step(shapes, case.step, weights, device)


def _measure_prompts(
    options: argparse.Namespace, model: str, size: int, lengths: Sequence[int], device: torch.device
) -> dict[str, Any]:
    case = ParallelCase(model, size, Case(1, max(lengths), 0))
    shapes, devices = case.shapes(), devices_of(device, size)
    at_once = min(CHUNKS_AT_ONCE, -(-max(lengths) // shapes.prefill_chunk))
    shapes = replace(shapes, max_prefill_chunks=at_once)
    prompts = Prompts(shapes, case.weights(devices[0]), devices, ranks=case.rank_shapes(shapes))
    try:
        found = {str(length): prompts.times(length, at_once, options.runs) for length in lengths}
    finally:
        prompts.close()
    others = {str(length): VLLM_PROMPTS[model, length] for length in lengths if (model, length) in VLLM_PROMPTS}
    row: dict[str, Any] = {"prompt_ms_p50": {length: round(percentile(ms, 50), 3) for length, ms in found.items()}}
    return row | ({OTHERS: others} if size == 2 and others else {})


if __name__ == "__main__":
    sys.exit(main())
