"""This module allocates pinned host memory with huge pages, so that a device copies at the bus's full speed."""

import mmap
from contextlib import suppress

import torch

from lowlat.errors import CapacityError

__all__ = ["HostMemory"]


class HostMemory:
    """Holds host memory, [n] uint8 in `bytes`; `close` returns it to the system.

    device  the device that copies from and to it; for a CUDA device the memory is pinned
    Raises CapacityError if the system refuses it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._is_pinned = False
        try:
            memory = mmap.mmap(-1, max(1, num_bytes))
        except (OSError, ValueError, OverflowError) as error:
            raise _refused(num_bytes, str(error)) from error
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
        if device.type == "cuda":
            self._pin(device)

    def _pin(self, device: torch.device) -> None:
        status = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))
        if status:
            num_bytes = self.bytes.numel()
            del self.bytes
            with suppress(RuntimeError):  # CUDA reports the refusal again at the next launch: this launch consumes it
                torch.zeros(1, device=device)
            raise _refused(num_bytes, f"it cannot be pinned (error {status}; see ulimit -l)")
        self._is_pinned = True

    def close(self) -> None:
        """Return the memory to the system; no copy may use it after that."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        self._is_pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _refused(num_bytes: int, why: str) -> CapacityError:
    return CapacityError(f"{num_bytes / 2**30:.2f} GiB of host memory for weights are refused: {why}")
