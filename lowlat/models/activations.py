"""This module chooses the matrices that prefill multiplies by FP8 codes of its rows.

In FP8 checkpoints with dynamic activations, each row of a linear layer's input is rounded to e4m3 by its own scale.
Here only prefill does so, if the options ask for it. Steps multiply unrounded rows, with drafts and without, so
speculation changes no token.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from lowlat.errors import ConfigError
from lowlat.kernels.formats import FP8, matrix_format, matrix_name, matrix_parts
from lowlat.models.geometry import ModelConfig
from lowlat.models.weight_plan import WeightPlan, weight_plan

__all__ = ["codable_matrices", "code_activations"]

LAYERS = "layers."


def code_activations(config: ModelConfig, label: str) -> ModelConfig:
    """Set a geometry to FP8-coded prompt rows for every matrix of its layers that is in FP8 with a scale a row.

    label  the model's name in errors
    LM head, experts, and matrices in other formats are multiplied by unrounded rows. Raises ConfigError for a model
    without such a matrix.
    """
    coded = codable_matrices(config)
    if not coded:
        formats = ", ".join(sorted(set(_formats(weight_plan(config)).values()))) or config.dtype
        raise ConfigError(
            f"{label}: activations 'fp8' is for layers in FP8 with a scale for each row or for the whole tensor, "
            f"and its layers are in {formats}; leave activations out"
        )
    return replace(config, coded_rows=coded)


def codable_matrices(config: ModelConfig) -> tuple[str, ...]:
    """The names of the matrices of a model's layers that can be multiplied by codes of rows, in order."""
    plan = weight_plan(config)
    held = _formats(plan)
    return tuple(sorted(name for name in held if held[name] == FP8.name and _is_layer(name, plan)))


def _formats(plan: WeightPlan) -> Mapping[str, str]:
    """The format of each quantised matrix, by name."""
    names = dict.fromkeys(name for name in map(matrix_name, plan) if name is not None)
    return {name: matrix_format(_held(name, plan)).name for name in names}


def _held(name: str, plan: WeightPlan) -> Mapping[str, torch.Tensor]:
    parts = matrix_parts(name, plan)
    return {part: torch.empty(plan[each][0], device="meta") for part, each in parts.items()}


def _is_layer(name: str, plan: WeightPlan) -> bool:
    """Whether a matrix belongs to a layer, and not to its experts."""
    return name.startswith(LAYERS) and len(FP8.shape(_held(name, plan))) == 2
