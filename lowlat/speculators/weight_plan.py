"""Names, shapes and dtypes of the canonical weights that a geometry implies, without reading anything."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.models.target import target_recipes
from lowlat.speculators.eagle3.weights import DRAFT_MAP, draft_recipes

__all__ = ["weight_plan"]


def weight_plan(
    config: ModelConfig | DraftConfig, *, dtype: str = "bfloat16"
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical name -> (shape, dtype) of every weight that has storage of its own.

    A tied lm_head.weight is therefore absent: it is embed.weight. dtype is the compute dtype of a head, which its
    config does not hold; a target's config names its own. Raises ConfigError for another dtype.
    """
    if isinstance(config, ModelConfig):
        return MappingProxyType({recipe.weight: (recipe.shape, recipe.dtype) for recipe in target_recipes(config)})
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be 'bfloat16' or 'float32', got {dtype!r}")
    plan = {recipe.weight: (recipe.shape, recipe.dtype) for recipe in draft_recipes(config, TORCH_DTYPES[dtype])}
    plan[DRAFT_MAP] = ((config.draft_vocab_size,), torch.int32)
    return MappingProxyType(plan)
