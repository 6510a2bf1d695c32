"""FP8: e4m3 numbers, one byte each, with a float32 scale for a row or for every 128 columns of it.

A scale of a whole tensor, or of a block of 128 rows, stands once for each row here: so matrices that are fused keep
their own. Source: OCP 8-bit Floating Point Specification 1.0, E4M3.
"""

from types import MappingProxyType

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats.base import MatrixFormat, Parts, Specs, check_part, tiles_of
from lowlat.kernels.gemm.packing import TILE_COLUMNS, TILE_ROWS, PackedMatrix

__all__ = ["FP8", "FP8_BLOCK", "FP8_FORMATS", "decode_e4m3", "has_nan", "quantise_fp8"]

LARGEST = 448.0
TILE_BYTES = TILE_ROWS * TILE_COLUMNS
# Of each code of a word: bits, and how far they move to the left of where they lie in the lowest byte.
MOVES = (
    ((0x80, 8), (0x7F, 4)),
    ((0x80, 24), (0x7F, 20)),
    ((0x80, 4), (0x70, 8), (0x0F, 0)),
    ((0x80, 20), (0x70, 24), (0x0F, 16)),
)
MAGNITUDE = 127  # also the magnitude that means NaN


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The float32 numbers of e4m3 codes, uint8."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)


def has_nan(codes: torch.Tensor) -> bool:
    """Whether any of the e4m3 codes, uint8, is NaN."""
    return bool(((codes & MAGNITUDE) == MAGNITUDE).any())


class _Fp8(MatrixFormat):
    """Codes `fp8` [..., N, K] uint8 and `fp8_scales` [..., N, G] float32; a number is its code times its scale.

    columns  of a row that share a scale; None: all, and G is 1
    """

    parts = MappingProxyType({"fp8": 1, "fp8_scales": 0})

    def __init__(self, name: str, columns: int | None) -> None:
        self.name = name
        self.columns = columns

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`; the same in any compute dtype."""
        groups = 1 if self.columns is None else -(-columns // self.columns)
        return {"fp8": ((rows, columns), torch.uint8), "fp8_scales": ((rows, groups), torch.float32)}

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """See `MatrixFormat.shape`."""
        return tuple(parts["fp8"].shape)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `MatrixFormat.dequantise`; code times scale is rounded to float32 first."""
        codes, scales = parts["fp8"], parts["fp8_scales"]
        *outer, columns = codes.shape
        check_part("fp8_scales", scales, *outer, self.specs(1, columns, dtype)["fp8_scales"][0][1])
        if self.columns is not None:
            scales = scales.repeat_interleave(self.columns, -1)[..., :columns]
        return decode_e4m3(codes).mul_(scales).to(dtype)


class _Fp8ByRow(_Fp8):
    """The format that decode's GEMMs read: a byte a number in tiles of 16 by 64, the rows' scales behind them."""

    def packed_bytes(self, rows: int, columns: int) -> int:
        """See `MatrixFormat.packed_bytes`."""
        height, width = tiles_of(rows, columns)
        return height * (width * TILE_BYTES + TILE_ROWS * 4)

    def pack(self, parts: Parts, order: torch.Tensor | None = None) -> PackedMatrix:
        """Pack a matrix [N, K], its rows taken in `order` first.

        A lane has 16 bytes of a row, 8 columns of either half of a tile, and 16 of the row 8 below; of a word's four
        codes the first two are in their places, the others where `fp8_fragment` takes them from.
        """
        codes, scales = parts["fp8"], parts["fp8_scales"].reshape(-1)
        rows, columns = codes.shape
        height, width = tiles_of(rows, columns)
        if order is not None:
            codes, scales = codes[order.to(codes.device)], scales[order.to(codes.device)]
        padding = (0, width * TILE_COLUMNS - columns, 0, height * TILE_ROWS - rows)
        # tile, row half, row in its half, k step, column half, quad, word, code -> lanes' bytes behind each other
        lanes = torch.nn.functional.pad(codes, padding).reshape(height, 2, 8, width, 2, 4, 2, 4)
        lanes = lanes.permute(0, 3, 1, 2, 5, 4, 6, 7).contiguous()
        held = torch.empty(height * (width * TILE_BYTES + TILE_ROWS * 4), dtype=torch.uint8, device=codes.device)
        tiles = held[: height * width * TILE_BYTES].view(height, width, TILE_BYTES)
        tiles.copy_(_words(lanes.view(torch.int32)).view(torch.uint8).reshape(tiles.shape))
        behind = held[tiles.numel() :].view(torch.float32)
        behind.fill_(1)
        behind[:rows] = scales
        return PackedMatrix(tiles, rows, columns, order, held)

    def unpack_rows(self, packed: PackedMatrix) -> torch.Tensor:
        """The codes [N, K] in bf16 of a packed matrix, exactly, rows as they are packed and without their scales."""
        height, width, _ = packed.tiles.shape
        lanes = _codes(packed.tiles.view(torch.int32)).view(torch.uint8).reshape(height, width, 2, 8, 4, 2, 8)
        codes = lanes.permute(0, 2, 3, 1, 5, 4, 6).reshape(height * TILE_ROWS, width * TILE_COLUMNS)
        return codes.contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)[: packed.rows, : packed.columns]


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Words of four codes, the first in the lowest byte, with their bits where `fp8_fragment` takes them from."""
    made = torch.zeros_like(codes)
    for byte, moves in enumerate(MOVES):
        for mask, place in moves:
            made |= ((codes >> (8 * byte)) & mask) << place
    return made


def _codes(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `_words`."""
    made = torch.zeros_like(words)
    for byte, moves in enumerate(MOVES):
        for mask, place in moves:
            made |= ((words >> place) & mask) << (8 * byte)
    return made


FP8 = _Fp8ByRow("fp8", None)
FP8_BLOCK = _Fp8("fp8_block", 128)
FP8_FORMATS = (FP8, FP8_BLOCK)


def quantise_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of FP8 by row of a matrix [N, K] in any float dtype: its largest magnitude is 448, ties go to even.

    Raises ConfigError for numbers that are not finite.
    """
    values = weight.float()
    largest = values.abs().amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ConfigError("FP8 cannot hold numbers that are not finite")
    scales = torch.where(largest > 0, largest / LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    codes = (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return {"fp8": codes.view(torch.uint8), "fp8_scales": scales}
