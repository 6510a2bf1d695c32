"""How long draft models of every method take to draft, beside the floor of their bytes: a named geometry's, random.

    python -m bench.draft_passes --out bench/results/h200/draft_passes.json
    python -m bench.draft_passes --method dflash --depth 7 --kernels --out /tmp/passes.json
    python -m bench.draft_passes --geometry tiny --context 40 --replays 2 --device cpu --out /tmp/passes.json

On a card each depth of a method has three graphs, timed in turns by events on the card: the whole step, the same
launches without the draft pass's, and the draft pass's alone. A pass's own time is the difference of the first two, so
that what overlaps with its neighbours counts for neither. Beside it stands the pass's time in steps that a profiler
recorded. The pass is every launch of the stages DRAFT_*: features, keys and values of what was accepted, layers,
LM head, choice; the rows' layout is a part of the launch that accepts. On a CPU the reference is timed by operation,
which tells nothing of a card.

Weights, tokens, keys and values are random, and the tokens that a step accepts are imposed: the file says so.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch

from bench.clock import own_stream, percentile
from bench.conditions import release, stamps_of
from bench.draft_passes_result import DraftPass, DraftPassesFile, Setup, Stamps
from bench.draft_passes_step import PARTS, PASS, DraftingSteps
from bench.gpt_oss_report import show_kernels
from bench.lowlat_step import ROOM
from bench.subjects import known_geometry
from bench.wall import measure_wall
from lowlat.engine.loading import make_geometry
from lowlat.models.geometry import ModelConfig
from lowlat.options.acceptance import acceptance_for
from lowlat.options.config import MAX_SPECULATIVE_TOKENS, RuntimeConfig
from lowlat.speculators.base import Speculator
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.state import StepGeometry
from lowlat.tools.bench.geometry import RandomWeights, random_target
from lowlat.tools.bench.results import Spread, write_struct
from lowlat.tools.draft_model.random_models import DRAFT_MODELS, random_speculator, random_weights
from lowlat.tools.profile.recording import LEAD

__all__ = ["main", "step_shapes"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every method at every depth, print its row, and write the file after each method."""
    options = _options(arguments)
    device = torch.device(options.device)
    with own_stream(device):
        _measure_all(options, device)
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--geometry", default="llama-8b", help="a name in geometries.toml")
    parser.add_argument("--method", nargs="+", choices=list(DRAFT_MODELS), default=list(DRAFT_MODELS))
    parser.add_argument("--depth", nargs="+", type=int, default=[3, 5, 7], help="draft tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192, help="committed tokens of each request")
    parser.add_argument("--accept-length", type=float, default=3.0, help="tokens a step that are imposed")
    parser.add_argument("--gb-per-s", type=float, default=4600.0, help="bandwidth of the floor")
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--turn", type=int, default=20, help="replays between resets")
    parser.add_argument("--kernels", action="store_true", help="print each step's kernels, those that take most first")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git checkout to ask")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args(arguments)
    if min(options.batch, options.context, options.replays, options.turn) < 1:
        parser.error("--batch, --context, --replays and --turn want at least 1")
    if not all(1 <= depth <= MAX_SPECULATIVE_TOKENS for depth in options.depth):
        parser.error(f"--depth wants 1 to {MAX_SPECULATIVE_TOKENS}, got {options.depth}")
    most = ROOM // (max(options.depth) + 1) - LEAD
    if options.turn > most:
        parser.error(f"--turn {options.turn} is more than the {most} replays that there is room for")
    return options


def _measure_all(options: argparse.Namespace, device: torch.device) -> None:
    geometry, cuda = known_geometry(options.geometry), device.type == "cuda"
    with TemporaryDirectory() as directory:
        config = random_target(geometry, Path(directory)).config
    wall = round(measure_wall(device).gb_per_s, 1) if cuda else None
    simulated = ("weights: random", "tokens, keys and values: random")
    setup = Setup(
        geometry=options.geometry,
        batch=options.batch,
        context=options.context,
        simulated_accept_length=options.accept_length,
        simulated=(*simulated, f"acceptance: {options.accept_length:g} tokens a step imposed"),
        replays=options.replays,
        floor_gb_per_s=options.gb_per_s,
        wall_gb_per_s=wall,
    )
    stamps = {name: str(value) for name, value in stamps_of(device, options.commit).items()}
    file = DraftPassesFile(setup=setup, stamps=Stamps(**stamps))
    drawn = RandomWeights(config, 0, device)
    target = {name: drawn[name] for name in drawn}
    for method in options.method:
        begin, speculator = time.perf_counter(), random_speculator(geometry, config, method)
        shapes = step_shapes(config, speculator, options)
        weights = {**target, **random_weights(speculator, config.dtype, device)}
        steps = DraftingSteps(shapes, options.context, options.depth, weights, device)
        print(f"{method}: made in {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
        try:
            for depth in options.depth:
                file.rows.append(_row(options, setup, steps, speculator, depth))
                print(msgspec.json.encode(file.rows[-1]).decode(), flush=True)
        finally:
            steps.close()
        write_struct(options.out, file)
        del weights
        release(device)


def step_shapes(config: ModelConfig, speculator: Speculator, options: argparse.Namespace) -> StepGeometry:
    """The shapes of a method's programs at all depths: `options` has depth, batch, context and accept_length."""
    topologies = {depth: TreeTopology.chain(depth) for depth in (0, *options.depth)}
    running = RuntimeConfig(
        max_batch=options.batch, max_context=options.context + ROOM, dtype=config.dtype, max_prefill_chunks=1
    )
    made = make_geometry(config, speculator, topologies, running, None)
    least = min(options.depth)
    return replace(made, simulated_acceptance=acceptance_for(min(options.accept_length, least + 1.0), least))


def _row(
    options: argparse.Namespace, setup: Setup, steps: DraftingSteps, speculator: Speculator, depth: int
) -> DraftPass:
    draft, moved = speculator.draft_config, steps.bytes(depth)
    if draft is None:
        raise ValueError(f"method {speculator.method} has no draft model")
    times, recorded = steps.measure(depth, options.replays, options.turn), steps.record(depth, setup.wall_gb_per_s)
    step, rest = (percentile(times[part], 50) for part in ("step", "rest"))
    own, floor = step - rest, moved.total / setup.floor_gb_per_s / 1e6
    wall = setup.wall_gb_per_s
    if recorded is not None and options.kernels:
        show_kernels(f"{speculator.method}, S = {depth}", recorded)
    stages = () if recorded is None else recorded.stages
    drafted_us = sum(stage.time_us or 0.0 for stage in stages if stage.stage in PASS)
    return DraftPass(
        method=speculator.method,
        num_speculative_tokens=depth,
        draft_layers=draft.num_layers,
        draft_vocab_size=draft.draft_vocab_size,
        launches=steps.num_launches(depth),
        **{part: Spread.of(times[part]) for part in PARTS},
        pass_ms=round(own, 4),
        recorded_ms=None if recorded is None else round(drafted_us / 1e3, 4),
        recorded_step_ms=None if recorded is None else round(recorded.step_us / 1e3, 4),
        bytes=moved,
        floor_ms=round(floor, 4),
        over_floor=round(own / floor, 4),
        over_measured_floor=None if wall is None else round(own / (moved.total / wall / 1e6), 4),
    )


if __name__ == "__main__":
    raise SystemExit(main())
