"""This module computes RoPE tables with the same operations as transformers, so that the bits agree.

Source: transformers modeling_rope_utils; RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071; Llama 3.1 (frequencies by
wavelength).
"""

import math
from functools import cached_property

import torch

from lowlat.errors import ConfigError
from lowlat.models.layer_spec import RopeConfig

__all__ = ["RopeTables", "inverse_frequencies", "rope_tables"]


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """Scale Llama 3.1's frequencies: those of long wavelengths by the factor, short ones not, others blended."""
    context, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / base
    scaled = torch.where(wavelengths > context / low, base / rope.factor, base)
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Compute YaRN's frequencies: fast dimensions keep theirs, slow ones are interpolated, with a ramp between."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as in the source: a ramp of zero width would divide by zero
    powers = rope.theta ** (torch.arange(0, head_dim, 2).to(torch.float) / head_dim)
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    interpolated: torch.Tensor = 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept
    return interpolated


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """The angle per position of each pair of a head's dimensions, [D / 2] float32, without attention_factor.

    head_dim is D, even. Raises ConfigError for an odd or non-positive head_dim.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim must be even and positive, got {head_dim}")
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float) / head_dim
    base: torch.Tensor = 1.0 / (rope.theta**exponents)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**exponents)
    if rope.kind == "proportional":
        base[int(rope.share * head_dim // 2) :] = 0
        base /= rope.factor
    if rope.kind == "linear":
        base /= rope.factor
    elif rope.kind == "llama3":
        base = _llama3(rope, base)
    return base


def _check_positions(num_positions: int) -> None:
    if num_positions < 1:
        raise ConfigError(f"num_positions must be positive, got {num_positions}")


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions 0 to C - 1, each [C, D / 2] float32, times attention_factor.

    num_positions is C. Time and memory: C * D / 2 elements each. Raises ConfigError for an odd head_dim or
    num_positions below 1.
    """
    _check_positions(num_positions)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope, head_dim)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


class RopeTables:
    """Computes the tables of `rope_tables` at the first read; `shape` is known before.

    The constructor raises ConfigError as `rope_tables` does.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, num_positions: int) -> None:
        _check_positions(num_positions)
        self.shape = num_positions, len(inverse_frequencies(rope, head_dim))
        self._arguments = rope, head_dim, num_positions

    @cached_property
    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        return rope_tables(*self._arguments)

    def cos(self) -> torch.Tensor:
        """The cosines, [C, D / 2] float32."""
        return self._tables[0]

    def sin(self) -> torch.Tensor:
        """The sines, [C, D / 2] float32."""
        return self._tables[1]
