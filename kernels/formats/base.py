"""The interfaces of weight formats: how a matrix's numbers are held, packed for kernels, decoded in them, and counted.

A canonical matrix [N, K] is one or more tensors, the format's parts; a stack of matrices has them with more dimensions
in front. `MatrixFormat` is what every format has, `WeightFormat` what those of experts' kernels have besides. Packed,
it is cut into tiles of 16 rows by 64 columns as `gemm.packing` has them, each with its words and perhaps its scales.
Files are none of its business: that is `lowlat.checkpoint.formats`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS

__all__ = ["MatrixFormat", "Parts", "Specs", "WeightFormat", "check_part", "tiles_of"]

Parts = Mapping[str, torch.Tensor]
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]


def check_part(name: str, part: torch.Tensor, *shape: int) -> None:
    """Raise ShapeError unless a part has this shape."""
    if part.shape != shape:
        raise ShapeError(f"{name} must have shape {list(shape)}, got {list(part.shape)}")


def tiles_of(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of tiles that a matrix [N, K] takes."""
    return -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)


class MatrixFormat(ABC):
    """The numbers of one format; there is one object of each.

    name         in the tables of formats, in configs and in kernels' names
    parts        the tensors of a canonical matrix, last in their weights' names, and how many of the matrix's numbers
                 an entry of each holds
    block        numbers of a row that are held together: K is a multiple
    """

    name: str
    parts: Mapping[str, int]
    block: int = 1

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix [N, K] without padding: the least that a kernel reads, as floors count it."""
        specs = self.specs(rows, columns, torch.bfloat16).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in specs)

    def packed_bytes(self, rows: int, columns: int, *, wide: bool = True) -> int:
        """Bytes of a matrix [N, K] as kernels hold it; without kernels as it is.

        wide  scales of groups are float32; False: bfloat16 holds all of them, and kernels take it
        """
        return self.num_bytes(rows, columns)

    def check_columns(self, columns: int) -> None:
        """Raise ShapeError unless rows of K numbers can be held."""
        if columns % self.block:
            raise ShapeError(f"{self.name.upper()} needs rows of a multiple of {self.block} numbers, got {columns}")

    def check_parts(self, parts: Mapping[str, object]) -> None:
        """Raise ShapeError unless these are all parts of a matrix, and nothing else."""
        if set(parts) != set(self.parts):
            raise ShapeError(
                f"a matrix in {self.name} is packed from {' and '.join(self.parts)} alone, not from {', '.join(parts)}"
            )

    def holds(self, parts: Parts) -> bool:
        """Whether these tensors, by part, may be a matrix in this format, by names and shapes."""
        if set(parts) != set(self.parts):
            return False
        *outer, rows, columns = self.shape(parts)
        if columns % self.block:
            return False
        specs = self.specs(rows, columns, torch.bfloat16)
        return all(tuple(parts[part].shape) == (*outer, *shape) for part, (shape, _) in specs.items())

    @abstractmethod
    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """Shape and dtype of every part of a matrix [N, K]; dtype is the compute dtype."""

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int, ...]:
        """The shape [..., N, K] of what the parts hold."""

    @abstractmethod
    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """The numbers [..., N, K] in float32 or bfloat16, rounded once; a part as it is where it holds them plainly."""


class WeightFormat(MatrixFormat):
    """A format that experts' kernels decode in registers.

    word_dtype   of the packed words
    tile_words   packed words of a tile
    scale_bytes  packed scales of a tile; 0 for a format without
    row_scales   rows have float32 scales, which epilogues apply
    """

    word_dtype: torch.dtype
    tile_words: int
    scale_bytes: int = 0
    row_scales: bool = False

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile's words."""
        return self.tile_words * self.word_dtype.itemsize

    @property
    def has_scales(self) -> bool:
        """Whether tiles have scales next to their words."""
        return self.scale_bytes > 0

    def packed_bytes(self, rows: int, columns: int, *, wide: bool = True) -> int:
        """Bytes of a packed matrix [N, K], words and scales."""
        height, width = tiles_of(rows, columns)
        return height * width * (self.tile_bytes + self.scale_bytes)

    @abstractmethod
    def pack_into(
        self, parts: Parts, shape: tuple[int, int], order: torch.Tensor | None, words: torch.Tensor,
        scales: torch.Tensor | None, row_scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Pack one matrix [N, K], its rows taken in `order` first.

        words   [ceil(N / 16), ceil(K / 64), tile_words]   word_dtype  out
        scales  [ceil(N / 16), ceil(K / 64), scale_bytes]  uint8       out; None for a format without
        row_scales  [ceil(N / 16) * 16]                    float32     out; None for a format without
        Raises ShapeError for parts of another shape, ConfigError for values that kernels do not decode exactly.
        """

    @abstractmethod
    def unpack(
        self, shape: tuple[int, int], words: torch.Tensor, scales: torch.Tensor | None,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The numbers [N, K] bf16 of a packed matrix, rows in the packed order; rounded where scales want it."""

    @abstractmethod
    def decode_fragment(self) -> tuple[Any, Any]:
        """Device functions of a decode GEMM's warp.

        The first takes the eight words of a lane's inputs of a step, and returns them as the second multiplies them.
        The second adds a step of a tile to the warp's four sums: it takes the sums, the addresses of the lane's words
        and scales in shared memory, and those inputs.
        """

    @abstractmethod
    def prefill_fragment(self, multiply: Any) -> Any:
        """A device function of a grouped GEMM's warp: add a step of two tiles to its sums.

        multiply  takes the sums, four words of bf16 pairs of each of four rows, the address of the lane's inputs in
                  half of the step's columns, and how many pairs are live
        The function takes the sums, the addresses of the lane's words, scales, inputs and inputs of the other half,
        and how many pairs are live.
        """

    @abstractmethod
    def prefill_halves(self) -> tuple[Any, Any, Any]:
        """Device functions of a warpgroup's lane: what it holds of a step of a tile, and either half of its words.

        The first takes the shared address of the step, whose scales lie after its words, and the lane; the others take
        what it returns. A half's eight words of bf16 pairs are those that packed bf16 has: of row g its eight columns,
        then of row g + 8, g a quarter of the lane.
        """
