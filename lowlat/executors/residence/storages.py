"""This module frees and allocates torch storages in place: tensors stay valid, and their addresses may change."""

import torch

from lowlat.executors.allocation import release_cached_memory
from lowlat.executors.residence.base import Residence, ResidenceReport
from lowlat.executors.residence.host_memory import HostMemory

__all__ = ["StorageResidence"]


class StorageResidence(Residence):
    """Memory for an executor that captures no address; see `Residence`. On a CPU kept content stays in place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: list[torch.Tensor] = []
        self._dropped: list[tuple[torch.Tensor, int]] = []
        self._sizes: list[int] = []
        self._host: list[HostMemory] = []
        self._away = False

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Residence."""
        found = tensor.contiguous()
        if self.device.type != "cpu" and all(found is not own for own in self._kept):  # ranks share some
            self._kept.append(found)
            self._sizes.append(found.untyped_storage().nbytes())
        return found

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Residence."""
        found = torch.zeros(shape, dtype=dtype, device=self.device)
        self._dropped.append((found, found.untyped_storage().nbytes()))
        return found

    @property
    def needed_host_bytes(self) -> int:
        """See Residence."""
        return 0 if self._host else sum(self._sizes)

    def leave(self) -> None:
        """See Residence."""
        if self._away:
            return
        if self._kept and not self._host:
            host = HostMemory(sum(self._sizes), self.device)
            for tensor, part in zip(self._kept, host.bytes.split(self._sizes), strict=True):
                part.copy_(_bytes(tensor), non_blocking=True)
            self._host.append(host)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for tensor in (*self._kept, *(tensor for tensor, _ in self._dropped)):
            tensor.untyped_storage().resize_(0)
        self._away = True
        release_cached_memory(self.device)

    def come_back(self) -> None:
        """See Residence."""
        if not self._away:
            return
        for tensor, size in (*zip(self._kept, self._sizes, strict=True), *self._dropped):
            tensor.untyped_storage().resize_(size)
        for host in self._host:
            for tensor, part in zip(self._kept, host.bytes.split(self._sizes), strict=True):
                _bytes(tensor).copy_(part, non_blocking=True)
        for tensor, _ in self._dropped:
            tensor.zero_()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._away = False

    def report(self) -> ResidenceReport:
        """See Residence."""
        return ResidenceReport(sum(self._sizes) + sum(size for _, size in self._dropped), sum(self._sizes))

    def bytes_by_device(self) -> dict[str, int]:
        """See Residence."""
        return {str(self.device): self.report().device_bytes}

    def close(self) -> None:
        """See Residence."""
        self._kept.clear()
        self._dropped.clear()
        self._sizes.clear()
        for host in self._host:
            host.close()
        self._host.clear()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    found = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    found.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload]
    return found
