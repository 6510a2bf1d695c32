"""A host view accesses the buffers of a state as numpy arrays: a scalar costs a tenth of torch's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["HostView", "fill"]


class HostView:
    """Has named buffers of a state as numpy arrays: views of buffers in host memory, copies of those on a device.

    `send` writes copies to the device, `fetch` reads them from there. Both wait, and `num_copies` counts the copies.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        held = {name: (state[name], state[name].cpu()) for name in names}  # `cpu` returns a host tensor itself
        self.arrays: dict[str, np.ndarray[Any, Any]] = {name: here.numpy() for name, (_, here) in held.items()}
        self._copied = {name: pair for name, pair in held.items() if pair[0] is not pair[1]}
        self.num_copies = 0

    def send(self, *names: str) -> None:
        """Copy what the host has written to the device."""
        for there, here in self._pairs(names):
            there.copy_(here)

    def fetch(self, *names: str) -> None:
        """Copy what the device has written to the host."""
        for there, here in self._pairs(names):
            here.copy_(there)

    def _pairs(self, names: Sequence[str]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = [self._copied[name] for name in names if name in self._copied] if self._copied else []
        self.num_copies += len(pairs)
        return pairs


def fill(target: np.ndarray[Any, Any], values: Sequence[float], pad: float) -> None:
    """Write values to the beginning of an array, and `pad` after them."""
    target[: len(values)] = values
    target[len(values) :] = pad
