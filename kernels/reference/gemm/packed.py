"""Weights of decode's products in oneDNN's layout: the bits of `linear_block`, without the padding to its rows.

MKL accumulates a product in float32 over parts of K, in order inside a part, and adds the parts in order. oneDNN does
the same over a part that it is given, at any number of rows from two up, and reads a packed weight at the speed of
memory. So a weight is packed in MKL's parts. The parts depend on the processor: they are found by trial, and a weight
whose packed product differs from `linear_block`'s in one bit of a trial stays as it is.
"""

from functools import lru_cache

import torch

from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK, linear_block

__all__ = ["LEAST_ELEMENTS", "PackedWeight", "pack"]

LEAST_ELEMENTS = 1 << 18  # 1 MiB; a smaller weight stays in a core's cache, where calls cost more than bytes
FEWEST_ROWS = 2  # a single row goes through a product of another order
USUAL_PART = 192
TRIAL_WIDTH = 64


class PackedWeight:
    """One weight [N, K] in parts of K, each in oneDNN's layout."""

    def __init__(self, weight: torch.Tensor, part: int) -> None:
        self.shape = weight.shape
        self._parts = [
            torch.ops.mkldnn._reorder_linear_weight(columns.contiguous(), FEWEST_ROWS)
            for columns in weight.split(part, dim=1)
        ]
        self._width = part

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T for rows x [m, K] of any float dtype, m <= ROW_BLOCK: [m, N] float32."""
        rows = x.shape[0]
        x = x.float()
        if rows < FEWEST_ROWS:
            x = torch.cat((x, x.new_zeros(FEWEST_ROWS - rows, x.shape[1])))
        linear = torch.ops.mkldnn._linear_pointwise
        out: torch.Tensor = linear(x[:, : self._width], self._parts[0], None, "none", [], "")
        for index, packed in enumerate(self._parts[1:], 1):
            start = index * self._width
            out = linear.binary(x[:, start : start + self._width], out, packed, None, "add")
        return out[:rows]

    def agrees(self, weight: torch.Tensor) -> bool:
        """Whether random rows have the bits of `linear_block`, for every number of rows."""
        drawn = torch.Generator().manual_seed(0)
        x = torch.randn(ROW_BLOCK, self.shape[1], generator=drawn).bfloat16().float()
        wanted = linear_block(x, weight)
        return all(torch.equal(self.product(x[:rows]), wanted[:rows]) for rows in range(1, ROW_BLOCK + 1))


def pack(weight: torch.Tensor) -> PackedWeight | None:
    """A float32 weight [N, K] on a CPU, packed; None for one that is small or whose bits a packed one would not have.

    The packed weight is a copy of the same size.
    """
    if weight.is_cuda or weight.dtype != torch.float32 or weight.dim() != 2 or weight.numel() < LEAST_ELEMENTS:
        return None
    part = _part_of(weight.shape[1], torch.get_num_threads())
    if part is None:
        return None
    packed = PackedWeight(weight, part)
    return packed if packed.agrees(weight) else None


@lru_cache
def _part_of(depth: int, _threads: int) -> int | None:
    """The columns of K that MKL adds up before the next, or None where oneDNN is missing or no usual width is it."""
    if not torch.backends.mkldnn.is_available():
        return None
    weight = torch.randn(TRIAL_WIDTH, depth, generator=torch.Generator().manual_seed(1))
    parts = dict.fromkeys((min(USUAL_PART, depth), *(-(-depth // count) for count in range(1, 5))))
    return next((part for part in parts if PackedWeight(weight, part).agrees(weight)), None)
