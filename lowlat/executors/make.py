"""This module makes a runtime's executor: with kernels if they support the model, else with torch's operations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lowlat.errors import ConfigError
from lowlat.executors import Executor
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.distributed.watchdog import WATCHDOG
from lowlat.executors.reference import ReferenceExecutor
from lowlat.executors.reference.ranks import RankedReferenceExecutor
from lowlat.executors.residence.base import Residence
from lowlat.executors.residence.storages import StorageResidence
from lowlat.executors.workspace import PlannedWorkspaces
from lowlat.graphs import Bucket
from lowlat.graphs.program import Program
from lowlat.kernels.attention.limits import INVARIANT_HEADS, most_positions
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.lowering.covers import uncovered
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.shard import PARTS, STEP
from lowlat.options.runtime import RuntimeConfig
from lowlat.step.state import StepGeometry

if TYPE_CHECKING:
    from lowlat.executors.kernel_executor import KernelOptions

__all__ = [
    "Rank",
    "check_positions",
    "make_executor",
    "planned_gpus",
    "refuse_codes",
    "refuse_parts",
    "refuse_ranks",
    "settle_executor",
]


def check_positions(geometry: StepGeometry, *, invariant: bool = False) -> None:
    """Raise ConfigError for a context beyond the limit of attention kernels, in a layer without a window.

    invariant  whether splits of positions are independent of the number of ranks
    """
    windowless = [spec.num_kv_heads for spec in geometry.config.attentions.values() if spec.window is None]
    speculator = geometry.speculator
    if speculator is not None and speculator.draft_config is not None and speculator.attends_everything:
        windowless += [spec.num_kv_heads for spec in speculator.draft_config.attentions.values()]
    for kv_heads in dict.fromkeys(windowless):
        heads = INVARIANT_HEADS if invariant else kv_heads
        limit = most_positions(geometry.max_batch, geometry.max_context, heads) - geometry.overhang
        most = limit // geometry.block_size * geometry.block_size - geometry.overhang
        if geometry.max_context > most:
            raise ConfigError(
                f"max_context {geometry.max_context} is above {most}, the most that the kernels' attention reaches "
                f"without a window; lower max_context, or use executor 'reference'"
            )


def refuse_codes(choice: DeviceChoice, ranks: Sequence["Rank"], chunk: int) -> None:
    """Raise ConfigError if kernels do not support prefill's GEMMs over e4m3 codes of rows.

    chunk  positions of a chunk of prefill
    """
    shapes: dict[str, tuple[int, int]] = {}
    for rank in ranks:
        for program in rank.prefills.values():
            for op in program.ops:
                if op.params.get("activations") is not None:
                    ends = program.buffers[op.writes["out"]], program.buffers[op.reads["x"]]
                    shapes[op.weights["weight"]] = ends[0].shape[1], ends[1].shape[1]
    if not shapes or not choice.has_kernels:
        return
    from lowlat.kernels.gemm.prefill.arranged import arranged_gemm  # which loads the kernels

    capability = torch.cuda.get_device_capability(choice.device)
    gemm = arranged_gemm(replace(H200, capability=capability))
    if gemm is None:
        raise ConfigError(
            f"activations 'fp8' is for GPUs of capability 9.0, and {choice.device} has "
            f"{capability[0]}.{capability[1]}; leave it out, or use executor 'reference'"
        )
    if chunk % gemm.rows:
        raise ConfigError(f"activations 'fp8' needs a prefill_chunk that is a multiple of {gemm.rows}, got {chunk}")
    for name, (rows, columns) in shapes.items():
        if rows % gemm.width or columns % gemm.code_width:
            raise ConfigError(
                f"activations 'fp8' is multiplied by kernels of matrices of a multiple of {gemm.width} rows and "
                f"{gemm.code_width} columns, and {name} is {rows} x {columns}; leave it out, or use executor "
                "'reference'"
            )


def refuse_parts(choice: DeviceChoice, *parts: ModelConfig | DraftConfig | None) -> None:
    """Raise ConfigError for parts of K that are not whole K steps of the kernels.

    parts  geometries of a rank's shard of the target, and of its draft model, if it is sharded
    """
    for owner, part in zip(("target", "draft model"), parts, strict=False):
        shard = None if part is None else part.shard
        if shard is None or not shard.invariant or not choice.has_kernels:
            continue
        for layer in shard.layers:
            if layer.unit % STEP:
                raise ConfigError(
                    f"tp_invariant sums {PARTS} parts of whole steps of {STEP} columns with executor "
                    f"{choice.executor!r}, and the {owner}'s intermediate_size {layer.inner_size} is no multiple of "
                    f"{STEP} and of what its format holds together ({layer.unit}), or has fewer steps; use executor "
                    "'reference', or leave tp_invariant out"
                )


def refuse_ranks(options: RuntimeConfig, choice: DeviceChoice) -> None:
    """Raise ConfigError for an executor that cannot run one of several ranks."""
    if choice.executor == "eager" and options.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size {options.tensor_parallel_size} runs with executor 'graph', or with 'reference' on "
            f"one device, not with 'eager'"
        )


def settle_executor(
    choice: DeviceChoice, asked: str, programs: Iterable[Program], weights: Mapping[str, torch.Tensor]
) -> DeviceChoice:
    """The executor for these programs: with `asked` "auto", the reference executor if kernels do not support them.

    weights  canonical weights, with or without content
    Raises ConfigError if an executor with kernels was named and they do not support the programs.
    """
    problem = uncovered(programs, weights) if choice.has_kernels else None
    if problem is None:
        return choice
    if asked != "auto":
        raise ConfigError(f"executor {asked!r} cannot run this model: {problem}; use 'reference' or 'auto'")
    reason = f"{choice.reason}; torch's operations run on it, slowly: {problem}"
    return replace(choice, executor="reference", reason=reason, loud=True)


def planned_gpus(choice: DeviceChoice, devices: Sequence[torch.device]) -> list[Gpu]:
    """The properties of the GPUs for which ranks' kernels are lowered; an H200's for a GPU that is not there.

    devices  of each rank
    Returns [] if no kernels run.
    """
    if not choice.has_kernels:
        return []
    from lowlat.executors.launcher import gpu_of  # which loads the kernels

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    is_shared = len(set(devices)) < len(devices)
    return [gpu_of(each, is_shared=is_shared) if (each.index or 0) < count else H200 for each in devices]


@dataclass(frozen=True)
class Rank:
    """One rank's work: its shard of the target's geometry, the step's programs and prefill's programs."""

    config: ModelConfig
    programs: Mapping[Bucket, Program]
    prefills: Mapping[int, Program]


def make_executor(
    choice: DeviceChoice,
    ranks: Sequence[Rank],
    weights: Mapping[str, torch.Tensor],
    captured: Callable[[int, int], None] | None = None,
    *,
    devices: Sequence[torch.device] = (),
    device_loop: bool = False,
    fuse: bool = True,
    hooks: bool = True,
    watchdog: tuple[float, float] = WATCHDOG,
    can_sleep: bool = False,
    planned: Sequence[PlannedWorkspaces] = (),
) -> Executor:
    """Allocate, compile and capture. `captured` is called with buckets captured and buckets in all.

    ranks      in order; `weights` are whole
    devices    the ranks' devices, if there are several ranks
    fuse       whether kernels fuse operations; False: every operation has its own launches
    hooks      whether the reference executor accepts hooks
    watchdog   its factor and min_s, see `lowlat.executors.distributed.watchdog`: for work on a device
    can_sleep  whether weights, paged state and scratch lie in memory that can leave the device
    planned    each rank's workspaces, for the properties of its own device; (): both are found here
    Raises ConfigError for a device loop with an executor that does not capture steps.
    """
    if device_loop and choice.executor != "graph":
        raise ConfigError(
            f"device_loop needs executor 'graph', and this runtime has {choice.executor!r}: {choice.reason}"
        )
    first, device = ranks[0], choice.device
    if choice.executor == "reference":
        storages = StorageResidence(device) if can_sleep else None
        if len(ranks) > 1:
            parts, configs = [(rank.programs, rank.prefills) for rank in ranks], [rank.config for rank in ranks]
            return RankedReferenceExecutor(parts, weights, configs, device, hooks=hooks, residence=storages)
        return ReferenceExecutor(first.programs, first.prefills, weights, device, hooks=hooks, residence=storages)
    from lowlat.executors.kernel_executor import KernelOptions  # which loads the kernels

    options = KernelOptions(fuse=fuse, watchdog=watchdog)
    known = [replace(options, gpu=each.gpu, planned=each) for each in planned] or [options] * len(ranks)
    if len(ranks) > 1:
        return _make_parallel(ranks, devices, weights, captured, known, can_sleep=can_sleep, looping=device_loop)
    own = replace(known[0], residence=_mapped(device) if can_sleep else None)
    if choice.executor == "eager":
        from lowlat.executors.eager import EagerExecutor

        return EagerExecutor(first.programs, first.prefills, weights, device, own)
    from lowlat.executors.graph import GraphExecutor

    return GraphExecutor(first.programs, first.prefills, weights, device, own, looping=device_loop, progress=captured)


def _mapped(device: torch.device) -> Residence:
    from lowlat.executors.residence.mapped import MappedResidence

    return MappedResidence(device)


def _make_parallel(
    ranks: Sequence[Rank],
    devices: Sequence[torch.device],
    weights: Mapping[str, torch.Tensor],
    captured: Callable[[int, int], None] | None,
    known: Sequence["KernelOptions"],
    *,
    can_sleep: bool,
    looping: bool,
) -> Executor:
    """Make a graph executor for each rank; the weights' files are read once."""
    from lowlat.executors.distributed.parallel import ParallelExecutor, exchanged_rows
    from lowlat.executors.distributed.parts import place_parts
    from lowlat.executors.distributed.peers import PeerMemory
    from lowlat.executors.distributed.place import RankPlace
    from lowlat.executors.graph import GraphExecutor

    first = ranks[0]
    peers = PeerMemory(devices, exchanged_rows([*first.programs.values(), *first.prefills.values()]))
    parts = place_parts(weights, [rank.config for rank in ranks], devices)

    def make(number: int, leader: GraphExecutor | None) -> GraphExecutor:
        def progress(done: int, total: int) -> None:
            if captured is not None:
                captured(number * total + done, len(ranks) * total)

        rank, device = ranks[number], devices[number]
        residence = _mapped(device) if can_sleep else None
        own = replace(known[number], place=RankPlace(number, peers, leader), residence=residence)
        return GraphExecutor(
            rank.programs, rank.prefills, parts[number], device, own, looping=looping, progress=progress
        )

    return ParallelExecutor(make, peers)
