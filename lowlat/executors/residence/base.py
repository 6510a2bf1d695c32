"""A residence is memory that leaves the device and comes back; this is its interface."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Residence", "ResidenceReport"]


@dataclass(frozen=True)
class ResidenceReport:
    """The bytes of a residence, as JSON by `to_dict`.

    device_bytes  that leave the device
    host_bytes    of host memory that holds the content meanwhile, and is held from the first time on
    """

    device_bytes: int
    host_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes}


class Residence(ABC):
    """Memory of an executor: tensors that lie in it stay valid while it is away, and may be read when it is back.

    Content that is kept never changes. It is copied to host memory the first time, and stays there: later times copy
    nothing. Not safe for several threads.
    """

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same content that lies here, contiguous; its content comes back."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor that lies here; its content does not come back: it is zero again."""

    @property
    @abstractmethod
    def needed_host_bytes(self) -> int:
        """Host memory that the next `leave` takes: that of all kept content the first time, and none later."""

    @abstractmethod
    def leave(self) -> None:
        """Give the device's memory back. Nothing may be under way there.

        Raises CapacityError where host memory is refused, and nothing has changed then.
        """

    @abstractmethod
    def come_back(self) -> None:
        """Take the device's memory again, with all kept content, which is there when this returns.

        Raises CapacityError where the device has no memory for it: it is away as before, and may try again.
        """

    @abstractmethod
    def report(self) -> ResidenceReport:
        """Its bytes."""

    @abstractmethod
    def bytes_by_device(self) -> dict[str, int]:
        """The bytes that leave each device, by its name."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back, for good; no tensor that lies here may be read any more."""
