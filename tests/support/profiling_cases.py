"""A profile without a GPU: a runtime on the CPU whose steps are covered by kernels that nobody launches, and events
as a profiler would have recorded them.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lowlat import Runtime
from lowlat.engine.loading.geometry import rank_geometries
from lowlat.engine.loading.programs import build_rank
from lowlat.engine.loading.speculation import make_topologies
from lowlat.executors.distributed.parallel import exchanged_rows
from lowlat.executors.distributed.peers import PeerMemory
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.planned import META
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Bucket
from lowlat.kernels.toolchain.kernel import H200, Gpu
from lowlat.lowering.binding import Binding
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.lower import LoweredGroup, lower, weight_layouts
from lowlat.lowering.weight_parts import expert_parts, packed_weights
from lowlat.models.target import load_target
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.eagle3.weights import load_draft_model
from lowlat.tools.profile.recording import Record
from lowlat.tools.profile.times import CallSite, KernelEvent
from lowlat.tools.tune.pairs import LoweredPrograms, Pair

CPU = torch.device("cpu")


def cover(runtime: Runtime, target: Path, head: Path | None) -> Callable[[Bucket], tuple[LoweredGroup, ...]]:
    """How the kernels would cover the runtime's steps, by bucket; the weights are read again from the directories."""
    loaded = load_target(target, dtype="bfloat16")
    weights = dict(loaded.weights)
    if head is not None:
        weights.update(load_draft_model(head, loaded.config).weights)
    executor = runtime.executor

    def groups(bucket: Bucket) -> tuple[LoweredGroup, ...]:
        program = executor.program(bucket)
        layouts = weight_layouts([program])
        placed = DeviceWeights(weights, packed_weights([program]), CPU, layouts, expert_parts([program], weights))
        buffers = {**executor.state, **executor.scratch(bucket)}
        return lower(Binding(program, buffers, placed, H200, SharedWorkspace(CPU)))

    return groups


def cover_ranks(runtime: Runtime, speculative: SpeculativeConfig, size: int, gpu: Gpu = H200) -> list[SimpleNamespace]:
    """Make stand-ins for the executors of several ranks, each on a GPU of its own, from a runtime of one rank."""
    topologies = make_topologies(speculative)
    options = RuntimeConfig(tensor_parallel_size=size)
    geometries = rank_geometries(runtime.geometry, options, speculative)
    ranks = [build_rank(each, runtime.ladder, topologies) for each in geometries]
    rows = exchanged_rows([*ranks[0].programs.values(), *ranks[0].prefills.values()])
    peers = PeerMemory([torch.device(META.type, number) for number in range(size)], rows)
    pair = Pair("a pair", runtime.model_config, runtime.speculator)
    found = []
    for number, rank in enumerate(ranks):
        lowered = LoweredPrograms(pair, gpu, rank.programs.values(), rank.config, RankPlace(number, peers))

        def groups(bucket: Bucket, rank: Any = rank, lowered: LoweredPrograms = lowered) -> tuple[LoweredGroup, ...]:
            return lowered.groups(rank.programs[bucket], gpu)

        found.append(SimpleNamespace(device=torch.device("cuda", number), state=runtime.executor.state, groups=groups))
    return found


def recorded(
    sites: Sequence[CallSite], steps: int, *, each_us: float = 10.0, early_us: float = 4.0, gap_us: float = 25.0
) -> list[KernelEvent]:
    """Steps of kernels that add `each_us` each and start `early_us` before the one before has ended."""
    events, front = [], 1000.0
    for step in range(steps):
        front += gap_us if step else 0.0
        for place, site in enumerate(sites):
            start = front - (early_us if place else 0.0)
            front += each_us
            events.append(KernelEvent(f"lowlat::kernels::{site.source}::{site.kernel}", start, front))
    return events


def record_of(groups: Callable[[Bucket], Sequence[LoweredGroup]], bucket: Bucket, num_steps: int) -> Record:
    """A `Record` that runs its function and answers with `num_steps` steps of the bucket."""

    def record(run: Callable[[], None], devices: Sequence[torch.device]) -> list[list[KernelEvent]]:
        run()
        calls = [(group.stage, call.kernel) for group in groups(bucket) for call in group.kernel_calls]
        sites = [CallSite(s, k.name, k.function.__name__) for s, k in calls]
        return [recorded(sites, num_steps) for _ in devices]

    return record
