"""MXFP4: blocks of 32 four-bit floats (E2M1) that share one power of two (E8M0).

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.1 to 5.3; the packing is that of gpt-oss
checkpoints: 16 bytes a block, the earlier value in the low nibble.
"""

from itertools import pairwise

import torch

from lowlat.errors import ConfigError, ShapeError
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["BLOCK", "dequantise", "quantise"]

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGN = 8
SCALE_BIAS = 127
NAN_SCALE = 255
# Exact powers of two by scale; functions such as exp2 may miss them by a bit.
POWERS = (*(2.0 ** (scale - SCALE_BIAS) for scale in range(NAN_SCALE)), float("nan"))
# Halfway between neighbours; a tie goes to the magnitude whose code is even.
MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(MAGNITUDES))


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Expand to plain numbers, code * 2 ** (scale - 127), exactly.

    blocks  [..., n / 32, 16]  uint8  two codes a byte, the earlier in the low nibble
    scales  [..., n / 32]      uint8  255 means NaN; what is past the dtype's range becomes infinite
    Returns [..., n] in `dtype`, float32 or bfloat16 (both hold every code at every scale up to 252).
    Raises ShapeError for shapes that do not fit each other.
    """
    check_shape("blocks", blocks, *scales.shape, BLOCK // 2)
    device = blocks.device
    codes = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32)
    pairs = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), -1).to(device, dtype)
    powers = torch.tensor(POWERS, dtype=torch.float32).to(device, dtype)
    values = pairs.index_select(0, blocks.reshape(-1).int()).reshape(*scales.shape, BLOCK)
    values *= powers.index_select(0, scales.reshape(-1).int()).reshape(*scales.shape, 1)
    return values.reshape(*scales.shape[:-1], scales.shape[-1] * BLOCK)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to MXFP4: to the nearest code, ties to the even code.

    weight  [..., n]  any float dtype, n a multiple of 32
    Returns blocks [..., n / 32, 16] uint8 and scales [..., n / 32] uint8. A block's scale puts its largest
    magnitude, rounded, at code 4 or 6; so what `dequantise` gave is kept exactly.
    Raises ShapeError for another n, ConfigError for numbers that are not finite.
    """
    if weight.ndim == 0 or weight.shape[-1] % BLOCK:
        raise ShapeError(f"MXFP4 needs rows of a multiple of {BLOCK} numbers, got shape {list(weight.shape)}")
    values = weight.float().reshape(*weight.shape[:-1], weight.shape[-1] // BLOCK, BLOCK)
    if not bool(values.isfinite().all()):
        raise ConfigError("MXFP4 cannot hold numbers that are not finite")
    largest = values.abs().amax(-1).double()
    fraction, exponent = torch.frexp(largest)  # fraction in [1/2, 1): four times a power of two is 1/2 here
    exponent = exponent - 3 + (fraction > 0.875)  # above 7 the nearest of 4, 6, 8, 12 is 8
    scales = (torch.where(largest > 0, exponent, 0) + SCALE_BIAS).clamp(0, NAN_SCALE - 1)
    powers = torch.tensor(POWERS, dtype=torch.float64, device=weight.device)[scales.long()]
    codes = _nearest_codes(values.double() / powers[..., None]).reshape(*values.shape[:-1], BLOCK // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4), scales.to(torch.uint8)


def _nearest_codes(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 code of each number, uint8; magnitudes past 6 become 6."""
    magnitude = scaled.abs()
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code, midpoint in enumerate(MIDPOINTS):
        above = magnitude > midpoint if code % 2 == 0 else magnitude >= midpoint
        codes += above.to(torch.uint8)
    return codes | (torch.signbit(scaled).to(torch.uint8) * SIGN)
