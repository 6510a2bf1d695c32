"""Granite 3 (dense): config.json to geometry. Embeddings, scores, sums and logits have multipliers.

Logits are divided by dividing the final norm's weight: exact, as the divisor is a power of two.
Source: transformers models/granite.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Conversion, Piece, Recipe
from lowlat.checkpoint.tensors import FLOAT_NAMES
from lowlat.models.families.dense import decoder_recipes, parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["parse", "recipes"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Granite 3. Raises ConfigError for what lowlat does not implement."""
    biased, divisor = fields.boolean("attention_bias", False), fields.number("logits_scaling", 1e-6, 1e6, default=1.0)
    if math.frexp(divisor)[0] != 0.5:
        raise fields.error("logits_scaling", "a power of two")
    embedding = fields.number("embedding_multiplier", 1e-6, 1e6, default=1.0)
    sums = fields.number("residual_multiplier", 1e-6, 1e6, default=1.0)
    config = parse_decoder(
        fields,
        directory,
        dtype,
        family="granite",
        architecture="GraniteForCausalLM",
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", False),
        scale=fields.number("attention_multiplier", 1e-9, 1e3, default=1.0),
    )
    layers = tuple(replace(layer, sum_scale=None if sums == 1 else sums) for layer in config.layers)
    scale = None if embedding == 1 else embedding
    return replace(config, layers=layers, embedding_scale=scale, logit_scale=1 / divisor)


def recipes(config: ModelConfig) -> list[Recipe]:
    """How every canonical weight of a Granite 3 is made."""
    hidden, factor = config.hidden_size, config.logit_scale
    divided = Conversion((hidden,), tuple(FLOAT_NAMES), lambda label, stored: stored * factor)
    norm = Recipe("norm.weight", (Piece("model.norm.weight", (hidden,), divided),), TORCH_DTYPES[config.dtype])
    made = [norm if recipe.weight == norm.weight else recipe for recipe in decoder_recipes(config)]
    return made + [
        _constant(config, layer, spec.sum_scale) for layer, spec in enumerate(config.layers) if spec.sum_scale
    ]


def _constant(config: ModelConfig, layer: int, value: float | None) -> Recipe:
    """A number of the config as a weight: any tensor of the layer stands for it."""
    made = Conversion((1,), tuple(FLOAT_NAMES), lambda label, stored: torch.tensor([value]))
    piece = Piece(f"model.layers.{layer}.input_layernorm.weight", (config.hidden_size,), made)
    return Recipe(f"layers.{layer}.sum_scale", (piece,), torch.float32)
