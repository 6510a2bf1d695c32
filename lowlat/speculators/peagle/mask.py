"""This module computes the hidden state of P-EAGLE's rows without a feature: `mask_hidden` through norms and fc.

It is the same for every row, so it is computed once, at load.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F

from lowlat.kernels.formats import dequantised
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.tensors import MASK_HIDDEN, open_draft_model

__all__ = ["mask_state"]


def mask_state(directory: Path, config: Eagle3Config, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the state [H] in the compute dtype from the stored tensor [1, 1, F * Ht] and the loaded weights.

    It has the same rounding points as the features of other rows. A draft model without auxiliary features has no fc,
    and uses the tensor itself. Raises ConfigError for a file that cannot be read.
    """
    tensors = open_draft_model(directory)
    ((_, stored),) = tensors.checkpoint.read([tensors.stored[MASK_HIDDEN]])
    dtype = weights["draft_model.norm.weight"].dtype
    hidden = stored.reshape(-1).to(dtype)
    if config.final_hidden:
        return hidden
    if config.norm_before_fc:
        hidden = _norm(hidden, weights["draft_model.input_norm.weight"], config.rms_norm_eps)
    if config.fc_norm:
        parts = hidden.chunk(len(config.capture_boundaries))
        names = [f"draft_model.fc_norm.{number}.weight" for number in range(len(parts))]
        normed = [_norm(part, weights[name], config.rms_norm_eps) for part, name in zip(parts, names, strict=True)]
        hidden = torch.cat(normed)
    return F.linear(hidden.float(), dequantised("draft_model.fc.weight", weights)).to(dtype)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape, weight.float(), eps).to(x.dtype)
