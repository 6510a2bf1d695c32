"""Ranks that exchange rows: their memory, and what each must find, for kernels that are walked and for a GPU."""

from dataclasses import dataclass, field
from typing import Any

import torch

from lowlat.kernels.collectives.all_reduce import Channel, channel_shapes

EPS = 1e-5


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Float32 parts added up as a tree, the sums of two halves at every joint."""
    if len(parts) == 1:
        return parts[0]
    half = (len(parts) + 1) // 2
    return tree_sum(parts[:half]) + tree_sum(parts[half:])


@dataclass
class Ranks:
    """The memory of ranks, on one device each or all on one."""

    count: int
    rows: int
    width: int
    whole: bool = False
    early: bool = True
    devices: list[torch.device] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.devices = self.devices or [torch.device("cpu")] * self.count
        area, counters = channel_shapes(self.count, self.rows, self.width, self.whole)
        self.areas = tuple(torch.zeros(area, dtype=torch.int64, device=each) for each in self.devices)
        self.counters = [torch.zeros(counters, dtype=torch.int32, device=each) for each in self.devices]
        self.abort = torch.zeros(1, dtype=torch.int64, pin_memory=self.devices[0].type == "cuda")

    def channels(self, kind: Any = Channel) -> list[Channel]:
        """Each rank's channel, of the module that was imported."""
        return [
            kind(rank, self.areas, self.counters[rank], self.abort, self.whole, self.early)
            for rank in range(self.count)
        ]

    def inputs(self, rows: int) -> list[torch.Tensor]:
        """A part of each rank, whose sums depend on their order."""
        scales = torch.logspace(-2, 2, self.count)
        return [
            (torch.randn(rows, self.width) * scale).to(device)
            for scale, device in zip(scales, self.devices, strict=True)
        ]
