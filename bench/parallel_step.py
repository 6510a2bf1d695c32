"""A step, and prompts, of a geometry with random weights on one GPU or several, made as a runtime makes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.clock import LEAD, time_replays
from bench.dense_cases import Case
from bench.lowlat_step import BLOCK_SIZE, ROOM, ExecutorStep, fill_state, sound_rows
from bench.prompts import measure_prompt
from lowlat.checkpoint.source import JoinedWeights
from lowlat.engine.loading import rank_geometries
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.distributed.parallel import ParallelExecutor
from lowlat.executors.make import Rank, make_executor
from lowlat.graphs import Bucket, Paging
from lowlat.models.geometry import ModelConfig
from lowlat.options.config import RuntimeConfig, SpeculativeConfig
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.decode import build_step
from lowlat.step.prefill import build_prefills
from lowlat.step.state import StepGeometry
from lowlat.tools.bench.geometry import Geometry, RandomWeights, random_target, read_geometries
from lowlat.tools.bench.step_bytes import part_sizes, program_bytes, weight_sizes
from lowlat.tools.draft_model.random_models import random_speculator
from lowlat.tools.profile.recording import LEAD as PROFILED_LEAD
from lowlat.tools.profile.recording import record_kernels
from lowlat.tools.profile.report import summarise
from lowlat.tools.profile.sites import call_sites
from lowlat.tools.profile.times import attribute

__all__ = ["ParallelModel", "ParallelPrompts", "ParallelStep", "alone_step", "devices_of"]

PROFILED_STEPS = 10
CHUNKS_AT_ONCE = 16


def devices_of(device: torch.device, size: int) -> list[torch.device]:
    """So many devices, of GPUs the first ones."""
    return [torch.device("cuda", gpu) if device.type == "cuda" else device for gpu in range(size)]


@dataclass(frozen=True)
class ParallelModel:
    """A geometry by its name in the table, cut for devices.

    draft_size  1, or as many devices as a draft model is cut for
    invariant   K is summed in the parts of `tp_invariant`
    """

    name: str
    devices: Sequence[torch.device]
    draft_size: int = 1
    invariant: bool = False
    options: RuntimeConfig = field(init=False)

    def __post_init__(self) -> None:
        options = RuntimeConfig(tensor_parallel_size=len(self.devices), tp_invariant=self.invariant)
        object.__setattr__(self, "options", options)

    @cached_property
    def geometry(self) -> Geometry:
        """The geometry's entry in the table."""
        return read_geometries()[self.name]

    def target(self) -> Any:
        """The target, with random weights that are drawn on the first device as they are streamed."""
        with TemporaryDirectory() as directory:
            return random_target(self.geometry, Path(directory), device=self.devices[0])

    def shapes(self, config: ModelConfig, case: Case, **options: Any) -> StepGeometry:
        """The shapes of the whole model's programs at a case; a draft model is there where the case drafts."""
        depth, context = case.num_speculative_tokens, case.context + ROOM
        chain = TreeTopology.chain(depth)
        return StepGeometry(
            config=config,
            speculator=random_speculator(self.geometry, config, "eagle3") if depth else None,
            max_batch=case.batch,
            max_context=context,
            max_rows=chain.num_nodes,
            num_paths=chain.num_paths,
            path_width=chain.path_width,
            block_size=BLOCK_SIZE,
            num_blocks=case.batch * -(-(context + chain.num_nodes) // BLOCK_SIZE) + 1,
            prefill_chunk=128,
            simulated_acceptance=case.acceptance,
            num_drafted_rows=chain.num_drafted_rows,
            **options,
        )

    def rank_shapes(self, shapes: StepGeometry) -> list[StepGeometry]:
        """The shapes of each rank's programs."""
        draft = SpeculativeConfig(method="eagle3", model="random", draft_tensor_parallel_size=self.draft_size)
        return rank_geometries(shapes, self.options, draft if shapes.speculator is not None else None)

    def draft_weights(self, shapes: StepGeometry) -> dict[str, torch.Tensor]:
        """Random weights of the draft model on the first device; {} without one."""
        speculator, found = shapes.speculator, dict[str, torch.Tensor]()
        if speculator is None or speculator.draft_config is None:
            return found
        for name, (shape, dtype) in speculator.weight_plan("bfloat16").items():
            if dtype == torch.int32:
                found[name] = torch.arange(shape[0], dtype=dtype, device=self.devices[0])
                continue
            mean, deviation = (1.0, 0.1) if len(shape) == 1 else (0.0, shape[-1] ** -0.5)
            found[name] = torch.empty(shape, dtype=dtype, device=self.devices[0]).normal_(mean, deviation)
        return found

    def executor(self, ranks: Sequence[Rank], weights: JoinedWeights) -> Any:
        """The executor of all ranks."""
        kind = "graph" if self.devices[0].type == "cuda" else "reference"
        choice = DeviceChoice(self.devices[0], kind, "a benchmark")
        first = ranks[0]
        return make_executor(choice, first.programs, first.prefills, weights, ranks=ranks, devices=self.devices)


class ParallelStep:
    """One bucket's step on all devices, with every slot active at the case's context.

    imposed  whether acceptance is imposed where the step drafts
    """

    def __init__(self, model: ParallelModel, case: Case, *, imposed: bool = True) -> None:
        target, chain = model.target(), TreeTopology.chain(case.num_speculative_tokens)
        self.case, self.config = case, target.config
        self.bucket = Bucket(case.batch, chain.num_nodes, chain.depth)
        shapes = model.shapes(target.config, case)
        if not imposed:
            shapes = replace(shapes, simulated_acceptance=None)
        own = model.rank_shapes(shapes)
        programs = [{self.bucket: build_step(each, self.bucket, chain)} for each in own]
        ranks = [Rank(each.config, made, build_prefills(each)) for each, made in zip(own, programs, strict=True)]
        self._speculator, self._configs = shapes.speculator, [each.config for each in own]
        weights = JoinedWeights(target.weights, model.draft_weights(shapes))
        self.executor = model.executor(ranks, weights)
        torch.manual_seed(0)
        for state in self._states():
            fill_state(state, shapes, case, seed=0)
        for _ in range(2):  # the first step has no drafts yet
            self.executor.step(self.bucket)
        self.executor.synchronize()

    @property
    def _ranks(self) -> list[Any]:
        return self.executor.ranks if isinstance(self.executor, ParallelExecutor) else [self.executor]

    def _states(self) -> list[Any]:
        peers = getattr(self.executor, "peer_state", None)
        if peers is not None:
            return [peers(rank) for rank in range(len(self._configs))]
        return [rank.state for rank in self._ranks]

    def replay(self) -> None:
        """See `bench.soak.Soaked`."""
        self.executor.step(self.bucket)

    def looks(self) -> list[tuple[Mapping[str, torch.Tensor], torch.Tensor]]:
        """See `bench.soak.Soaked`."""
        self.executor.synchronize()
        sound = [sound_rows(rank.scratch(self.bucket)) for rank in self._ranks]
        states = self._states()
        return list(zip(states, sound if len(sound) == len(states) else sound * len(states), strict=True))

    def reset(self) -> None:
        """Put every slot's length on every rank back to the case's context, once all steps have ended."""
        self.executor.synchronize()
        for state in self._states():
            state["lengths"].fill_(self.case.context)
            state["active"].fill_(1)
        for device in {rank.device for rank in self._ranks if rank.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def times(self, count: int) -> list[float]:
        """Milliseconds of so many steps, on the first device."""
        self.reset()
        device = self.executor.device
        if device.type != "cuda":
            return time_replays(self.replay, count, device, LEAD)
        with torch.cuda.device(device), torch.cuda.stream(self._ranks[0].stream):
            found = time_replays(self.replay, count, device, LEAD)
        self.executor.synchronize()
        return found

    def expected_experts(self) -> float | None:
        """Distinct experts of a layer, where each row draws its own at random; None without an MoE layer."""
        experts = self.config.experts
        if experts is None:
            return None
        rows = self.case.batch * self.case.rows
        return float(experts.expected_distinct(rows))

    def bytes(self, distinct_experts: float | None) -> int:
        """Bytes that a step must read on the GPU that reads most."""
        experts, lengths = self.config.experts, [float(self.case.context)] * self.case.batch
        share = 1.0 if experts is None else experts.share_read(distinct_experts or 0.0)
        program, found = self.executor.program(self.bucket), 0
        for config in self._configs:
            sizes = weight_sizes(self.config, config)
            if self._speculator is not None:
                sizes |= part_sizes(self._speculator.weight_plan(self.config.dtype), config)
            found = max(found, program_bytes(program, sizes, lengths, share))
        return found

    @property
    def num_all_reduces(self) -> int:
        """Operations of a step in which ranks exchange."""
        return sum(op.kind == "gather_ranks" for op in self.executor.program(self.bucket).ops)

    def list_kernels(self, count: int, wall_gb_per_s: float) -> list[str]:
        """Lines of the kernels that take most, as the profiler saw them on the first device."""
        self.reset()
        rank = self._ranks[0]

        def run() -> None:
            for _ in range(PROFILED_LEAD + PROFILED_STEPS):
                self.executor.step(self.bucket)
            self.executor.synchronize()

        (events,) = record_kernels(run, [rank.device])
        lengths = [self.case.context] * self.case.batch
        sites = call_sites(rank.groups(self.bucket), rank.state, [lengths], 0.0)
        summary = summarise(attribute(events, sites, skip=PROFILED_LEAD), wall_gb_per_s)
        return [
            f"{row.time_us:9.1f} us {row.num_launches:4} x {row.duration_us:7.2f} us  {row.kernel[:110]}"
            for row in summary.kernels[:count]
        ]

    def close(self) -> None:
        """Release graphs and memory of all devices."""
        self.executor.close()


def alone_step(model: ParallelModel, case: Case) -> ExecutorStep:
    """The first rank's work as a step of one device that exchanges nothing: a model of its heads, widths and ids."""
    whole = model.target().config
    shapes = model.rank_shapes(model.shapes(whole, case))[0]
    shard, speculator = shapes.config.shard, shapes.speculator
    if shard is None:
        raise ValueError("one device has the whole target")
    first, last = shard.vocabulary(whole.vocab_size)
    own = replace(shapes.config, shard=None, vocab_size=last - first)
    if speculator is not None and speculator.draft_config is not None:
        draft = replace(speculator.draft_config, shard=None, vocab_size=last - first)
        if shard.draft is not None:
            start, stop = shard.draft.vocabulary(draft.draft_vocab_size)
            draft = replace(draft, draft_vocab_size=stop - start)
        speculator = speculator.with_config(draft)
    shapes = replace(shapes, config=own, speculator=speculator)
    weights = JoinedWeights(RandomWeights(own, device=model.devices[0]), model.draft_weights(shapes))
    return ExecutorStep(shapes, case, weights, model.devices[0], TreeTopology.chain(case.num_speculative_tokens))


class ParallelPrompts:
    """Prompts of up to `length` tokens, prefilled by all devices."""

    def __init__(self, model: ParallelModel, length: int) -> None:
        target, case = model.target(), Case(1, length, 0)
        shapes = model.shapes(target.config, case)
        self._shapes = replace(shapes, max_prefill_chunks=min(CHUNKS_AT_ONCE, -(-length // shapes.prefill_chunk)))
        own, bucket, chain = model.rank_shapes(self._shapes), Bucket(1, 1, 0), TreeTopology.chain(0)
        ranks = [Rank(each.config, {bucket: build_step(each, bucket, chain)}, build_prefills(each)) for each in own]
        self._executor = model.executor(ranks, JoinedWeights(target.weights))
        each_rank = self._executor.ranks if isinstance(self._executor, ParallelExecutor) else [self._executor]
        for rank in each_rank:
            for name, spec in rank.state.specs.items():
                if spec.paging is Paging.POSITIONS:
                    rank.state[name].zero_()

    def times(self, length: int, runs: int) -> list[float]:
        """Milliseconds of each of `runs` prefills of a prompt of random tokens."""
        return measure_prompt(self._executor, self._shapes, length, self._shapes.max_prefill_chunks, runs)

    def close(self) -> None:
        """Release graphs and memory of all devices."""
        self._executor.close()
