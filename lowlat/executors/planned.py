"""This module lowers programs without allocating memory, for plans, tables and compilation ahead of time."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch

from lowlat.executors.allocation import STATE_ROLES
from lowlat.executors.distributed.parallel import exchanged_rows
from lowlat.executors.distributed.peers import PeerMemory
from lowlat.executors.distributed.place import RankPlace
from lowlat.executors.workspace import PlannedWorkspaces, SharedWorkspace
from lowlat.graphs import Role
from lowlat.graphs.program import Program
from lowlat.kernels.formats import matrix_parts, matrix_shape
from lowlat.kernels.moe.formats import experts_format
from lowlat.kernels.moe.packing import PackedExperts, allocate_experts
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.binding import Binding, sum_in_parts
from lowlat.lowering.device_weights import DeviceWeights
from lowlat.lowering.lower import weight_layouts
from lowlat.lowering.memory import few_layers, lowered_needs, temporary_bytes
from lowlat.lowering.weight_parts import expert_parts, packed_weights

__all__ = ["META", "buffers_without_memory", "planned_workspaces", "weights_without_memory"]

META = torch.device("meta")


def weights_without_memory(
    shapes: Mapping[str, torch.Tensor], programs: Sequence[Program], gpu: Gpu, *, fuse: bool = True
) -> DeviceWeights:
    """The weights as kernels read them, without memory.

    shapes  canonical weights, of which only shapes and dtypes are read
    fuse    see `lower`
    """
    layouts, parts = weight_layouts(programs, gpu, fuse=fuse), expert_parts(programs, shapes)
    source: dict[str, torch.Tensor | PackedExperts] = dict(shapes)
    for name, weights in parts.items():
        given = {part: shapes[weight] for part, weight in weights.items()}
        for weight in weights.values():
            source.pop(weight, None)
        weight_format = experts_format(given)
        rows, columns = weight_format.shape({part: tensor[0] for part, tensor in given.items()})
        count = len(next(iter(given.values())))
        source[name] = allocate_experts(
            weight_format, num_experts=count, rows=rows, columns=columns, order=layouts.get(name), device=META
        )
    return DeviceWeights(source, packed_weights(programs), META, layouts)


def buffers_without_memory(program: Program) -> dict[str, torch.Tensor]:
    """A program's buffers and constants by name."""
    specs = program.specs(*STATE_ROLES, Role.SCRATCH, Role.CONSTANT)
    return {spec.name: spec.without_memory() for spec in specs}


def planned_workspaces(
    programs: Iterable[Program],
    shapes: Mapping[str, torch.Tensor],
    gpu: Gpu,
    *,
    rank: tuple[int, int] = (0, 1),
    fuse: bool = True,
) -> PlannedWorkspaces:
    """The workspaces that an executor of these programs needs.

    shapes  canonical weights of the rank, on any device
    rank    the executor's number, and the number of ranks
    fuse    see `lower`
    Raises ConfigError for programs that kernels do not support.
    """
    every = tuple(programs)
    experts = expert_parts(every, shapes)

    @cache  # every program has most names
    def form_of(name: str) -> object:
        parts = experts.get(_owner(name)) or matrix_parts(name, shapes)
        return tuple((part, shapes[each].shape, shapes[each].dtype) for part, each in parts.items())

    few = [few_layers(program, form_of) for program in every]
    kept = {_owner(name) for program in few for op in program.ops for name in op.weights.values()}
    weights = weights_without_memory(
        {name: tensor for name, tensor in shapes.items() if _owner(name) in kept}, few, gpu, fuse=fuse
    )
    number, count = rank
    place = None
    if count > 1:
        devices = [torch.device(META.type, each) for each in range(count)]
        place = RankPlace(number, PeerMemory(devices, exchanged_rows(few)))
    workspace, is_invariant = SharedWorkspace(META), sum_in_parts(every)
    bindings = (
        Binding(
            program,
            buffers_without_memory(program),
            weights,
            gpu,
            workspace,
            all_reduces=place,
            is_invariant=is_invariant,
        )
        for program in few
    )
    needs = lowered_needs(bindings, fuse=fuse)
    temporary = temporary_bytes(needs.by_library, lambda name: matrix_shape(name, shapes))
    return PlannedWorkspaces(needs.workspaces, temporary, every, needs.unused, gpu, rank, fuse, is_invariant)


def _owner(weight: str) -> str:
    """The matrix of which a weight is a part, or a bias."""
    return weight.rpartition(".")[0]
