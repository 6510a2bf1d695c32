"""This module says which matrices are multiplied by FP8 codes of a prompt's rows.

FP8 checkpoints of dynamic activations mean that a row of a linear layer's input is rounded to e4m3 by a scale of its
own. Prefill does so here where it is asked for. Steps multiply rows as they are, whatever they verify: so speculation
changes no token.
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
    """The geometry of a model whose prompts' rows are coded for every matrix of its layers that FP8 holds by row.

    label  what errors call the model
    An LM head, experts, and matrices in other formats are multiplied by rows as they are. Raises ConfigError for a
    model without such a matrix.
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
    """The matrices of a model's layers that can be multiplied by codes of rows, by name in order."""
    plan = weight_plan(config)
    held = _formats(plan)
    return tuple(sorted(name for name in held if held[name] == FP8.name and _is_layer(name, plan)))


def _formats(plan: WeightPlan) -> Mapping[str, str]:
    """The format of each matrix that is quantised."""
    names = dict.fromkeys(name for name in map(matrix_name, plan) if name is not None)
    return {name: matrix_format(_held(name, plan)).name for name in names}


def _held(name: str, plan: WeightPlan) -> Mapping[str, torch.Tensor]:
    parts = matrix_parts(name, plan)
    return {part: torch.empty(plan[each][0], device="meta") for part, each in parts.items()}


def _is_layer(name: str, plan: WeightPlan) -> bool:
    """Whether a matrix is a layer's, and not one of several experts'."""
    return name.startswith(LAYERS) and len(FP8.shape(_held(name, plan))) == 2
