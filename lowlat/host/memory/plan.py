"""What a runtime will allocate, by part, and whether it fits: refused at start, with the numbers and the knobs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lowlat.errors import ConfigError
from lowlat.executors.allocation import release_cached_memory
from lowlat.executors.lowering.weight_layouts import EXPERT_PRODUCTS
from lowlat.executors.prefill.memory import temporary_bytes
from lowlat.executors.prefill.room import room_of
from lowlat.graphs import Role
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.kernels.reference.moe.mxfp4 import BLOCK
from lowlat.program.program import Program

__all__ = ["MemoryNeed", "available_bytes", "check_fits", "memory_need"]


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes on the device by part, the weights as the executor keeps them; and of the host's memory while loading.

    prefill_bytes    what torch's operations take while a chunk of prefill runs, in a pool of their own
    host_load_bytes  what weights in files pass through, beside Python and its libraries; on a CPU it comes on top
    """

    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    scratch_bytes: int
    host_load_bytes: int = 0
    prefill_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All parts on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """The parts on the device, by name."""
        return {name: value for name, value in asdict(self).items() if name != "host_load_bytes"}


def memory_need(
    programs: Iterable[Program],
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    has_kernels: bool = False,
    host_load_bytes: int = 0,
) -> MemoryNeed:
    """Add up the buffers of all programs and the weights as the executor keeps them.

    weights      canonical weights, or tensors without content in their place
    has_kernels  programs run one at a time in the memory of the largest one's scratch, which in prefill has
                 room for its experts and its attention; and matrices lie in tiles
    """
    kv: dict[str, int] = {}
    state: dict[str, int] = {}
    parts = []
    temporary = 0
    matrices: set[str] = set()

    def shape_of(name: str) -> torch.Size:
        return weights[name].shape

    for program in programs:
        scratch = 0
        for spec in program.buffers.values():
            if spec.role is Role.SCRATCH:
                scratch += spec.num_bytes
            else:
                part = kv if "_cache" in spec.name else state
                part[spec.name] = max(part.get(spec.name, 0), spec.num_bytes)
        parts.append(scratch + (room_of(program, shape_of).num_bytes if has_kernels else 0))
        if has_kernels:
            temporary = max(temporary, temporary_bytes(program, weights.__getitem__))
        matrices |= {op.weights["weight"] for op in program.ops if op.kind == "linear"}
        for op in program.ops:
            if op.kind in EXPERT_PRODUCTS:
                matrices |= {weight for argument, weight in op.weights.items() if argument != "bias"}
    expand = device.type == "cpu" and not has_kernels
    tiled = {id(weights[name]) for name in matrices if name in weights} if has_kernels else set()
    unique = {id(tensor): tensor for tensor in weights.values()}
    size = sum(_kept_bytes(tensor, expand=expand, tiled=key in tiled) for key, tensor in unique.items())
    total = max(parts, default=0) if has_kernels else sum(parts)
    return MemoryNeed(size, sum(kv.values()), sum(state.values()), total, host_load_bytes, temporary)


def _kept_bytes(tensor: torch.Tensor, *, expand: bool, tiled: bool) -> int:
    """What an executor keeps of a weight: float32 on a CPU; matrices that kernels multiply by, in whole tiles.

    Those are [N, K], of experts [E, N, K], in MXFP4 [E, N, K / 32, 16] and [E, N, K / 32].
    """
    itemsize = 4 if expand and tensor.is_floating_point() else tensor.element_size()
    if not tiled:
        return tensor.numel() * itemsize
    outer, (rows, columns, *inner) = ((1,), tensor.shape) if tensor.dim() == 2 else (tensor.shape[:1], tensor.shape[1:])
    width = TILE_COLUMNS if tensor.is_floating_point() else TILE_COLUMNS // BLOCK
    padded = -(-rows // TILE_ROWS) * TILE_ROWS * -(-columns // width) * width
    return math.prod((*outer, padded, *inner)) * itemsize


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device, what only torch's cache holds included; None where it cannot be told."""
    if device.type == "cuda":
        release_cached_memory(device)  # not merely counted: memory of one stream's cache is of no use to another
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = fields.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def check_fits(need: MemoryNeed, device: torch.device) -> None:
    """Raise ConfigError where more is needed than is free, on the device or on the host while loading."""
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
            "free: lower max_batch, max_context or kv_blocks, or take a smaller model"
        )
