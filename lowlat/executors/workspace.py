"""A workspace is memory that only a lowered program uses: partial results, counters, address tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from lowlat.graphs.program import Program
from lowlat.kernels.toolchain.kernel import Gpu

__all__ = ["PlannedWorkspaces", "SharedWorkspace"]


@dataclass(frozen=True, eq=False)
class PlannedWorkspaces:
    """The workspaces of an executor's programs, found before it is made, and everything that they depend on.

    sizes         elements by name and dtype
    temporary     bytes that torch's operations take in prefill for operations without a kernel, see `temporary_bytes`
    programs      the lowered programs
    unused        by program, the scratch buffers that no launch uses
    gpu           the GPU for which they were lowered
    rank          the executor's number, and the number of ranks
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

        gpu  must be the same object: an equal one may have another tuning table
        """
        return self.gpu is gpu and (self.rank, self.fuse, self.is_invariant) == (rank, fuse, is_invariant)

    def has(self, program: Program) -> bool:
        """Whether this program object was lowered."""
        return any(program is each for each in self.programs)

    def unused_by(self, program: Program) -> frozenset[str]:
        """The scratch buffers of this program object that no launch uses; empty for a program that was not lowered."""
        found = (unused for each, unused in zip(self.programs, self.unused, strict=True) if each is program)
        return next(found, frozenset())


class SharedWorkspace:
    """Hands out zeroed memory by name; calls that use one name run one after the other and share it.

    zeros  allocates zeroed memory of a shape and dtype, for results; None: torch does. Torch always allocates counters,
           which are integers and outlive a launch

    An address never changes. A request that is larger than all before gets new memory, so the largest request should
    come first, or be reserved.
    """

    def __init__(
        self, device: torch.device, zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None
    ) -> None:
        self._device, self._zeros = device, zeros
        self._held: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of a shape and dtype; it is zero when it is allocated."""
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
        """Allocate memory by name and dtype, with numbers of elements, before smaller requests come."""
        for (name, dtype), count in sizes.items():
            self(name, (count,), dtype)

    def tensors(self) -> list[torch.Tensor]:
        """All memory that was handed out."""
        return [tensor for held in self._held.values() for tensor in held]

    @property
    def num_bytes(self) -> int:
        """Bytes of all memory that was handed out."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def clear(self) -> None:
        """Drop everything."""
        self._held.clear()
