"""This module plans a decode step and a prefill pass of a GPU, on a machine that needs none.

It lowers the programs of a runtime with the same options for a described GPU, onto tensors without memory. It reads a
model's config.json and a draft model's headers, but no weight.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lowlat.engine.loading.geometry import make_geometry, rank_geometries
from lowlat.engine.loading.pool_size import takes_all_free
from lowlat.engine.loading.programs import build_program, make_ladder
from lowlat.engine.loading.speculation import make_topologies
from lowlat.errors import ConfigError
from lowlat.executors.distributed.parallel import exchanged_rows
from lowlat.executors.distributed.peers import PeerMemory
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.make import check_positions
from lowlat.executors.planned import META
from lowlat.graphs import Bucket
from lowlat.graphs.program import Program
from lowlat.lowering.covers import uncovered
from lowlat.lowering.lower import LoweredGroup
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import read_model_config
from lowlat.options.method_options import AUTO_METHOD
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.slots import fit_slots
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import Speculator
from lowlat.speculators.draft_files.windows import check_draft_window
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.methods import plan_speculator, rounded_speculator
from lowlat.speculators.suffix.beside import TextBeside
from lowlat.speculators.tree.dynamic import Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.prefill import build_prefill
from lowlat.step.state import StepGeometry
from lowlat.step.variants import bodies_of
from lowlat.tools.bench.geometry import Geometry, read_geometries
from lowlat.tools.draft_model.random_models import random_speculator
from lowlat.tools.gpus import DescribedGpu
from lowlat.tools.tune.pairs import LoweredPrograms, Pair, rounded_pair, weight_shapes

__all__ = [
    "PRESET_DRAFT_MODEL",
    "LoweredProgram",
    "PlannedStep",
    "has_draft_models",
    "plan_step",
    "preset_names",
    "target_config",
]

PRESET_DRAFT_MODEL = Path("preset")  # stands for a preset's draft model, which has no directory


@dataclass(frozen=True)
class LoweredProgram:
    """A program and its fused groups, each with its launches; without groups if no kernels cover the program."""

    program: Program
    groups: tuple[LoweredGroup, ...]


@dataclass(frozen=True)
class PlannedStep:
    """A step and a prefill pass of a pair on a GPU.

    problem   why the kernels do not cover the pair; None: they do
    step      the programs of one step, in order: one, or an opening and a body if the device chooses the draft length
    prefill   the pass of `positions` tokens of a prompt
    rank      the geometry of the first rank's shard of the target
    num_gpus  GPUs that share the pair; the programs are those of the first
    """

    gpu: DescribedGpu
    geometry: StepGeometry
    rank: ModelConfig
    speculator: Speculator | None
    bucket: Bucket
    problem: str | None
    step: tuple[LoweredProgram, ...]
    prefill: LoweredProgram
    positions: int
    num_gpus: int


def preset_names() -> tuple[str, ...]:
    """Return the published shapes that can be planned by name, without a config.json."""
    return tuple(read_geometries())


def has_draft_models(name: str) -> bool:
    """Whether `name` is a published shape that has draft models."""
    known = read_geometries()
    return name in known and known[name].has_draft_models


def plan_step(
    model: Path,
    speculative: SpeculativeConfig | None,
    options: RuntimeConfig,
    gpu: DescribedGpu,
    *,
    batch: int,
    context: int,
) -> PlannedStep:
    """Plan the step of `batch` slots, and the last prefill pass of a prompt of `context` tokens.

    model        a directory with a config.json, or a preset's name
    speculative  with PRESET_DRAFT_MODEL as its model, it stands for the preset's own draft model
    Raises ConfigError for options that a runtime refuses.
    """
    if takes_all_free(options):
        raise ConfigError("kv_cache_gib 'free' is what a GPU here has left, and this plans for one that is described; "
                          "give a number of GiB")  # fmt: skip
    config, speculator = _read(model, speculative, options)
    speculative = fit_slots(speculative, options.max_batch)
    topologies: Mapping[int, Topology] = {0: TreeTopology.chain(0)}
    depth = 0
    if speculative is not None and speculator is not None:
        topologies, depth = make_topologies(speculative, options.max_batch), speculative.num_speculative_tokens
    pair = rounded_pair(Pair(model.name, config, speculator), options)
    geometry = make_geometry(pair.config, pair.speculator, topologies, options, speculative)
    ladder = make_ladder(geometry, topologies, speculative)
    bucket = ladder.choose(batch, depth)
    ranks = rank_geometries(geometry, options, speculative)
    own = ranks[0]
    steps = [build_program(own, each, topologies) for each in _parts(bucket, depth)]
    positions = max((size for size in own.prefill_sizes if size <= context), default=min(own.prefill_sizes))
    prefill = build_prefill(own, positions)
    problem = uncovered([*steps, prefill], weight_shapes(pair))
    lowered = [_plain(each) for each in (*steps, prefill)]
    if problem is None:
        check_positions(geometry, invariant=options.tp_invariant)
        lowered = _lower(pair, gpu, [*steps, prefill], ranks)
    return PlannedStep(
        gpu, geometry, own.config, pair.speculator, bucket, problem, tuple(lowered[:-1]), lowered[-1],
        positions, len(ranks),
    )  # fmt: skip


def _parts(bucket: Bucket, depth: int) -> list[Bucket]:
    """Return the buckets whose programs make up one step at the full draft length."""
    bodies = bodies_of(bucket)
    return [bucket, bodies[depth]] if bodies else [bucket]


def target_config(model: Path, dtype: str = "auto") -> ModelConfig:
    """Return the geometry of a directory's target, or of a preset. Raises ConfigError."""
    preset = read_geometries().get(str(model))
    if preset is None:
        return read_model_config(model, dtype=dtype)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(preset.target), encoding="utf-8")
        return read_model_config(Path(folder), dtype=dtype)


