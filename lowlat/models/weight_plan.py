"""Names, shapes and dtypes of the canonical weights that a target's geometry implies, without reading anything."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lowlat.models.geometry import ModelConfig
from lowlat.models.target import target_recipes

__all__ = ["weight_plan"]


def weight_plan(config: ModelConfig) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical name -> (shape, dtype) of every weight that has storage of its own.

    A tied lm_head.weight is therefore absent: it is embed.weight.
    """
    return MappingProxyType({recipe.weight: (recipe.shape, recipe.dtype) for recipe in target_recipes(config)})
