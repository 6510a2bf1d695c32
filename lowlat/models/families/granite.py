"""Granite 3 and 4.1 (granite), and Granite 4.0 without Mamba layers (granitemoehybrid): config.json to geometry.

Embeddings, scores, sums and logits have multipliers. The divisor of logits divides the final norm's weight, which is
kept in float32 if the quotients may not be bfloat16 numbers. So a divisor costs a step nothing, and each number that
the LM head reads is rounded once, as without a divisor. Source: transformers models/granite, models/granitemoehybrid.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Conversion, Piece, Recipe
from lowlat.checkpoint.tensors import FLOAT_NAMES
from lowlat.models.families.dense import MAX_WIDTH, decoder_recipes, parse_decoder, with_stored_matrices
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.layer_spec import DenseSpec, RopeConfig
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["hybrid_recipes", "parse", "parse_hybrid", "recipes"]

FUSED = {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}  # gates first
ABSENT_KEYS = frozenset(  # of experts and Mamba layers, which these models do not have, and of training
    {
        *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand"),
        *("mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok"),
        "init_method",
    }
)


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Granite 3 or 4.1. Raises ConfigError for what lowlat does not implement."""
    mlp_bias = fields.boolean("mlp_bias", False)
    return _parse(fields, directory, dtype, family="granite", architecture="GraniteForCausalLM", mlp_bias=mlp_bias)


def parse_hybrid(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Granite 4.0 with only attention and dense FFNs (Micro, 1B, 350M).

    Raises ConfigError for Mamba layers, experts, and other features that lowlat does not implement.
    """
    count = fields.integer("num_hidden_layers", 1, 1 << 12)
    key = "layers_block_type" if "layers_block_type" in fields.values else "layer_types"
    kinds = fields.optional_strings(key, max_count=1 << 12) or ("mamba",)
    if others := sorted(set(kinds) - {"attention", "full_attention"}):
        raise fields.error(key, f"attention in every layer: Granite 4.0's layers of {others[0]} are not implemented,")
    if len(kinds) != count:
        raise fields.error(key, f"a list of {count} names, one a layer,")
    if fields.integer("num_local_experts", 0, 1 << 12, default=8):
        raise fields.error("num_local_experts", "0: Granite 4.0's experts are not implemented,")
    fields.refuse_unless("normalization_function", ("rmsnorm",), "RMS norms")
    inner = fields.integer("shared_intermediate_size", 1, MAX_WIDTH, default=1024)
    turns = fields.optional_string("position_embedding_type") or "nope"
    if turns not in ("rope", "nope"):
        raise fields.error("position_embedding_type", "'rope' or 'nope'")
    config = _parse(
        fields,
        directory,
        dtype,
        family="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        harmless=ABSENT_KEYS,
    )
    mixer = config.attention
    if turns == "nope":
        mixer = replace(mixer, rope=RopeConfig(mixer.rope.theta, "proportional", share=0.0))
    ffn = DenseSpec(inner_size=inner)
    return replace(config, layers=tuple(replace(layer, mixer=mixer, ffn=ffn) for layer in config.layers))


def _parse(fields: Fields, directory: Path, dtype: ComputeDtype, **own: Any) -> ModelConfig:
    """Read a decoder with Granite's multipliers; own: further arguments of `parse_decoder`."""
    biased, divisor = fields.boolean("attention_bias", False), fields.number("logits_scaling", 1e-6, 1e6, default=1.0)
    embedding = fields.number("embedding_multiplier", 1e-6, 1e6, default=1.0)
    sums = fields.number("residual_multiplier", 1e-6, 1e6, default=1.0)
    scale = fields.number("attention_multiplier", 1e-9, 1e3, default=1.0)
    config = parse_decoder(fields, directory, dtype, qkv_bias=biased, output_bias=biased, scale=scale, **own)
    layers = tuple(replace(layer, sum_scale=None if sums == 1 else sums) for layer in config.layers)
    embedding_scale = None if embedding == 1 else embedding
    return replace(config, layers=layers, embedding_scale=embedding_scale, logit_divisor=divisor)


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a Granite 3 or 4.1."""
    hidden, divisor = config.hidden_size, config.logit_divisor
    is_exact = math.frexp(divisor)[0] == 0.5  # a power of two
    dtype = TORCH_DTYPES[config.dtype] if is_exact else torch.float32
    divided = Conversion((hidden,), tuple(FLOAT_NAMES), lambda label, stored: stored.float() / divisor)
    norm = Recipe("norm.weight", (Piece("model.norm.weight", (hidden,), divided),), dtype)
    made = [norm if recipe.weight == norm.weight else recipe for recipe in decoder_recipes(config)]
    return made + [
        _constant(config, layer, spec.sum_scale) for layer, spec in enumerate(config.layers) if spec.sum_scale
    ]


def hybrid_recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a Granite 4.0; its FFN has the names of a shared expert."""
    return with_stored_matrices(recipes(config), FUSED)


def _constant(config: ModelConfig, layer: int, value: float | None) -> Recipe:
    """The recipe of a weight that is a number of the config; it reads a tensor of the layer and ignores its values."""
    made = Conversion((1,), tuple(FLOAT_NAMES), lambda label, stored: torch.tensor([value]))
    piece = Piece(f"model.layers.{layer}.input_layernorm.weight", (config.hidden_size,), made)
    return Recipe(f"layers.{layer}.sum_scale", (piece,), torch.float32)
