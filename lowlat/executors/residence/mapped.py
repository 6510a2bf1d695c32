"""This module reserves device addresses once, and unmaps and maps the memory under them.

Captured graphs hold addresses. CUDA's virtual memory management can release the memory under an address and later map
other memory there, so the same graphs can be replayed.
Source: CUDA driver API, Virtual Memory Management.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from lowlat.errors import CapacityError, DeviceError
from lowlat.executors.allocation import release_cached_memory
from lowlat.executors.residence.base import Residence, ResidenceReport
from lowlat.executors.residence.host_memory import HostMemory

__all__ = ["AddressSpace", "CudaAddressSpace", "MappedResidence"]

ALIGNMENT = 512  # torch's own: kernels read 16 bytes at a time, TMA wants 128
GROWTH_BYTES = 32 << 20  # mapped at once while tensors are allocated
PIECE_BYTES = 128 << 20  # mapped at once in `come_back`: one piece is copied while the next is mapped


class AddressSpace(ABC):
    """A range of a device's addresses; parts of it have memory mapped."""

    granularity: int
    num_bytes: int

    @abstractmethod
    def map(self, start: int, size: int) -> None:
        """Map memory to a part; start and size are multiples of the granularity.

        Raises CapacityError if the device has none left.
        """

    @abstractmethod
    def unmap(self, start: int, size: int) -> None:
        """Release the memory of a part; start and size are those of one call of `map`."""

    @abstractmethod
    def view(self, start: int, size: int) -> torch.Tensor:
        """The bytes of a mapped part, [size] uint8; the tensor may outlive the memory, and be read once it is back."""

    @abstractmethod
    def close(self) -> None:
        """Release the addresses; no part may be mapped."""


