"""What a runtime will allocate, by part, and whether it fits: refused at start, with the numbers and the knobs."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lowlat.errors import ConfigError
from lowlat.graphs import Role
from lowlat.program import Program

__all__ = ["MemoryNeed", "available_bytes", "check_fits", "memory_need"]


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by part; `weights_bytes` is what the executor's own copy takes (float32 on a CPU)."""

    weights_bytes: int
    kv_bytes: int
    state_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        """All parts."""
        return sum(asdict(self).values())


def memory_need(
    programs: Iterable[Program],
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    share_scratch: bool = False,
) -> MemoryNeed:
    """Add up the buffers of all programs and the weights that the executor keeps beside the loaded ones.

    share_scratch  programs run one at a time in the memory of the largest one's scratch
    """
    kv: dict[str, int] = {}
    state: dict[str, int] = {}
    parts = []
    for program in programs:
        scratch = 0
        for spec in program.buffers.values():
            if spec.role is Role.SCRATCH:
                scratch += spec.num_bytes
            else:
                (kv if "_cache" in spec.name else state)[spec.name] = spec.num_bytes
        parts.append(scratch)
    unique = {id(tensor): tensor for tensor in weights.values()}.values()
    size = sum(
        tensor.numel() * (4 if device.type == "cpu" and tensor.is_floating_point() else tensor.element_size())
        for tensor in unique
        if device.type != "cpu" or tensor.dtype in (torch.bfloat16, torch.float16)
    )
    total = max(parts, default=0) if share_scratch else sum(parts)
    return MemoryNeed(size, sum(kv.values()), sum(state.values()), total)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of the device; None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    available = fields.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def check_fits(need: MemoryNeed, device: torch.device) -> None:
    """Raise ConfigError where more is needed than is free."""
    free = available_bytes(device)
    if free is not None and need.total_bytes > free:
        parts = ", ".join(f"{name.removesuffix('_bytes')} {value / 2**30:.2f}" for name, value in asdict(need).items())
        raise ConfigError(
            f"{need.total_bytes / 2**30:.2f} GiB are needed on {device} ({parts}) and {free / 2**30:.2f} GiB are "
            "free: lower max_batch, max_context or kv_blocks, or take a smaller model"
        )
