"""This module packs weights of decode's GEMMs in panels of bf16, for half the bytes and the same bits.

MKL accumulates a GEMM in float32 over parts of K, in order inside a part, and adds the parts in order. `panel_gemm`
does the same. The length of a part depends on the processor and is found by trial. If a weight's packed GEMM differs
from `linear_block`'s in one bit of the trial, the weight is not packed.
"""

import threading
from functools import lru_cache

import numpy as np
import torch

from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK, linear_block

__all__ = ["PackedWeight", "pack"]

USUAL_PART = 192
TRIAL_WIDTH = 64
_running = threading.Lock()  # some of the thread pools that Numba may choose allow only one caller


class PackedWeight:
    """A weight [N, K] of bf16 numbers in panels.

    part  columns of K that are summed by themselves
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
        """Bytes of memory."""
        return int(self._panels.nbytes)

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Compute x @ weight.T.

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
        """Whether a block of random rows gets the bits of `linear_block`; fewer rows are computed in the same way."""
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(ROW_BLOCK, self.shape[1], generator=drawn).bfloat16().float()
        found = torch.empty(ROW_BLOCK, self.shape[0])
        self.multiply(x, found)
        return torch.equal(found, linear_block(x, weight))


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """Pack a float32 weight [N, K] on a CPU; None if its numbers are not bf16, or if the result's bits would differ.

    The packed weight takes half of the weight's bytes, in addition to them.
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
    """Find the length of MKL's parts of K by trial; None if it is none of the usual lengths."""
    weight = torch.randn(TRIAL_WIDTH, depth, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    parts = dict.fromkeys((min(USUAL_PART, depth), *(-(-depth // count) for count in range(1, 5))))
    return next((part for part in parts if PackedWeight(weight, part).agrees(weight)), None)
