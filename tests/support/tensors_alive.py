"""The memory that tensors occupy, and the tensors that still lie in it."""

import gc
from collections.abc import Iterable

import torch


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Addresses of the memory that tensors, or what they are views of, occupy."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


def alive_in(memory: set[int]) -> list[torch.Tensor]:
    """Every tensor that this process still refers to in such memory, views and those after numpy arrays included."""
    tensors = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    return [
        tensor for tensor in tensors if tensor.layout == torch.strided and not memory.isdisjoint(storages([tensor]))
    ]


def left_in(memory: set[int]) -> list[torch.Tensor]:
    """The same, when cycles that nobody refers to are gone, too."""
    if alive_in(memory):  # most often nothing is, and looking for cycles takes a second
        gc.collect()
    return alive_in(memory)
