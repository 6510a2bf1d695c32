"""This module keeps the host's arguments of a chunk of prefill in one block of memory, so that one copy sends them."""

from collections.abc import Sequence

import torch

from lowlat.graphs import BufferSet, Role
from lowlat.graphs.buffers import BufferSpec, aligned_bytes
from lowlat.graphs.program import Program

__all__ = ["ChunkArguments"]


class ChunkArguments:
    """The command buffers of prefill programs, with the most rows: the host's, and the device's copies, by name.

    host    in one block of host memory, pinned if the device is a GPU
    device  in one block of device memory; on a CPU the host's own buffers
    With another rank's arguments, of the same shapes, both ranks share the host's block, which the host writes once.
    """

    def __init__(
        self, programs: Sequence[Program], device: torch.device, given: "ChunkArguments | None" = None
    ) -> None:
        read = {name: program.buffers[name] for program in programs for op in program.ops for name in op.reads.values()}
        specs = [spec for spec in read.values() if spec.role is Role.COMMAND]
        total = sum(aligned_bytes(spec) for spec in specs)
        on_gpu = device.type == "cuda"
        self._here: torch.Tensor = (
            torch.zeros(total, dtype=torch.uint8, pin_memory=on_gpu) if given is None else given._here
        )
        self._there = torch.zeros(total, dtype=torch.uint8, device=device) if on_gpu else self._here
        self.host = _laid_out(specs, self._here)
        self.device = _laid_out(specs, self._there)

    def send(self) -> None:
        """Copy the host's arguments on torch's current stream; the host may not write them until the copy has run."""
        if self._there is not self._here:
            self._there.copy_(self._here, non_blocking=True)

    def clear(self) -> None:
        """Drop the host's commands and the device's copies."""
        self.host.clear()
        self.device.clear()
        self._here = self._there = torch.empty(0, dtype=torch.uint8)


def _laid_out(specs: list[BufferSpec], arena: torch.Tensor) -> BufferSet:
    return BufferSet(specs, arena.device, arena=arena, in_arena=Role.COMMAND)