class CudaAddressSpace(AddressSpace):
    """Reserves as many addresses of a CUDA device as it has memory. Raises DeviceError if the driver refuses."""

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)
            torch.zeros(1, device=device)  # the context must be there
            total = torch.cuda.get_device_properties(device).total_memory
        place = driver.CUmemLocation()
        place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device.index or 0
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._ask("cuMemGetAllocationGranularity", self._kind, flags))
        self.num_bytes = -(-total // self.granularity) * self.granularity
        self._address = int(self._ask("cuMemAddressReserve", self.num_bytes, 0, 0, 0))

    def map(self, start: int, size: int) -> None:
        """See AddressSpace."""
        driver = self._driver
        status, handle = driver.cuMemCreate(size, self._kind, 0)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            release_cached_memory(self.device)
            status, handle = driver.cuMemCreate(size, self._kind, 0)
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = torch.cuda.mem_get_info(self.device)
            raise CapacityError(
                f"{self.device} has no memory for {size / 2**20:.0f} MiB more: {free / 2**30:.2f} of "
                f"{total / 2**30:.2f} GiB are free; others hold the rest"
            )
        self._check("cuMemCreate", status)
        address = self._address + start
        try:
            self._ask("cuMemMap", address, size, 0, handle, 0)
        finally:
            self._ask("cuMemRelease", handle)  # the memory stays until it is unmapped
        self._ask("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, start: int, size: int) -> None:
        """See AddressSpace."""
        self._ask("cuMemUnmap", self._address + start, size)

    def view(self, start: int, size: int) -> torch.Tensor:
        """See AddressSpace."""
        return torch.as_tensor(_Array(self, self._address + start, size), device=self.device)

    def close(self) -> None:
        """See AddressSpace."""
        self._ask("cuMemAddressFree", self._address, self.num_bytes)

    def _ask(self, name: str, *arguments: object) -> Any:
        status, *found = getattr(self._driver, name)(*arguments)
        self._check(name, status)
        return found[0] if found else None

    def _check(self, name: str, status: Any) -> None:
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{name} failed on {self.device}: {status.name}")


class _Array:
    """Describes bytes at an address to torch, and keeps the address space alive."""

    def __init__(self, owner: CudaAddressSpace, address: int, size: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class _Arena:
    """Allocates from the start of an address space, and releases all memory at once."""

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self.used = 0
        self._pieces: list[tuple[int, int]] = []  # mapped: start and size
        self.mapped = 0  # from the start

    def take(self, num_bytes: int) -> torch.Tensor:
        """Allocate bytes, [n] uint8. Raises CapacityError."""
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        end = start + max(num_bytes, 1)
        if end > self._space.num_bytes:
            raise CapacityError(f"{end / 2**30:.2f} GiB are needed; the device has {self._space.num_bytes / 2**30:.2f}")
        if end > self.mapped:
            self._map(self._round(max(end - self.mapped, min(GROWTH_BYTES, self._space.num_bytes - self.mapped))))
        self.used = end
        return self._space.view(start, max(num_bytes, 1))[:num_bytes]

    def unmap(self) -> None:
        """Release the memory."""
        while self._pieces:
            self._space.unmap(*self._pieces[-1])
            self._pieces.pop()
        self.mapped = 0

    def map(self, mapped: Callable[[int, int], None]) -> None:
        """Map memory again for all allocated bytes; calls `mapped` with start and size of each part once it is mapped.

        Raises CapacityError if the device has too little; the parts mapped so far stay until `unmap`.
        """
        total = self._round(self.used)
        while self.mapped < total:
            start, size = self.mapped, min(self._round(PIECE_BYTES), total - self.mapped)
            self._map(size)
            mapped(start, min(size, self.used - start))

    def view(self, start: int, size: int) -> torch.Tensor:
        """See AddressSpace."""
        return self._space.view(start, size)

    def close(self) -> None:
        """Release memory and addresses."""
        self.unmap()
        self._space.close()

    def _map(self, size: int) -> None:
        self._space.map(self.mapped, size)
        self._pieces.append((self.mapped, size))
        self.mapped += size

    def _round(self, size: int) -> int:
        return -(-size // self._space.granularity) * self._space.granularity


class MappedResidence(Residence):
    """Memory whose addresses never change; see `Residence`.

    device  of the memory
    make    makes an address space; called once for kept content and once for zeroed buffers
    """

    def __init__(self, device: torch.device, make: Callable[[torch.device], AddressSpace] = CudaAddressSpace) -> None:
        self.device = device
        self._kept, self._dropped = _Arena(make(device)), _Arena(make(device))
        self._host: HostMemory | None = None
        self._away = False

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Residence. Raises DeviceError after the first `leave`, whose host copy would lack this content."""
        if self._host is not None:
            raise DeviceError("memory that has been away takes no more content")
        found = _typed(self._kept.take(tensor.numel() * tensor.element_size()), tuple(tensor.shape), tensor.dtype)
        found.copy_(tensor)
        return found

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See Residence."""
        return _typed(self._dropped.take(prod(shape) * dtype.itemsize), shape, dtype).zero_()

    @property
    def needed_host_bytes(self) -> int:
        """See Residence."""
        return self._kept.used if self._host is None else 0

    @torch.inference_mode()
    def leave(self) -> None:
        """See Residence."""
        if self._away:
            return
        if self._host is None and self._kept.used:
            host = HostMemory(self._kept.used, self.device)
            host.bytes.copy_(self._kept.view(0, self._kept.used), non_blocking=True)
            self._host = host
        self._wait()
        self._kept.unmap()
        self._dropped.unmap()
        self._away = True
        release_cached_memory(self.device)

    @torch.inference_mode()
    def come_back(self) -> None:
        """See Residence."""
        if not self._away:
            return
        host = self._host

        def fill(start: int, size: int) -> None:
            if host is not None:
                self._kept.view(start, size).copy_(host.bytes[start : start + size], non_blocking=True)

        def clear(start: int, size: int) -> None:
            self._dropped.view(start, size).zero_()

        try:
            self._kept.map(fill)
            self._dropped.map(clear)
        except CapacityError:
            self._wait()  # copies into the mapped parts are running
            self._kept.unmap()
            self._dropped.unmap()
            raise
        self._wait()
        self._away = False

    def report(self) -> ResidenceReport:
        """See Residence."""
        return ResidenceReport(self._kept.used + self._dropped.used, self._kept.used)

    def bytes_by_device(self) -> dict[str, int]:
        """See Residence."""
        return {str(self.device): self.report().device_bytes}

    def close(self) -> None:
        """See Residence."""
        self._wait()
        for arena in (self._kept, self._dropped):
            arena.close()
        if self._host is not None:
            self._host.close()
            self._host = None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _typed(memory: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return memory.view(dtype).view(shape)
