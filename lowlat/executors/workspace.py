"""A workspace is memory that a lowering owns and nobody else knows: partial results, counters, address tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from lowlat.graphs.program import Program
from lowlat.kernels.toolchain.kernel import Gpu

__all__ = ["PlannedWorkspaces", "SharedWorkspace"]


@dataclass(frozen=True, eq=False)
class PlannedWorkspaces:
    """The workspaces of an executor's programs, found before it is made, and all that decides them.

    sizes         elements by name and dtype
    temporary     bytes that torch's operations take in prefill, where no kernel covers one, see `temporary_bytes`
    programs      those that were lowered
    unused        by program scratch that no launch is given
    gpu           for which they were lowered
    rank          the executor's number, and how many there are
    fuse          see `lower`
    is_invariant  see `Binding`
    """

    sizes: Mapping[tuple[str, torch.dtype], int]
    temporary: int
    programs: tuple[Program, ...]
    unused: tuple[frozenset[str], ...]
    gpu: Gpu
    rank: tuple[int, int]
    fuse: bool
    is_invariant: bool

    def suits(self, gpu: Gpu, rank: tuple[int, int], *, fuse: bool, is_invariant: bool) -> bool:
        """Whether an executor lowers programs in this way.

        gpu  the very one: another may equal it and have another tuning table
        """
        return self.gpu is gpu and (self.rank, self.fuse, self.is_invariant) == (rank, fuse, is_invariant)

    def has(self, program: Program) -> bool:
        """Whether this very program was lowered."""
        return any(program is each for each in self.programs)

    def unused_by(self, program: Program) -> frozenset[str]:
        """Scratch of this very program that no launch is given; nothing is known of another."""
        found = (unused for each, unused in zip(self.programs, self.unused, strict=True) if each is program)
        return next(found, frozenset())


class SharedWorkspace:
    """Hands out zeroed memory by name; calls that use one name run one after the other and share it.

    zeros  makes memory of results, of a shape and dtype, zeroed; None: torch does. Counters, which are integers and
           outlive a launch, are torch's always

    Addresses never change once handed out: a larger request than any before gets new memory, so the largest should ask
    first, or be reserved.
    """

    def __init__(
        self, device: torch.device, zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None
    ) -> None:
        self._device, self._zeros = device, zeros
        self._held: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of a shape and dtype; zero when it is first made."""
        count = prod(shape)
        held = self._held.setdefault((name, dtype), [])
        for known in held:
            if known.numel() >= count:
                return known[:count].view(shape)
        if self._zeros is None or not dtype.is_floating_point:
            held.append(torch.zeros(count, dtype=dtype, device=self._device))
        else:
            held.append(self._zeros((count,), dtype))
        return held[-1].view(shape)

    def reserve(self, sizes: Mapping[tuple[str, torch.dtype], int]) -> None:
        """Take memory of so many elements by name and dtype, before smaller requests come."""
        for (name, dtype), count in sizes.items():
            self(name, (count,), dtype)

    def tensors(self) -> list[torch.Tensor]:
        """Everything handed out."""
        return [tensor for held in self._held.values() for tensor in held]

    @property
    def num_bytes(self) -> int:
        """Bytes of everything handed out."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def clear(self) -> None:
        """Drop everything."""
        self._held.clear()
