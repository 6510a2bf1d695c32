"""This module allocates memory for calls whose arguments have none, so that a launch does a step's work.

Weights get several places, which are used in turn, so that a launch finds no more of them in the L2 than in a step.
`cases` fills the arguments that need more than random numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from lowlat.kernels.gemm.packing import RUN
from lowlat.kernels.toolchain.kernel import Argument, KernelCall
from lowlat.lowering.memory import memory_of

__all__ = ["MOST_PLACES", "ROTATED_BYTES", "Places", "fill_numbers"]

ROTATED_BYTES = 160 << 20  # more than the L2 of any GPU
MOST_PLACES = 64
DEVIATION = 0.05


def fill_numbers(calls: Sequence[KernelCall]) -> None:
    """Fill floating-point arguments with random numbers, and row flags with ones; integers stay zero.

    Zeros are valid in all pairs: slot 0, position 0, block 0 and no position to write.
    """
    for tensor in (each for call in calls for each in call.tensors):
        if tensor.is_floating_point():
            tensor.normal_(0.0, DEVIATION)
        elif tensor.dtype == torch.uint8:
            tensor.fill_(1)


class Places:
    """Memory on a device for the arguments of a launch, the same for all of its plans.

    device       the device of the memory
    weights      the weights, as tensors without memory
    total_bytes  bytes of all weights of the pair: if they fit into the L2, a step finds them there, too
    """

    def __init__(self, device: torch.device, weights: Sequence[torch.Tensor], total_bytes: int) -> None:
        self._device, self._total_bytes = device, total_bytes
        self._weights = {memory_of(tensor) for tensor in weights}
        self._memory: dict[tuple[int, int], torch.Tensor] = {}

    def num_copies(self, calls: Sequence[KernelCall]) -> int:
        """Return the number of places that the weights of these calls need."""
        weights = [tensor for call in calls for tensor in call.tensors if memory_of(tensor) in self._weights]
        moved = sum({memory_of(tensor): tensor.untyped_storage().nbytes() for tensor in weights}.values())
        rotated = min(ROTATED_BYTES, self._total_bytes)
        return max(1, min(MOST_PLACES, math.ceil(rotated / moved))) if moved else 1

    def place(self, calls: Sequence[KernelCall], copy: int) -> tuple[KernelCall, ...]:
        """Return the calls with arguments on the device, zero at first; weights are in the copy of this number."""
        return tuple(
            replace(call, arguments=tuple(self._placed(each, copy) for each in call.arguments)) for call in calls
        )

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the content of an argument that is not a weight; zeros if no call has it."""
        found = self._memory.get((memory_of(tensor), 0))
        return torch.zeros_like(tensor) if found is None else found.view(tensor.dtype).cpu()

    def _placed(self, argument: Argument, copy: int) -> Argument:
        if not isinstance(argument, torch.Tensor):
            return argument
        storage = memory_of(argument)
        is_weight = storage in self._weights
        place = storage, copy if is_weight else 0
        if place not in self._memory:
            self._memory[place] = self._allocate(argument, is_weight)
        whole = self._memory[place].view(argument.dtype)
        return whole.as_strided(argument.shape, argument.stride(), argument.storage_offset())

    def _allocate(self, argument: torch.Tensor, is_weight: bool) -> torch.Tensor:
        size = argument.untyped_storage().nbytes()
        if is_weight and argument.dtype == torch.int32:  # columns of a permuted weight: each at a place of its own
            return torch.arange(0, size // 4 * RUN, RUN, dtype=torch.int32, device=self._device).view(torch.uint8)
        return torch.zeros(size, dtype=torch.uint8, device=self._device)
