"""This module packs weights in the order in which a warp's lanes read them, and back; it permutes rows for epilogues.

A matrix [N, K] is padded with zeros to multiples of 16 rows and 64 columns, and divided into tiles of 16 rows by 64
columns, 2 KiB each. They are stored tile row by tile row, with the k steps of a tile row one after another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.tiles import BF16_TILES, TileFormat

__all__ = [
    "RUN",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "PackedMatrix",
    "gate_up_permutation",
    "gather_rows",
    "pack",
    "rope_permutation",
    "runs_of",
    "unpack",
    "unpack_rows",
]

TILE_ROWS = 16
TILE_COLUMNS = 64
RUN = 8  # rows that stay together in every order


@dataclass(frozen=True)
class PackedMatrix:
    """A packed weight.

    tiles    [ceil(N / 16), ceil(K / 64), 1024]  the matrix's dtype
    rows     N, before padding
    columns  K, before padding
    order    [N] int64 or None: row i of the packed matrix is row order[i] of the original
    held     uint8: the tiles and, after them, float32 scales of the packed rows; None: rows have no scales
    tile_format  the format of the tiles; if it is not plain, `tiles` are bytes of steps
    """

    tiles: torch.Tensor
    rows: int
    columns: int
    order: torch.Tensor | None = None
    held: torch.Tensor | None = None
    tile_format: TileFormat = BF16_TILES

    @property
    def memory(self) -> torch.Tensor:
        """The tensors that a GEMM reads."""
        return self.tiles if self.held is None else self.held

    @property
    def scales(self) -> torch.Tensor | None:
        """The scales of the packed rows, [ceil(N / 16) * 16] float32; None where they have none."""
        if self.held is None or not self.tile_format.row_scales:
            return None
        return self.held[self.tiles.nbytes :].view(torch.float32)

    @property
    def num_bytes(self) -> int:
        """Bytes that a GEMM reads."""
        return self.memory.nbytes

    def placed(self, place: Callable[[torch.Tensor], torch.Tensor]) -> "PackedMatrix":
        """Return the same matrix in other memory; `place` copies a tensor and returns the copy."""
        memory = place(self.memory)
        if self.held is None:
            return replace(self, tiles=memory)
        tiles = memory[: self.tiles.nbytes].view(self.tiles.dtype).view(self.tiles.shape)
        return replace(self, tiles=tiles, held=memory)


def pack(weight: torch.Tensor, order: torch.Tensor | None = None) -> PackedMatrix:
    """Pack a matrix [N, K], with its rows in `order`. Raises ShapeError for anything but a matrix."""
    if weight.dim() != 2:
        raise ShapeError(f"a packed weight must be a matrix, got shape {list(weight.shape)}")
    rows, columns = weight.shape
    if order is not None:
        weight = weight[order.to(weight.device)]
    extra_rows, extra_columns = -rows % TILE_ROWS, -columns % TILE_COLUMNS
    if extra_rows or extra_columns:
        weight = torch.nn.functional.pad(weight, (0, extra_columns, 0, extra_rows))
    tiles = weight.reshape(weight.shape[0] // TILE_ROWS, 2, 8, weight.shape[1] // TILE_COLUMNS, 2, 4, 8)
    # tile, k step, row half, column half, row in its half, quad, 8 columns
    packed = tiles.permute(0, 3, 1, 4, 2, 5, 6).contiguous()
    return PackedMatrix(packed.view(packed.shape[0], packed.shape[1], 1024), rows, columns, order)


def unpack_rows(packed: PackedMatrix) -> torch.Tensor:
    """Return the matrix [N, K] with its rows in packed order; a padded matrix is a view of a larger one."""
    height, width, _ = packed.tiles.shape
    units = packed.tiles.view(torch.complex128)  # a lane's 8 columns, or what makes 16 bytes: copied as one
    tiles = units.view(height, width, 2, 2, 8, 4, -1).permute(0, 2, 4, 1, 3, 5, 6)
    matrix = tiles.reshape(height * TILE_ROWS, -1).view(packed.tiles.dtype)
    return matrix[: packed.rows, : packed.columns]


def unpack(packed: PackedMatrix) -> torch.Tensor:
    """Return the original matrix [N, K]."""
    matrix = unpack_rows(packed)
    if packed.order is None:
        return matrix.contiguous()
    restored = torch.empty(packed.rows, packed.columns, dtype=matrix.dtype, device=matrix.device)
    restored[packed.order.to(matrix.device)] = matrix
    return restored


@cache
def gate_up_permutation(width: int) -> torch.Tensor:
    """Return the order of rows of a fused gate and up matrix [2I, N] by which a tile has 8 gates and their 8 ups: [2I].

    Raises ShapeError unless I is a multiple of 8.
    """
    if width % 8:
        raise ShapeError(f"the FFN's width must be a multiple of 8, got {width}")
    gates = torch.arange(width).view(-1, 1, 8)
    return torch.cat((gates, gates + width), dim=1).reshape(-1)


def runs_of(order: torch.Tensor) -> torch.Tensor:
    """Return the original first row of each run of eight packed rows, [N / 8] int32, from an order [N].

    Raises ShapeError for an order that is not made of runs of eight consecutive rows.
    """
    if order.dim() != 1 or order.shape[0] % RUN:
        raise ShapeError(f"an order of runs of {RUN} rows has a multiple of {RUN} entries, got {list(order.shape)}")
    runs = order.reshape(-1, RUN)
    if not torch.equal(runs, runs[:, :1] + torch.arange(RUN, device=order.device, dtype=order.dtype)):
        raise ShapeError(f"rows are packed in other than runs of {RUN} consecutive ones")
    return runs[:, 0].to(torch.int32).contiguous()


@cache
def rope_permutation(num_rotated_heads: int, num_plain_heads: int, head_dim: int) -> torch.Tensor:
    """Return the order of rows of a fused q, k, v matrix by which a tile has 8 dimensions of a head and their partners.

    Rotated heads come first (queries, keys), plain ones after. Returns [(R + P) * D] int64. Raises ShapeError unless
    D is a multiple of 16.
    """
    if head_dim % TILE_ROWS:
        raise ShapeError(f"the head size must be a multiple of {TILE_ROWS}, got {head_dim}")
    half = head_dim // 2
    low = torch.arange(half).view(-1, 1, 8)
    head = torch.cat((low, low + half), dim=1).reshape(-1)
    starts = torch.arange(num_rotated_heads)[:, None] * head_dim
    plain = torch.arange(num_rotated_heads * head_dim, (num_rotated_heads + num_plain_heads) * head_dim)
    return torch.cat(((starts + head).reshape(-1), plain))


def gather_rows(packed: PackedMatrix, indices: torch.Tensor) -> torch.Tensor:
    """Gather rows [n, K] of a packed matrix without an order; indices [n] int64 below N."""
    height, width, _ = packed.tiles.shape
    tiles = packed.tiles.view(height, width, 2, 2, 8, 4, 8)
    rows = tiles[indices // TILE_ROWS, :, indices % TILE_ROWS // 8, :, indices % 8]
    return rows.reshape(indices.shape[0], width * TILE_COLUMNS)[:, : packed.columns]
