"""FP8: e4m3 numbers, one byte each, with a float32 scale for a row or for every 128 columns of it.

A scale of a whole tensor, or of a block of 128 rows, stands once for each row here: so matrices that are fused keep
their own. Source: OCP 8-bit Floating Point Specification 1.0, E4M3.
"""

from types import MappingProxyType

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats.base import MatrixFormat, Parts, Specs, check_part, tiles_of

__all__ = ["FP8", "FP8_BLOCK", "FP8_FORMATS", "decode_e4m3", "has_nan", "quantise_fp8"]

LARGEST = 448.0
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

    def packed_bytes(self, rows: int, columns: int, *, wide: bool = True) -> int:
        """See `MatrixFormat.packed_bytes`: scales of rows stand once, others for every 64 columns."""
        height, width = tiles_of(rows, columns)
        if self.columns is None:
            return height * (width * 1024 + 64)
        return height * width * (1024 + (64 if wide else 32))

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


FP8 = _Fp8("fp8", None)
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
