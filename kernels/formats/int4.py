"""INT4: whole numbers from 0 to 15, two a byte, less a zero point, times a float32 scale for each group of a row.

The earlier number is in the low nibble. Without zero points of its own a group's is 8.
"""

from types import MappingProxyType

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.formats.base import MatrixFormat, Parts, Specs, check_part, tiles_of

__all__ = ["GROUPS", "INT4_FORMATS", "int4_format", "quantise_int4", "unpack_nibbles"]

GROUPS = (32, 64, 128)
MIDDLE = 8
HALF_RANGE = 7.5  # codes from -8 to 7 around the middle


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] as numbers [..., 2 n] uint8, the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


class _Int4(MatrixFormat):
    """Codes `int4` [..., N, K / 2] uint8 and `int4_scales` [..., N, K / group] float32; zero points always 8."""

    parts = MappingProxyType({"int4": 2, "int4_scales": 0})

    def __init__(self, group: int) -> None:
        self.block = group
        self.name = f"int4_{group}"

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`; the same in any compute dtype."""
        self.check_columns(columns)
        groups = (rows, columns // self.block)
        return {"int4": ((rows, columns // 2), torch.uint8), "int4_scales": (groups, torch.float32)}

    def packed_bytes(self, rows: int, columns: int, *, wide: bool = True) -> int:
        """See `MatrixFormat.packed_bytes`."""
        height, width = tiles_of(rows, columns)
        words = (2 if wide else 1) + ("int4_zeros" in self.parts)
        return height * width * (512 + 32 * words * max(1, 64 // self.block))

    def shape(self, parts: Parts) -> tuple[int, ...]:
        """See `MatrixFormat.shape`."""
        *outer, half = parts["int4"].shape
        return (*outer, 2 * half)

    def dequantise(self, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        """See `MatrixFormat.dequantise`; (code - zero) times scale is rounded to float32 first."""
        codes, scales = unpack_nibbles(parts["int4"]).float(), parts["int4_scales"]
        *outer, columns = codes.shape
        check_part("int4_scales", scales, *outer, columns // self.block)
        groups = codes.reshape(*scales.shape, self.block)
        return ((groups - self._zeros(parts)) * scales[..., None]).reshape(codes.shape).to(dtype)

    def _zeros(self, _parts: Parts) -> torch.Tensor:
        return torch.tensor(float(MIDDLE))


class _Int4Zeros(_Int4):
    """The same with `int4_zeros` [..., N, K / group] uint8, the code that means zero in a group."""

    parts = MappingProxyType({"int4": 2, "int4_scales": 0, "int4_zeros": 0})

    def __init__(self, group: int) -> None:
        super().__init__(group)
        self.name = f"int4_{group}_zeros"

    def specs(self, rows: int, columns: int, dtype: torch.dtype) -> Specs:
        """See `MatrixFormat.specs`."""
        return super().specs(rows, columns, dtype) | {"int4_zeros": ((rows, columns // self.block), torch.uint8)}

    def _zeros(self, parts: Parts) -> torch.Tensor:
        check_part("int4_zeros", parts["int4_zeros"], *parts["int4_scales"].shape)
        return parts["int4_zeros"].float()[..., None]


INT4_FORMATS = tuple(kind(group) for group in GROUPS for kind in (_Int4, _Int4Zeros))


def int4_format(group: int, *, has_zeros: bool) -> MatrixFormat:
    """The format of groups of 32, 64 or 128. Raises ShapeError for others."""
    if group not in GROUPS:
        raise ShapeError(f"INT4 has groups of {', '.join(map(str, GROUPS))} numbers, got {group}")
    return INT4_FORMATS[2 * GROUPS.index(group) + has_zeros]


def quantise_int4(weight: torch.Tensor, group: int = 128) -> dict[str, torch.Tensor]:
    """The parts of INT4 without zero points of a matrix [N, K] in any float dtype, rounded to nearest, ties to even.

    A group's largest magnitude is 7.5 scales, which are rounded to bfloat16 first. Raises ShapeError for a K that is
    no multiple of the group, ConfigError for numbers that are not finite.
    """
    int4_format(group, has_zeros=False).check_columns(weight.shape[-1])
    values = weight.float().unflatten(-1, (-1, group))
    largest = values.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise ConfigError("INT4 cannot hold numbers that are not finite")
    scales = torch.where(largest > 0, largest / HALF_RANGE, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    scales = scales.bfloat16().float()
    codes = ((values / scales[..., None]).round_().clamp_(-MIDDLE, MIDDLE - 1) + MIDDLE).to(torch.uint8).flatten(-2)
    return {"int4": codes[..., 0::2] | (codes[..., 1::2] << 4), "int4_scales": scales.bfloat16()}
