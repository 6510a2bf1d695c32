"""Weights of decode's GEMMs in panels of bf16: the bits of `linear_block`, at half the bytes and without padding.

MKL accumulates a GEMM in float32 over parts of K, in order inside a part, and adds the parts in order, as
`panel_gemm` does. The parts depend on the processor: they are found by trial, and a weight whose packed GEMM
differs from `linear_block`'s in one bit of a trial stays as it is.
"""

import threading
from functools import lru_cache

import numpy as np
import torch

from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK, linear_block

__all__ = ["PackedWeight", "pack"]

USUAL_PART = 192
TRIAL_WIDTH = 64
_running = threading.Lock()  # not every pool of threads that Numba may choose takes two callers


class PackedWeight:
    """One weight [N, K] of bf16 numbers in panels.

    part  columns of K that are summed up before the next
    """

    def __init__(self, weight: torch.Tensor, part: int) -> None:
        from lowlat.kernels.reference.gemm import panels  # here: a process that packs nothing needs no compiler
        from lowlat.kernels.toolchain.numba_cpu import use_threads

        self.shape = weight.shape
        width, depth = weight.shape
        count = -(-width // panels.PANEL_WIDTH)
        bits = torch.zeros(count * panels.PANEL_WIDTH, depth, dtype=torch.bfloat16)
        bits[:width] = weight
        laid = bits.view(torch.int16).reshape(count, panels.PANEL_WIDTH, depth).transpose(1, 2).contiguous()
        self._panels = laid.numpy().view(np.uint16)
        self._part = part
        self._gemm = panels.panel_gemm
        self._use_threads = use_threads

    @property
    def nbytes(self) -> int:
        """Its bytes of memory."""
        return int(self._panels.nbytes)

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x @ weight.T.

        x    [m, K]  any float dtype
        out  [m, N]  float32, contiguous: out
        """
        count, depth = x.shape
        pairs = torch.zeros(-(-count // 2), depth, 2)
        pairs[:, :, 0] = x[::2]
        if count > 1:
            pairs[: count // 2, :, 1] = x[1::2]
        with _running:
            num_threads = torch.get_num_threads()
            self._use_threads(num_threads)
            if torch.get_num_threads() != num_threads:  # Numba's first call sets what torch shares with it, OpenMP's
                torch.set_num_threads(num_threads)
            self._gemm(pairs.numpy(), self._panels, self._part, out.numpy())

    def agrees(self, weight: torch.Tensor) -> bool:
        """Whether a block of random rows has the bits of `linear_block`; fewer rows are computed in the same way."""
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(ROW_BLOCK, self.shape[1], generator=drawn).bfloat16().float()
        found = torch.empty(ROW_BLOCK, self.shape[0])
        self.multiply(x, found)
        return torch.equal(found, linear_block(x, weight))


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """A float32 weight [N, K] on a CPU, packed; None for one that is no bf16, or whose bits would not be the same.

    The packed weight takes half of its bytes besides it.
    """
    if weight.is_cuda or weight.dtype != torch.float32 or not torch.equal(weight.bfloat16().float(), weight):
        return None
    part = _part_of(weight.shape[1], torch.get_num_threads())
    if part is None:
        return None
    packed = PackedWeight(weight, part)
    return packed if packed.agrees(weight) else None


@lru_cache
def _part_of(depth: int, _threads: int) -> int | None:
    """The columns of K that MKL adds up before the next, or None where no usual width is it."""
    weight = torch.randn(TRIAL_WIDTH, depth, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    parts = dict.fromkeys((min(USUAL_PART, depth), *(-(-depth // count) for count in range(1, 5))))
    return next((part for part in parts if PackedWeight(weight, part).agrees(weight)), None)