def _read(
    model: Path, speculative: SpeculativeConfig | None, options: RuntimeConfig
) -> tuple[ModelConfig, Speculator | None]:
    """Read the target's geometry, and plan its speculator."""
    config = target_config(model, options.dtype)
    config.check_context(options.max_context, model / "config.json")
    if speculative is None or not speculative.enabled:
        return config, None
    preset = read_geometries().get(str(model))
    if preset is None:
        return config, plan_speculator(speculative, config, model)
    if speculative.method == AUTO_METHOD and speculative.model in (None, PRESET_DRAFT_MODEL):
        speculative = replace(speculative, method=preset.drafting)
    if speculative.model != PRESET_DRAFT_MODEL:
        return config, plan_speculator(speculative, config)
    return config, _preset_speculator(preset, config, speculative)


def _preset_speculator(preset: Geometry, config: ModelConfig, speculative: SpeculativeConfig) -> Speculator:
    """Plan the speculator of a preset's own draft model. Raises ConfigError for options that it cannot have."""
    if speculative.capture_layers is not None:
        raise ConfigError("a preset's draft model has boundaries of its own; leave capture_layers out")
    speculator = random_speculator(preset, config, speculative.method)
    if speculative.draft_window is not None and isinstance(speculator, Eagle3Speculator):
        check_draft_window(speculator.config, speculative.draft_window)
        speculator = replace(speculator, window=speculative.draft_window)
    return TextBeside.beside(rounded_speculator(speculator, speculative.draft_quantize), speculative, config)


def _plain(program: Program) -> LoweredProgram:
    """Return a program that was not lowered."""
    return LoweredProgram(program, tuple(LoweredGroup(op.kind, op.stage, (op,), (), frozenset()) for op in program.ops))


def _lower(pair: Pair, gpu: DescribedGpu, programs: list[Program], ranks: list[StepGeometry]) -> list[LoweredProgram]:
    """Lower the first rank's programs."""
    place, own = None, None
    if len(ranks) > 1:
        devices = [torch.device(META.type, number) for number in range(len(ranks))]
        place, own = RankPlace(0, PeerMemory(devices, exchanged_rows(programs))), ranks[0].config
    lowered = LoweredPrograms(pair, gpu.facts, programs, own, place)
    return [LoweredProgram(each, lowered.groups(each, gpu.facts, switches=True)) for each in programs]
