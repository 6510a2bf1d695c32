"""This module plans a runtime's memory by part. If it does not fit, the error at start names the options to change."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from lowlat.checkpoint.source import JoinedWeights
from lowlat.errors import ConfigError
from lowlat.executors.allocation import release_cached_memory
from lowlat.executors.devices import DeviceChoice
from lowlat.executors.make import Rank, planned_gpus
from lowlat.executors.workspace import PlannedWorkspaces
from lowlat.graphs import Paging, Role
from lowlat.graphs.program import Program
from lowlat.graphs.scratch import place_scratch
from lowlat.kernels.formats import matrix_format, matrix_parts
from lowlat.kernels.formats.dense import PANEL_BYTES
from lowlat.kernels.toolchain.kernel import Gpu
from lowlat.lowering.weight_parts import expert_parts, packed_weights
from lowlat.models.rank_weights import rank_weights

__all__ = [
    "DeviceNeed", "MemoryNeed", "RankPlan", "available_bytes", "check_fits", "check_ranks", "memory_need",
    "on_one_device", "plan_rank", "plan_ranks",
]  # fmt: skip


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes needed on the device, by part, and on the host while loading.

    weights_bytes    of the weights as the executor keeps them
    prefill_bytes    of the pool that torch's operations use while a prefill chunk runs; 0 if there are none
    loading_bytes    that packing the largest matrix takes beyond the parts allocated after the weights
    host_load_bytes  that reading weights takes on the host, without Python and its libraries; on a CPU in addition to
                     the other parts
    """

    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    scratch_bytes: int
    host_load_bytes: int = 0
    prefill_bytes: int = 0
    loading_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all parts on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """The parts on the device, by name."""
        return {name: value for name, value in asdict(self).items() if name != "host_load_bytes"}


class RankPlan(NamedTuple):
    """The memory that a rank needs, and its kernels' workspaces, which are part of it; None if it runs no kernels."""

    need: MemoryNeed
    workspaces: PlannedWorkspaces | None


class DeviceNeed(NamedTuple):
    """The bytes needed on a device, and its free bytes; None if these are unknown."""

    device: str
    num_bytes: int
    free_bytes: int | None


def memory_need(
    programs: Iterable[Program],
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    workspaces: PlannedWorkspaces | None = None,
    host_load_bytes: int = 0,
) -> MemoryNeed:
    """Add up the buffers of all programs and the weights as the executor keeps them.

    weights     canonical weights, or tensors without content in their place
    workspaces  of the kernels that run these programs; None: no kernels run. Kernels run one program at a time, so the
                scratch of all takes the memory of the largest one's. Workspaces and the memory of all-reduces are
                counted with it, and matrices are packed
    """
    kv: dict[str, int] = {}
    state: dict[str, int] = {}
    parts = []
    temporary = beside = 0
    programs, has_kernels = list(programs), workspaces is not None

    for program in programs:
        for spec in program.buffers.values():
            if spec.role is not Role.SCRATCH:
                part = kv if spec.paging is Paging.POSITIONS else state
                part[spec.name] = max(part.get(spec.name, 0), spec.num_bytes)
        unused = frozenset[str]() if workspaces is None else workspaces.unused_by(program)
        parts.append(place_scratch(program, unused).num_bytes)
    if workspaces is not None:
        from lowlat.executors.distributed.parallel import all_reduce_bytes
        from lowlat.lowering.memory import workspace_bytes

        beside, temporary = workspace_bytes(workspaces.sizes) + all_reduce_bytes(programs), workspaces.temporary
    matrices = [matrix_parts(name, weights) for name in packed_weights(programs)]
    matrices += [parts for parts in expert_parts(programs, weights).values() if has_kernels or "blocks" not in parts]
    packed = matrices if has_kernels else []
    expanded = [] if has_kernels else [parts for parts in matrices if parts and "weight" not in parts]
    size = _weight_bytes(weights, packed, expanded, device)
    scratch = max(parts, default=0) + beside if has_kernels else sum(parts)
    caches, states = sum(kv.values()), sum(state.values())
    packing = max((_packing_bytes(names, weights) for names in matrices), default=0) if has_kernels else 0
    loading = max(0, packing - caches - states - scratch - temporary)
    return MemoryNeed(size, caches, states, scratch, host_load_bytes, temporary, loading)


def plan_rank(
    programs: Sequence[Program],
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    gpu: Gpu | None,
    *,
    host_load_bytes: int = 0,
    rank: tuple[int, int] = (0, 1),
    fuse: bool = True,
) -> RankPlan:
    """Plan the memory of a rank's programs and of its part of the weights.

    gpu         the GPU for which kernels are lowered; None: no kernels run
    rank, fuse  see `planned_workspaces`
    """
    workspaces = None
    if gpu is not None:
        from lowlat.executors.planned import planned_workspaces  # which loads the kernels

        workspaces = planned_workspaces(programs, weights, gpu, rank=rank, fuse=fuse)
    need = memory_need(programs, weights, device, workspaces=workspaces, host_load_bytes=host_load_bytes)
    return RankPlan(need, workspaces)


