"""Times of wide steps of 16 and 32 rows a slot next to those of the usual draft lengths, all rows live.

    python -m bench.wide_steps --out bench/results/h200/wide_steps.json
    python -m bench.wide_steps --case 1x8192 --case 2x8192 --case 4x16384 --out bench/results/h200/wide_steps.json
    python -m bench.wide_steps --small --device cpu --replays 3 --out /tmp/wide_steps.json

One runtime's programs, with a draft model and drafts from text next to it: S = 0, 3 and 7, wide steps of 16 rows, and
of 32 where all slots have 64 at most. Every slot's text repeats a period, and before each step its length is put back:
so that a wide step always finds as many proposals as it has rows. That takes two small launches, which all times have.
What the targets accept is chance, and changes no time. Weights and caches are random, the wall is measured before and
after. `--small` walks the same path with a tiny geometry, on any device: its figures mean nothing.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.lib.bytes import step_bytes
from bench.lib.case import Case
from bench.lib.clock import Timed, own_stream, round_robin
from bench.lib.conditions import release, stamps_of, summary_of, timing_parser, write_json
from bench.lib.model import Model
from bench.lib.run import wall_of
from bench.lib.step import fill_state, start_slots
from bench.lib.weights import hold
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.make import Rank, make_executor
from lowlat.graphs import Bucket
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.suffix.beside import TextBeside
from lowlat.speculators.suffix.speculator import SuffixSpeculator
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.ladder import MAX_WIDE_ROWS
from lowlat.step.prefill import build_prefills
from lowlat.step.state import StepGeometry
from lowlat.step.variants import PROPOSED

__all__ = ["main"]

LLAMA_8B, TINY = Model("llama-8b"), Model("tiny")
DEPTHS, WIDE = (0, 3, 7), (16, 32)
PERIOD = 96  # tokens after which a slot's text repeats itself: more than a wide step's rows
PLACES, SMALL_PLACES = ("1x8192",), ("2x200",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every place, and write the rows."""
    parser = timing_parser(__doc__, replays=300)
    parser.add_argument("--case", action="append", default=[], metavar="BxC", help="slots and context; may repeat")
    parser.add_argument("--named", type=int, default=0, help="tokens of texts that requests may name")
    parser.add_argument("--small", action="store_true", help="a tiny geometry, to try everything")
    options = parser.parse_args(arguments)
    device, model = torch.device(options.device), TINY if options.small else LLAMA_8B
    with own_stream(device):
        walls = [wall_of(device)]
        weights: Any = hold(model.plan(drafts=True), model.config, device)
        rows = []
        for text in options.case or (SMALL_PLACES if options.small else PLACES):
            batch, context = map(int, text.split("x"))
            rows += _measure(options, model, Case(batch, context, DEPTHS[-1]), weights, device)
            release(device)
        walls.append(wall_of(device))
    wall = max(each.gb_per_s for each in walls)
    for row in rows:
        row["floor_ms"] = round(row["bytes"] / wall / 1e6, 4)
        row |= {"wall_gb_per_s": round(wall, 1), **stamps_of(device, options.commit)}
        print(row)
    write_json(options.out, rows)
    return 0


def _buckets(batch: int) -> list[Bucket]:
    usual = [Bucket(batch, depth + 1, depth) for depth in DEPTHS]
    return [*usual, *(Bucket(batch, rows, 0, PROPOSED) for rows in WIDE if batch * rows <= MAX_WIDE_ROWS)]


def _shapes(model: Model, case: Case, named: int) -> StepGeometry:
    """The shapes of a runtime that has these buckets."""
    asked = SpeculativeConfig(method="suffix", wide_rows=WIDE[-1], draft_text_tokens=named)
    speculator = TextBeside(model.speculator, SuffixSpeculator.plan(asked, model.config))
    rows = WIDE[-1]
    plain = model.shapes(case, speculator=speculator, simulated_acceptance=None, max_rows=rows, path_width=rows)
    return replace(plain, num_blocks=case.batch * plain.table_width + 1)


def _measure(
    options: argparse.Namespace, model: Model, case: Case, weights: Any, device: torch.device
) -> list[dict[str, Any]]:
    shapes, buckets = _shapes(model, case, options.named), _buckets(case.batch)
    programs = {
        bucket: build_step(shapes, bucket, TreeTopology.chain(bucket.num_speculative_tokens)) for bucket in buckets
    }
    kind = "graph" if device.type == "cuda" else "reference"
    rank = Rank(shapes.config, programs, build_prefills(shapes))
    executor: Any = make_executor(DeviceChoice(device, kind, "a benchmark"), rank.programs, rank.prefills, weights)
    try:
        fill_state(executor.state, shapes, case)
        period = torch.randint(shapes.config.vocab_size, (case.batch, PERIOD), dtype=torch.int32, device=device)
        tokens = executor.state["tokens"]
        tokens.copy_(period.repeat(1, -(-tokens.shape[1] // PERIOD))[:, : tokens.shape[1]])
        entries = [Timed(str(bucket), _replay(executor, bucket, case)) for bucket in buckets]
        for bucket, entry in zip(buckets, entries, strict=True):
            for _ in range(2):  # the first step has no drafts yet
                entry.replay()
            _check(executor, bucket)
        round_robin(entries, options.replays, options.turn, device)
        return [
            {
                "model": model.name,
                "batch": case.batch,
                "context": case.context,
                "rows": bucket.rows,
                "num_speculative_tokens": bucket.num_speculative_tokens,
                "wide": bucket.variant == PROPOSED,
                "draft_text_tokens": options.named,
                "bytes": step_bytes(programs[bucket], model.plan(drafts=True), model.config, case).total,
                "launches": executor.num_kernels(bucket) if device.type == "cuda" else 0,
                **summary_of(entry, options.replays, options.turn, device),
            }
            for bucket, entry in zip(buckets, entries, strict=True)
        ]
    finally:
        executor.close()


def _replay(executor: Any, bucket: Bucket, case: Case) -> Any:
    def run() -> None:
        start_slots(executor.state, case)
        if executor.device.type == "cuda":
            executor.graph(bucket).launch(executor.launcher.stream())
        else:
            executor.step(bucket)

    return run


def _check(executor: Any, bucket: Bucket) -> None:
    """Raise SystemExit where a wide step did not verify all its rows."""
    executor.synchronize()
    live = int(executor.scratch(bucket)["row_live"].sum())
    if bucket.variant == PROPOSED and live != bucket.batch * bucket.rows:
        raise SystemExit(f"{bucket}: {live} rows are live")


if __name__ == "__main__":
    sys.exit(main())
