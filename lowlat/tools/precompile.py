"""This module compiles the kernels of a runtime ahead, on a machine that needs no GPU.

It lowers the programs of a runtime with the same options for a described GPU, onto tensors without memory.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lowlat.engine.loading.geometry import make_geometry, rank_geometries
from lowlat.engine.loading.programs import build_rank, make_ladder
from lowlat.engine.loading.speculation import make_topologies
from lowlat.errors import ConfigError
from lowlat.executors.allocation import STATE_ROLES
from lowlat.executors.distributed.parallel import exchanged_rows
from lowlat.executors.distributed.peers import PeerMemory
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.make import check_positions
from lowlat.executors.planned import META
from lowlat.graphs.program import Program
from lowlat.kernels.step.publish import LoopControl
from lowlat.kernels.toolchain.compiler import compile_ahead, compile_kernel, is_kept
from lowlat.kernels.toolchain.kernel import Gpu, Kernel, KernelCall
from lowlat.models.target import read_model_config
from lowlat.options.runtime import RuntimeConfig
from lowlat.options.slots import fit_slots
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.methods import plan_speculator
from lowlat.speculators.tree.dynamic import Topology
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.step.variants import may_repeat
from lowlat.tools.tune.pairs import LoweredPrograms, Pair, rounded_pair

__all__ = ["compile_all", "kernels_of"]

AT_ONCE = 16  # kernels between two reports of progress


def kernels_of(
    target: Path, speculative: SpeculativeConfig | None, options: RuntimeConfig, gpu: Gpu
) -> dict[str, Kernel]:
    """Return the kernels that a runtime captures, by name, on all of its GPUs.

    target  a directory, of which only the config is read
    Raises ConfigError for options that a runtime refuses, and for a model that the kernels do not cover.
    """
    config = read_model_config(target, dtype=options.dtype)
    config.check_context(options.max_context, target / "config.json")
    topologies: dict[int, Topology] = {0: TreeTopology.chain(0)}
    speculative, speculator = fit_slots(speculative, options.max_batch), None
    if speculative is not None and speculative.enabled:
        speculator, topologies = (
            plan_speculator(speculative, config, target),
            make_topologies(speculative, options.max_batch),
        )
    pair = rounded_pair(Pair(target.resolve().name, config, speculator), options)
    geometry = make_geometry(pair.config, pair.speculator, topologies, options, speculative)
    check_positions(geometry, invariant=options.tp_invariant)
    ladder = make_ladder(geometry, topologies, speculative)
    geometries = rank_geometries(geometry, options, speculative)
    ranks = [build_rank(each, ladder, topologies) for each in geometries]
    places: list[RankPlace | None] = [None]
    if len(ranks) > 1:
        devices = [torch.device(META.type, number) for number in range(len(ranks))]
        peers = PeerMemory(devices, exchanged_rows([*ranks[0].programs.values(), *ranks[0].prefills.values()]))
        places = [RankPlace(number, peers) for number in range(len(ranks))]
    found: dict[str, Kernel] = {}
    for rank, place in zip(ranks, places, strict=True):
        looping = [program for bucket, program in rank.programs.items() if options.device_loop and may_repeat(bucket)]
        own = None if place is None else rank.config
        lowered = LoweredPrograms(pair, gpu, (*rank.programs.values(), *rank.prefills.values()), own, place)
        found |= {call.kernel.name: call.kernel for call in _calls(lowered, looping, gpu)}
    return found


def _calls(lowered: LoweredPrograms, looping: list[Program], gpu: Gpu) -> Iterator[KernelCall]:
    """Return the launches of steps and prefills, and of the device loop."""
    for program in lowered.programs:
        for group in lowered.groups(program, gpu, switches=True):
            yield from group.kernel_calls
    counter = torch.empty(1, dtype=torch.int64, device=META)
    for program in looping:
        (active,) = (spec for spec in program.specs(*STATE_ROLES) if spec.name == "active")
        control = LoopControl(0, torch.empty(active.shape, dtype=active.dtype, device=META), counter, counter)
        for group in lowered.groups(program, gpu, control, switches=True):
            yield from group.kernel_calls


def compile_all(
    kernels: dict[str, Kernel],
    gpu: Gpu,
    directory: Path,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compile the kernels that a directory lacks, in several processes; returns their number.

    workers   None: one for each core
    progress  called with kernels done and kernels in all
    Raises DeviceError for a kernel that does not compile, ConfigError for a directory that cannot keep one.
    """
    every, lacking = list(kernels.values()), 0
    for first in range(0, len(every), AT_ONCE):
        some = every[first : first + AT_ONCE]
        lacking += compile_ahead(some, gpu.capability, directory, workers)
        for kernel in some:
            compile_kernel(kernel, gpu.capability, directory)  # compiles a failed process's kernels, for the error
            if not is_kept(kernel, gpu.capability, directory):
                raise ConfigError(
                    f"{directory} keeps no compiled kernels: it is full, or not yours to write; name another with --out"
                )
        if progress is not None:
            progress(first + len(some), len(every))
    return lacking