def on_one_device(needs: Sequence[MemoryNeed]) -> MemoryNeed:
    """Add up the needs of several ranks on one device; the host reads their weights only once."""
    parts = {name: sum(need.parts()[name] for need in needs) for name in needs[0].parts()}
    return MemoryNeed(**parts, host_load_bytes=max(need.host_load_bytes for need in needs))


def _packing_bytes(names: Mapping[str, str], weights: Mapping[str, torch.Tensor]) -> int:
    """Bytes on the device, besides the packed matrix, while one is packed: its source, for plain ones twice."""
    own = sum(weights[name].numel() * weights[name].element_size() for name in names.values() if name in weights)
    return 2 * own if "weight" in names else own + PANEL_BYTES


def _weight_bytes(
    weights: Mapping[str, torch.Tensor],
    products: Iterable[Mapping[str, str]],
    expanded: Iterable[Mapping[str, str]],
    device: torch.device,
) -> int:
    """Bytes of the weights as an executor keeps them; each tensor counts once.

    products  names of the weights of each matrix that kernels multiply by, by part. These are packed, and their format
              counts the bytes. Without any, a CPU keeps floating-point weights in float32
    expanded  names of the weights of each quantised matrix that is kept in float32 on every device, by part
    """
    left = {id(tensor): tensor for tensor in weights.values()}
    total, packed = 0, False
    for names in expanded:
        parts = {part: weights[name] for part, name in names.items()}
        total += 4 * math.prod(matrix_format(parts).shape(parts))
        for tensor in parts.values():
            left.pop(id(tensor), None)
    for names in products:
        packed = True
        parts = {part: weights[name] for part, name in names.items() if name in weights}
        if not parts or len(parts) < len(names) or any(left.pop(id(tensor), None) is None for tensor in parts.values()):
            continue
        weight_format = matrix_format(parts)
        *outer, rows, columns = weight_format.shape(parts)
        wide = all(tensor.dtype != torch.bfloat16 for tensor in parts.values())
        total += math.prod(outer) * weight_format.packed_bytes(rows, columns, wide=wide)
    expand = device.type == "cpu" and not packed
    for tensor in left.values():
        total += tensor.numel() * (4 if expand and tensor.is_floating_point() else tensor.element_size())
    return total


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device, torch's unused cache included; None if it is unknown."""
    if device.type == "cuda":
        release_cached_memory(device)  # counting it is not enough: other streams cannot use a stream's cached memory
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = fields.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def check_fits(need: MemoryNeed, device: torch.device) -> None:
    """Raise ConfigError if more is needed than is free, on the device or on the host while loading."""
    host = torch.device("cpu")
    on_host = need.host_load_bytes + (need.total_bytes if device.type == "cpu" else 0)
    for place, total, during in ((device, need.total_bytes, ""), (host, on_host, ", loading included")):
        free = available_bytes(place)
        if free is None or total <= free:
            continue
        parts = {**need.parts()} if place == device else {}
        if place == host:
            parts["host_load_bytes"] = need.host_load_bytes
        shown = ", ".join(f"{name.removesuffix('_bytes')} {value / 2**30:.2f}" for name, value in parts.items())
        raise ConfigError(
            f"{total / 2**30:.2f} GiB are needed on {place}{during} ({shown}) and {free / 2**30:.2f} GiB are "
            "free: lower max_batch, max_context, max_prefill_chunks, kv_cache_gib or kv_blocks, or take a smaller model"
        )


def plan_ranks(
    ranks: Sequence[Rank],
    weights: JoinedWeights,
    choice: DeviceChoice,
    devices: Sequence[torch.device],
    *,
    fuse: bool = True,
) -> list[RankPlan]:
    """Plan the memory of each rank, on its device."""
    shapes, gpus = weights.shapes(), planned_gpus(choice, devices)
    return [
        plan_rank(
            (*rank.programs.values(), *rank.prefills.values()),
            rank_weights(shapes, rank.config),
            choice.device,
            gpus[number] if gpus else None,
            host_load_bytes=weights.arena_bytes + weights.made_bytes,
            rank=(number, len(ranks)),
            fuse=fuse,
        )
        for number, rank in enumerate(ranks)
    ]


def check_ranks(
    plans: Sequence[RankPlan],
    devices: Sequence[torch.device],
    reserve: Callable[[Sequence[DeviceNeed]], None] | None = None,
) -> None:
    """Raise ConfigError, which names the device, if the ranks of a device together do not fit there.

    reserve  see `Runtime.load`
    """
    together = {
        device: on_one_device([plan.need for plan, own in zip(plans, devices, strict=True) if own == device])
        for device in dict.fromkeys(devices)
    }
    if reserve is not None:
        reserve([DeviceNeed(str(own), need.total_bytes, available_bytes(own)) for own, need in together.items()])
    for device, need in together.items():
        check_fits(need, device)
