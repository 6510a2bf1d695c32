"""This module has the allocation that all executors share: state, shared constants, and the clearing of blocks."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from lowlat.graphs import BufferSet, BufferSpec, Role
from lowlat.graphs.program import Program

__all__ = ["STATE_ROLES", "SharedConstants", "clear_blocks", "first_rows", "pinned_names", "release_cached_memory"]

STATE_ROLES = (Role.STATE, Role.COMMAND, Role.PUBLICATION)  # one address for all buckets


def pinned_names(specs: Iterable[BufferSpec]) -> set[str]:
    """The buffers in pinned host memory, with kernels: the host's commands, and publications."""
    roles = (Role.COMMAND, Role.PUBLICATION)
    return {spec.name for spec in specs if spec.role in roles}


def first_rows(program: Program, buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The leading rows of buffers of which a program declares fewer rows, by name: commands that it reads, and state
    that it writes."""
    specs = {spec.name: spec.shape for spec in program.specs(Role.COMMAND, Role.STATE) if spec.name in buffers}
    fewer = {name: shape[0] for name, shape in specs.items() if shape[0] < buffers[name].shape[0]}
    return {name: buffers[name][:count] for name, count in fewer.items()}


class SharedConstants:
    """Programs' constants on one device, with one copy of equal ones: RoPE tables are the same in every bucket."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[str, tuple[int, ...]], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def place(self, contents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Constants by name, on the device and contiguous."""
        return {name: self._place(name, content) for name, content in contents.items()}

    def _place(self, name: str, content: torch.Tensor) -> torch.Tensor:
        known = self._known.setdefault((name, tuple(content.shape)), [])
        for source, placed in known:
            if source is content or torch.equal(source, content):
                return placed
        known.append((content, content.to(self._device).contiguous()))
        return known[-1][1]

    def tensors(self) -> list[torch.Tensor]:
        """Every copy."""
        return [placed for known in self._known.values() for _, placed in known]

    def clear(self) -> None:
        """Drop every copy."""
        self._known.clear()


def clear_blocks(state: BufferSet, blocks: Sequence[int], device: torch.device, pool: str) -> None:
    """Zero KV blocks of a pool, the features at their ends included, on torch's current stream."""
    index = torch.tensor(list(blocks), dtype=torch.long, device=device)
    for name, spec in state.specs.items():
        if spec.paging is not None and spec.pool == pool:
            state[name][index] = 0


def release_cached_memory(device: torch.device) -> None:
    """Free the unused memory in torch's cache."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
