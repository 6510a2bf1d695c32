"""This module reports the memory that a runtime holds, by device: its ranks' planned parts, and the free memory.

A loaded runtime allocates nothing more, so it is measured once, after the load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowlat.engine.memory.plan import MemoryNeed, available_bytes, on_one_device

__all__ = ["HeldMemory", "held_memory"]

PARTS = ("weights_bytes", "kv_bytes", "state_bytes", "scratch_bytes", "prefill_bytes")  # those that stay


@dataclass(frozen=True)
class HeldMemory:
    """The memory held on one device.

    ranks        the ranks that run there
    need         their need together, as `memory_need` counts it
    free_bytes   the device's free memory after the load, other processes' use counted; None if it is unknown
    total_bytes  of the device; None for a CPU
    """

    device: torch.device
    ranks: tuple[int, ...]
    need: MemoryNeed
    free_bytes: int | None
    total_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        parts = self.need.parts()
        return {
            "device": str(self.device),
            "ranks": list(self.ranks),
            **{name: parts[name] for name in PARTS},
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
        }


def held_memory(needs: Sequence[MemoryNeed], devices: Sequence[torch.device]) -> tuple[HeldMemory, ...]:
    """Measure the memory of loaded ranks, by device.

    needs, devices  of each rank, in order
    """
    found = []
    for device in dict.fromkeys(devices):
        ranks = tuple(rank for rank, own in enumerate(devices) if own == device)
        free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (available_bytes(device), None)
        found.append(HeldMemory(device, ranks, on_one_device([needs[rank] for rank in ranks]), free, total))
    return tuple(found)
