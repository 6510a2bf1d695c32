"""This module quantises keys and values to 8-bit codes: e4m3, with a scale of keys and one of values for each KV head.

A cache of codes is uint8. Its scales are float32 [2, G], of keys and of values; they are bfloat16 numbers from SMALLEST
to LARGEST. A number is quantised once, when it is written: it is divided by its scale in float32, clamped to +-448, and
rounded to nearest, ties to even; NaN is code 127. A code is read as its product with the scale, rounded once to the
compute dtype. A step's attention on a GPU multiplies sums by the scale instead, and rounds less.
"""

import torch

from lowlat.kernels.formats.fp8 import LARGEST as LARGEST_CODE
from lowlat.kernels.formats.fp8 import decode_e4m3

__all__ = ["LARGEST", "SMALLEST", "dequantised_kv", "quantised_kv"]

SMALLEST, LARGEST = 2.0**-64, 128.0  # scales: 2**120 times a scale must be a bfloat16
NAN_CODE = 127


def quantised_kv(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Quantise keys or values: rows [..., G, D] bf16 or float32 by their scales [G] to codes uint8 [..., G, D]."""
    ratios = (rows.float() / scales[:, None]).clamp_(-LARGEST_CODE, LARGEST_CODE)
    codes = ratios.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(ratios.isnan(), NAN_CODE, codes)


def dequantised_kv(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert codes [G, n, D] uint8 to numbers of a compute dtype, by scales [G] of keys or of values."""
    return decode_e4m3(codes).mul_(scales[:, None, None]).to(dtype)
