"""Names, shapes and dtypes of the canonical weights that a target's geometry implies, without reading anything."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lowlat.checkpoint.quantising import Quantiser
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import target_recipes

__all__ = ["WeightPlan", "rounded_plan", "weight_plan"]

WeightPlan = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def weight_plan(config: ModelConfig) -> WeightPlan:
    """Canonical name -> (shape, dtype) of every weight that has storage of its own.

    A tied lm_head.weight is therefore absent: it is embed.weight.
    """
    plan = {recipe.weight: (recipe.shape, recipe.dtype) for recipe in target_recipes(config)}
    return MappingProxyType(rounded_plan(plan, config.quantiser, tied=config.tie_embeddings))


def rounded_plan(plan: WeightPlan, quantiser: Quantiser | None, *, tied: bool = False) -> WeightPlan:
    """A plan with linear layers that are rounded at load listed by part; tied: the LM head was the embedding.

    Group scales of layers that files have quantised are assumed to be as most files store them: float32 next to zero
    points, else bfloat16.
    """
    if quantiser is None:
        return {name: (shape, _usual_dtype(name, shape, dtype, plan)) for name, (shape, dtype) in plan.items()}
    made: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, (shape, dtype) in plan.items():
        made.update(quantiser.specs(name, shape) if quantiser.takes(name) else {name: (shape, dtype)})
    if tied and quantiser.lm_head:
        made.update(quantiser.specs("lm_head.weight", plan["embed.weight"][0]))
    return made


def _usual_dtype(name: str, shape: tuple[int, ...], dtype: torch.dtype, plan: WeightPlan) -> torch.dtype:
    owner, _, part = name.rpartition(".")
    is_narrow = part == "int4_scales" and f"{owner}.int4_zeros" not in plan
    return torch.bfloat16 if is_narrow or (part == "fp8_scales" and shape[1] > 1) else dtype
