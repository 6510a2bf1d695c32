"""A host view shows memory that host and device share as numpy arrays, whose scalars cost a tenth of torch's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["HostView", "fill"]


class HostView:
    """Named buffers of a state as numpy arrays: views of host memory, copies of what lies on a device.

    A copy goes to the device by `send`, and comes from there by `fetch`; both wait for it, and `num_copies` counts
    them.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
        held = {name: (state[name], state[name].cpu()) for name in names}  # `cpu` is itself where it lies there
        self.arrays: dict[str, np.ndarray[Any, Any]] = {name: here.numpy() for name, (_, here) in held.items()}
        self._copied = {name: pair for name, pair in held.items() if pair[0] is not pair[1]}
        self.num_copies = 0

    def send(self, *names: str) -> None:
        """Bring what was written to the device."""
        for there, here in self._pairs(names):
            there.copy_(here)

    def fetch(self, *names: str) -> None:
        """Bring what the device has written."""
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
