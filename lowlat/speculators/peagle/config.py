"""This module reads P-EAGLE draft models: EAGLE3's, with a token and a state for rows whose token is unknown."""

import math
from typing import Any

from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.speculators.draft_files.tensors import DraftTensors
from lowlat.speculators.eagle3.config import DraftKind
from lowlat.speculators.eagle3.draft_file import DraftFile
from lowlat.speculators.eagle3.tensors import MASK_HIDDEN
from lowlat.speculators.peagle.geometry import PeagleConfig

__all__ = ["MASK_KEYS", "PEAGLE"]

# The keys of the mask's token, in speculators and in the engines before it.
MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")


def _needs_mask(tensors: DraftTensors) -> None:
    if MASK_HIDDEN not in tensors:
        raise ConfigError(
            f"{tensors.checkpoint.directory}: tensor {MASK_HIDDEN!r} is missing: this is no P-EAGLE draft model; "
            "method must be 'eagle3'"
        )


def _mask(file: DraftFile, tensors: DraftTensors, target: ModelConfig, num_features: int) -> dict[str, Any]:
    """Read the token of rows whose own token is unknown, and check the shape of their state. Raises ConfigError."""
    entry, width = tensors.checkpoint.entries[tensors.stored[MASK_HIDDEN]], num_features * target.hidden_size
    if math.prod(entry.shape) != width or entry.shape[-1:] != (width,):
        raise ConfigError(
            f"{entry.file}: tensor {entry.name!r}: expected shape [1, 1, {width}], found {list(entry.shape)}"
        )
    found = {key: file.top.optional_integer(key, 0, target.vocab_size - 1) for key in MASK_KEYS}
    given = {key: value for key, value in found.items() if value is not None}
    if not given:
        raise ConfigError(f"{file.top.label}: {MASK_KEYS[0]} is missing; a P-EAGLE draft model needs it")
    if len(set(given.values())) > 1:
        named = ", ".join(f"{key} {value}" for key, value in given.items())
        raise ConfigError(f"{file.top.label}: the mask's token is contradictory: {named}")
    return {"mask_token": next(iter(given.values()))}


PEAGLE = DraftKind(PeagleConfig, _needs_mask, _mask)
