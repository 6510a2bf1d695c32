"""The interfaces of weight formats: how a matrix's numbers are held, packed for kernels, decoded in them, and counted.

A canonical matrix [N, K] is one or more tensors, the format's parts; a stack of matrices has more dimensions before N.
`MatrixFormat` is what every format has. `DenseFormat` adds what GEMMs and experts' kernels need of a quantised format,
`WeightFormat` what experts' kernels need of a format with tiles of its own. Packed, a matrix is cut into tiles of 16
rows by 64 columns as `gemm.packing` has them. How files store it stands in `lowlat.checkpoint.formats`.

Methods that give device functions import Numba when they are called, so that packing needs none.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS
from lowlat.kernels.gemm.tiles import TileFormat

__all__ = [
    "CodedFormat", "DenseFormat", "Fragment", "MatrixFormat", "Parts", "Specs", "WeightFormat", "check_part",
    "tiles_of",
]  # fmt: skip

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


@dataclass(frozen=True)
class Fragment:
    """Device functions that decode a lane's codes to words of bf16 pairs, for one layout of tiles.

    A lane has, of half a step of a tile, eight words: four of row g, then four of row g + 8, g a quarter of the lane.
    Mainloops differ in when they load codes and what else they hold, so each has its own entry.

    load_half   decode's GEMMs, tiles without groups of columns: (codes, half, words) -> eight words; addresses in
                shared memory of the lane's codes and of its words after the codes; None: the tiles have groups
    load_group  the same of tiles with groups: (codes, half, top, low) -> eight words; what `take_zeros` gives of either
                row; None: the tiles have none
    take_zeros  (words) -> top, low: what to take off the codes of a group's two rows, from the address of its words
    halves      prefill's GEMMs: from functions that load four words and one, at an address and an offset, to three
                functions: (step, lane) -> held, (held) -> eight words of the first half, and of the second half
    load_codes  experts' kernels: (codes) -> the lane's words of codes of a step, always eight
    expand      the same: from a half, 0 or 1, a function (words of codes, top, low) -> four words of row g, four of
                row g + 8
    beside      the same: from a group, 0 or 1, a function (scales) -> top, low for `expand`
    load_step   prefill's GEMMs, where all sixteen words of a step load at once: (step, lane) -> words; None: by halves
    """

    halves: Callable[[Any, Any], tuple[Any, Any, Any]]
    load_half: Any = None
    load_group: Any = None
    take_zeros: Any = None
    load_codes: Any = None
    expand: Callable[[int], Any] | None = None
    beside: Callable[[int], Any] | None = None
    load_step: Any = None


class CodedFormat(MatrixFormat):
    """A format whose codes the GEMMs decode.

    codes  the name of the codes, as `TileFormat.name` has it: formats with the same codes decode alike
    share  the part of a number that `Fragment.load_group` gives, a power of two; decode multiplies sums by its inverse
    """

    codes: ClassVar[str]
    share: ClassVar[float] = 1.0

    @abstractmethod
    def fragment(self, tiles: TileFormat) -> Fragment:
        """How kernels decode steps that are held so."""


class DenseFormat(CodedFormat):
    """A quantised format that GEMMs and experts' kernels read in tiles.

    panel   numbers that are packed at once
    scales  the part that has float32 scales, which files may store in bfloat16; None: scales are codes
    narrow  bfloat16 is how most files store these scales, and how rounding makes them
    """

    panel: ClassVar[int] = 4 << 20
    scales: ClassVar[str | None] = None

    @property
    def narrow(self) -> bool:
        """Whether group scales are usually bfloat16 numbers."""
        return False

    @abstractmethod
    def tiles(self, *, wide: bool) -> TileFormat:
        """The layout of a step; wide: scales of groups are float32, else bfloat16."""

    def layout(self, parts: Parts) -> TileFormat:
        """The layout of a matrix's steps: scales take 16 bits where bf16 holds all of them; on meta by dtype."""
        narrow, wide = self.tiles(wide=False), self.tiles(wide=True)
        if self.scales is None or narrow == wide:
            return narrow
        scales = parts[self.scales]
        is_exact = not scales.is_meta and torch.equal(scales.bfloat16().float(), scales)
        return narrow if scales.dtype == torch.bfloat16 or is_exact else wide

    def packed_bytes(self, rows: int, columns: int, *, wide: bool = True) -> int:
        """Bytes of a packed matrix [N, K]: steps, and the scales of rows after them."""
        (height, width), tiles = tiles_of(rows, columns), self.tiles(wide=wide)
        return height * (width * tiles.step_bytes + 4 * TILE_ROWS * tiles.row_scales)

    @abstractmethod
    def pack_panel(self, parts: Parts, tiles: TileFormat, steps: torch.Tensor, row_scales: torch.Tensor) -> None:
        """Pack some rows of a matrix, whose parts these are.

        steps       [ceil(n / 16), ceil(K / 64), tiles.step_bytes]  uint8    out
        row_scales  [n]                                             float32  out, where tiles have such
        """

    @abstractmethod
    def unpack_panel(self, steps: torch.Tensor, tiles: TileFormat) -> torch.Tensor:
        """The numbers [16 height, 64 width] bf16 of packed steps, without the scales of rows, rounded once."""

    def quantise(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a matrix [N, K] in any float dtype, rounded to nearest.

        Raises ConfigError for numbers that are not finite, and for a format that weights are not rounded to.
        """
        raise ConfigError(f"weights are not rounded to {self.name.upper()} here")


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
