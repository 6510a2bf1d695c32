"""A residence is memory that leaves the device and comes back; this is its interface."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Residence", "ResidenceReport"]


@dataclass(frozen=True)
class ResidenceReport:
    """The bytes of a residence, as JSON by `to_dict`.

    device_bytes  bytes that leave the device
    host_bytes    bytes of host memory that hold the kept content from the first `leave` on
    """

    device_bytes: int
    host_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes}


class Residence(ABC):
    """Memory of an executor. Tensors in it stay valid while it is away, and may be read once it is back.

    Kept content never changes. The first `leave` copies it to host memory, where it stays: later ones copy nothing.
    Not safe for several threads.
    """

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into this memory, contiguous; `come_back` restores its content."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a zeroed tensor in this memory; `come_back` zeroes it again."""

    @property
    @abstractmethod
    def needed_host_bytes(self) -> int:
        """Bytes of host memory that the next `leave` takes: the size of all kept content the first time, then 0."""

    @abstractmethod
    def leave(self) -> None:
        """Release the device's memory. Nothing may run there.

        Raises CapacityError if host memory is refused; nothing has changed then.
        """

    @abstractmethod
    def come_back(self) -> None:
        """Allocate the device's memory again, and restore all kept content before it returns.

        Raises CapacityError if the device lacks the memory; the residence is still away then, and a later call may
        succeed.
        """

    @abstractmethod
    def report(self) -> ResidenceReport:
        """Report the bytes of this memory."""

    @abstractmethod
    def bytes_by_device(self) -> dict[str, int]:
        """The bytes that leave each device, by the device's name."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory for good; no tensor in it may be read after that."""
