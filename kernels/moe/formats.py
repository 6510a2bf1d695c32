"""This module has the formats of experts' matrices: plain, MXFP4, and those of dense layers, with the same tiles.

A dense format's tile has its codes as words. The data that dense GEMMs find after the codes are its scales.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.formats import (
    DENSE_FORMATS,
    FORMATS,
    DenseFormat,
    Parts,
    Specs,
    WeightFormat,
    matrix_format,
    tiles_of,
)
from lowlat.kernels.formats.bf16 import make_unchanged
from lowlat.kernels.formats.dense import pack_matrix, unpack_matrix
from lowlat.kernels.gemm.packing import TILE_ROWS, PackedMatrix
from lowlat.kernels.gemm.tiles import ROW_PAIRS, TileFormat

__all__ = ["experts_format", "tiled_format"]


def experts_format(parts: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> WeightFormat:
    """The format of a stack of experts whose parts [E, ...] these are. Raises ShapeError for parts of none."""
    for each in FORMATS.values():
        if set(parts) == set(each.parts):
            return each
    stacked = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    matrix = DENSE_FORMATS[matrix_format(stacked).name]
    return tiled_format(matrix.name, matrix.layout(stacked))


@cache
def tiled_format(name: str, tiles: TileFormat) -> WeightFormat:
    """A dense format, by its name in the table of formats, whose tiles are held so."""
    return _TiledFormat(DENSE_FORMATS[name], tiles)


class _TiledFormat(WeightFormat):
    """Matrices of a dense format, all in tiles of one layout, after which it is named."""

    word_dtype = torch.int32

    def __init__(self, matrix: DenseFormat, tiles: TileFormat) -> None:
        self._matrix = matrix
        self._tiles = tiles
        self.name = tiles.label
        self.parts = matrix.parts
        self.block = matrix.block
        self.tile_words = tiles.code_bytes // 4
        self.scale_bytes = tiles.words * ROW_PAIRS * 4
        self.row_scales = tiles.row_scales

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`."""
        return self._matrix.specs(rows, columns, dtype)

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """See `MatrixFormat.shape`."""
        return self._matrix.shape(parts)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `MatrixFormat.dequantise`."""
        return self._matrix.dequantise(parts, dtype)

    def packed_bytes(self, rows: int, columns: int, *, wide: bool = True) -> int:
        """See `WeightFormat.packed_bytes`; scales are as wide as the tiles have them."""
        return super().packed_bytes(rows, columns) + self.row_scales * 4 * TILE_ROWS * tiles_of(rows, columns)[0]

    def pack_into(
        self, parts: Parts, shape: tuple[int, int], order: torch.Tensor | None, words: torch.Tensor,
        scales: torch.Tensor | None, row_scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """See `WeightFormat.pack_into`."""
        if tuple(self.shape(parts)) != tuple(shape):
            raise ShapeError(f"a matrix of {list(shape)} numbers is packed, got {list(self.shape(parts))}")
        packed = pack_matrix(self._matrix, parts, order, self._tiles)
        codes = packed.tiles[..., : self._tiles.code_bytes]
        words.copy_(codes.contiguous().view(torch.int32))
        if scales is not None:
            scales.copy_(packed.tiles[..., self._tiles.code_bytes :])
        if row_scales is not None and packed.scales is not None:
            row_scales.copy_(packed.scales)

    def unpack(
        self, shape: tuple[int, int], words: torch.Tensor, scales: torch.Tensor | None,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `WeightFormat.unpack`; numbers and scales of rows are multiplied and rounded."""
        codes = words.view(torch.uint8)
        steps = codes if scales is None else torch.cat((codes, scales), -1)
        behind = torch.empty(0, dtype=torch.uint8, device=words.device)
        if row_scales is not None:
            behind = row_scales.contiguous().view(torch.uint8)
        held = torch.cat((steps.reshape(-1), behind))
        matrix = unpack_matrix(PackedMatrix(held[: steps.numel()].view(steps.shape), *shape, None, held, self._tiles))
        if row_scales is None:
            return matrix
        return (matrix.float() * row_scales[: shape[0], None]).to(torch.bfloat16)

    def decode_fragment(self) -> tuple[Any, Any]:
        """See `WeightFormat.decode_fragment`; inputs stay as they are."""
        from lowlat.kernels.moe import fragments  # needs Numba, which packing does not

        return make_unchanged(), fragments.make_multiply_step(self._tiles)

    def prefill_fragment(self, multiply: Any) -> Any:
        """See `WeightFormat.prefill_fragment`."""
        from lowlat.kernels.moe import fragments

        return fragments.make_multiply_tiles(self._tiles, multiply)

    def prefill_halves(self) -> tuple[Any, Any, Any]:
        """See `WeightFormat.prefill_halves`."""
        from lowlat.kernels.gemm.prefill.weight_steps import make_load_halves

        return make_load_halves(self._tiles, is_shared=True)
