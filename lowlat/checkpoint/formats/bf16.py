"""This module has the plain format: one floating-point tensor, converted to the compute dtype as it is read."""

from collections.abc import Mapping

import torch

from lowlat.checkpoint.formats.base import Matrices, StoredFormat
from lowlat.checkpoint.recipes import Arrange, Piece, Recipe
from lowlat.kernels.formats import BF16

__all__ = ["STORED_BF16"]


class _StoredBf16(StoredFormat):
    """The plain format: a weight is the tensor of its stored name."""

    packed = BF16

    def recipes(self, matrices: Matrices, dtype: torch.dtype) -> list[Recipe]:
        """See `StoredFormat.recipes`."""
        count, rows, columns = matrices.shape
        arrange: Arrange = "deinterleave" if matrices.interleaved else "rows"
        if matrices.transposed:
            arrange = "transpose_deinterleave" if matrices.interleaved else "transpose"
        shape = (count, columns, rows) if matrices.transposed else matrices.shape
        return [Recipe(f"{matrices.weight}.weight", (Piece(matrices.stored, shape),), dtype, arrange)]

    def check_parts(self, labels: Mapping[str, str], parts: Mapping[str, torch.Tensor]) -> None:
        """Check nothing: the reader has refused NaN and infinity already."""


STORED_BF16 = _StoredBf16()
