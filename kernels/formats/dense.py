"""Quantised dense matrices packed for GEMMs, some rows at a time, and unpacked to bf16.

`gemm.tiles` has the layout of a step; each format places its codes in it.
"""

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats import DENSE_FORMATS
from lowlat.kernels.formats.base import DenseFormat, MatrixFormat, Parts, tiles_of
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS, PackedMatrix
from lowlat.kernels.gemm.tiles import TileFormat

__all__ = ["PANEL_BYTES", "pack_matrix", "unpack_matrix"]

PANEL_BYTES = 24 * DenseFormat.panel  # that packing takes, at most


def pack_matrix(
    weight_format: MatrixFormat, parts: Parts, order: torch.Tensor | None = None, tiles: TileFormat | None = None
) -> PackedMatrix:
    """Pack a matrix [N, K] of one of DENSE_FORMATS, its rows taken in `order` first. Raises ConfigError for others.

    tiles  the layout of its steps; None: the format's for these parts
    """
    if not isinstance(weight_format, DenseFormat):
        raise ConfigError(f"the kernels read bf16, {', '.join(DENSE_FORMATS)}, and a matrix is in {weight_format.name}")
    (rows, columns), device = weight_format.shape(parts), next(iter(parts.values())).device
    height, width = tiles_of(rows, columns)
    tiles = tiles or weight_format.layout(parts)
    held = torch.empty(height * (width * tiles.step_bytes + 64 * tiles.row_scales), dtype=torch.uint8, device=device)
    steps = held[: height * width * tiles.step_bytes].view(height, width, tiles.step_bytes)
    scales = held[steps.numel() :].view(torch.float32).fill_(1)
    count = max(1, weight_format.panel // (width * TILE_COLUMNS * TILE_ROWS))
    for first in range(0, 0 if held.is_meta else height, count):  # what has no memory has nothing to pack
        some = slice(first * TILE_ROWS, min((first + count) * TILE_ROWS, rows))
        places = some if order is None else order[some].to(device)
        own = {name: part[places] for name, part in parts.items()}
        weight_format.pack_panel(own, tiles, steps[first : first + count], scales[some])
    return PackedMatrix(steps, rows, columns, order, held, tiles)


def unpack_matrix(packed: PackedMatrix) -> torch.Tensor:
    """The numbers [N, K] of a packed matrix in bf16, rows in the packed order.

    Those whose rows have scales come without them, exactly, up to a power of two; others are rounded once. It takes
    memory for some millions of numbers besides.
    """
    height, width, _ = packed.tiles.shape
    out = torch.empty(height * TILE_ROWS, width * TILE_COLUMNS, dtype=torch.bfloat16, device=packed.tiles.device)
    codes = packed.tile_format.name  # formats with the same codes unpack alike
    unpack_panel = next(each for each in DENSE_FORMATS.values() if each.codes == codes).unpack_panel
    count = max(1, DenseFormat.panel // (width * TILE_COLUMNS * TILE_ROWS))
    for first in range(0, height, count):
        steps = packed.tiles[first : first + count]
        out[first * TILE_ROWS : (first + steps.shape[0]) * TILE_ROWS] = unpack_panel(steps, packed.tile_format)
    return out[: packed.rows, : packed.columns]
