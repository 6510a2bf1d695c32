"""A weight plan lists names, shapes and dtypes of a geometry's canonical weights."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from lowlat.checkpoint.quantising import Quantiser
from lowlat.kernels.formats import DENSE_FORMATS, matrix_format, matrix_name, matrix_parts
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import target_recipes

__all__ = ["WeightPlan", "rounded_plan", "weight_plan"]

WeightPlan = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def weight_plan(config: ModelConfig) -> WeightPlan:
    """Canonical name -> (shape, dtype) of every weight that has storage of its own.

    A tied lm_head.weight is absent, since it is embed.weight.
    """
    plan = {recipe.weight: (recipe.shape, recipe.dtype) for recipe in target_recipes(config)}
    return MappingProxyType(rounded_plan(plan, config.quantiser, tied=config.tie_embeddings))


def rounded_plan(plan: WeightPlan, quantiser: Quantiser | None, *, tied: bool = False) -> WeightPlan:
    """A plan that lists linear layers which are quantised at load by their parts.

    tied  whether the LM head is the embedding in files
    For layers that files store quantised, group scales are assumed to have the format's usual dtype.
    """
    if quantiser is None:
        return {name: (shape, _usual_dtype(name, dtype, plan)) for name, (shape, dtype) in plan.items()}
    made: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, (shape, dtype) in plan.items():
        made.update(quantiser.specs(name, shape) if quantiser.takes(name) else {name: (shape, dtype)})
    if tied and quantiser.lm_head:
        made.update(quantiser.specs("lm_head.weight", plan["embed.weight"][0]))
    return made


def _usual_dtype(name: str, dtype: torch.dtype, plan: WeightPlan) -> torch.dtype:
    matrix = matrix_name(name)
    if matrix is None:
        return dtype
    held = {part: torch.empty(plan[each][0], device="meta") for part, each in matrix_parts(matrix, plan).items()}
    own = DENSE_FORMATS[matrix_format(held).name]
    return torch.bfloat16 if own.narrow and name.endswith(f".{own.scales}") else dtype
