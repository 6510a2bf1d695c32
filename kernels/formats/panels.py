"""Functions on packed steps that quantised formats share: lanes of a tile, words after its codes, numbers in rows.

A lane of a warp has, of a step of 64 columns, 8 consecutive columns of either half of a row, and of the row 8 below.
`gemm.tiles` has the layout of a step.
"""

import torch

from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.kernels.gemm.tiles import TileFormat

__all__ = [
    "by_row", "four_bit_lanes", "four_bit_rows", "group_scales", "group_words", "lanes_of", "padding_of", "put_after",
    "row_pair", "spread",
]  # fmt: skip


def padding_of(shape: tuple[int, ...], steps: torch.Tensor) -> tuple[int, int, int, int]:
    """The argument of `torch.nn.functional.pad` that makes a matrix [N, K] of this shape whole tiles."""
    (rows, columns), (height, width, _) = shape, steps.shape
    return 0, width * TILE_COLUMNS - columns, 0, height * TILE_ROWS - rows


def lanes_of(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Codes of whole tiles by tile, row half, row in its half, k step, column half, quad, the bytes of 8 columns."""
    height, width, _ = steps.shape
    return codes.view(height, 2, 8, width, 2, 4, -1)


def four_bit_lanes(codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Bytes of four-bit codes, or the codes, in the order of lanes: by tile, step, row, quad, row half, column half."""
    return lanes_of(codes, steps).permute(0, 3, 2, 5, 1, 4, 6)


def four_bit_rows(numbers: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """The inverse of `four_bit_lanes` for numbers: tile, row half, row, step, column half, quad, 8 columns."""
    height, width, _ = steps.shape
    return numbers.view(height, width, 8, 4, 2, 2, 8).permute(0, 4, 2, 1, 5, 3, 6)


def put_after(steps: torch.Tensor, tiles: TileFormat, words: torch.Tensor) -> None:
    """Write what stands after the codes of all steps, by tile and step."""
    height, width, _ = steps.shape
    steps[:, :, tiles.code_bytes :] = words.view(torch.uint8).reshape(height, width, -1)


def spread(values: torch.Tensor, tiles: TileFormat, group: int, steps: torch.Tensor, beyond: float) -> torch.Tensor:
    """Values [N, G] of groups of columns for each tile, step, group of a step, row half and row of it, float32.

    group   columns that share a value
    beyond  the value of rows and columns that pad the matrix
    """
    (rows, count), (height, width, _) = values.shape, steps.shape
    size = TILE_COLUMNS // tiles.groups
    places = torch.arange(width * tiles.groups, device=values.device) * size // group
    padded = torch.nn.functional.pad(values.float(), (0, 1, 0, height * TILE_ROWS - rows), value=beyond)
    return padded[:, places.clamp_max(count)].view(height, 2, 8, width, tiles.groups).permute(0, 3, 4, 1, 2)


def row_pair(values: torch.Tensor) -> torch.Tensor:
    """Words of two bf16 numbers, of a row and of the row 8 below: [..., 2, 8] to [..., 1, 8] int32."""
    bits = values.bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
    return (bits[..., :1, :] | (bits[..., 1:, :] << 16)).contiguous()


def _unpair(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `row_pair`, float32."""
    return torch.cat(((words << 16).view(torch.float32), (words & -65536).view(torch.float32)), -2)


def group_words(scales: torch.Tensor, tiles: TileFormat, group: int, steps: torch.Tensor) -> torch.Tensor:
    """The words of scales [N, G] after the codes: by tile, step, group, word and row, int32."""
    own = spread(scales, tiles, group, steps, 1.0)
    return own.contiguous().view(torch.int32) if tiles.wide else row_pair(own)


def group_scales(steps: torch.Tensor, tiles: TileFormat) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The scales of groups of packed steps, and their zero points less than zero and -128, as `by_row` has them."""
    height, width, _ = steps.shape
    after = steps[:, :, tiles.code_bytes :].contiguous().view(torch.int32).view(height, width, tiles.groups, -1, 8)
    scales = after[..., :2, :].view(torch.float32) if tiles.wide else _unpair(after[..., :1, :])
    return by_row(scales), by_row(_unpair(after[..., tiles.scale_words :, :])) if tiles.zeros else None


def by_row(values: torch.Tensor) -> torch.Tensor:
    """Values by tile, step, group, row half and row where numbers stand: tile, row half, row, step, group, 1."""
    return values.permute(0, 3, 4, 1, 2)[..., None]
