"""This module allocates pinned host memory of huge pages, which a device copies from and to at the bus's full speed."""

import mmap
from contextlib import suppress

import torch

from lowlat.errors import CapacityError

__all__ = ["HostMemory"]


class HostMemory:
    """Bytes of the host, [n] uint8 in `bytes`; `close` gives them back to the system.

    device  that copies from and to them; they are pinned where it is a CUDA one
    Raises CapacityError where the system refuses them.
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
            with suppress(RuntimeError):  # the next launch reports the refusal as if it were its own: this one takes it
                torch.zeros(1, device=device)
            raise _refused(num_bytes, f"it cannot be pinned (error {status}; see ulimit -l)")
        self._is_pinned = True

    def close(self) -> None:
        """Give the memory back; nothing may copy from or to it any more."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
        self._is_pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _refused(num_bytes: int, why: str) -> CapacityError:
    return CapacityError(f"{num_bytes / 2**30:.2f} GiB of host memory for weights are refused: {why}")
