"""MXFP4: blocks of 32 E2M1 codes, two to a byte with the low nibble first, and one E8M0 scale.

Source: OCP Microscaling Formats v1.0; the tensors of gpt-oss checkpoints.
"""

import torch

__all__ = ["CODES", "dequantise", "quantise"]

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32
BIAS = 127


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Exact values: blocks [..., n / 32, 16] uint8, scales [..., n / 32] uint8 -> [..., n]."""
    table = torch.tensor(CODES, dtype=torch.float32, device=blocks.device)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = torch.ldexp(table[pairs.long()], scales.int()[..., None] - BIAS)
    return values.flatten(-2).to(dtype)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nearest codes with the smallest power-of-two scale that holds a block: [..., n] -> blocks, scales.

    n must be a multiple of 32. Ties go to the smaller magnitude.
    """
    groups = weight.float().unflatten(-1, (-1, BLOCK))
    peak = groups.abs().amax(-1)
    exponent = torch.ceil(torch.log2(torch.where(peak > 0, peak, 1.0) / max(CODES))).clamp(-BIAS, BIAS)
    scaled = torch.ldexp(groups, -exponent.int()[..., None])
    magnitudes = torch.tensor(CODES[:8], device=weight.device)
    nearest = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1)
    codes = (nearest | ((scaled < 0).long() << 3)).to(torch.uint8)
    low, high = codes[..., 0::2], codes[..., 1::2]
    return low | (high << 4), (exponent + BIAS).to(torch.uint8)
