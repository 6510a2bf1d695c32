"""ERNIE 4.5 (dense): config.json to geometry, and rows of queries and keys reordered for RoPE by halves.

Its RoPE rotates neighbours, pairs (2i, 2i + 1) of a head. With even rows before odd ones these are (i, i + D / 2).
Source: transformers models/ernie4_5.
"""

from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Recipe
from lowlat.models.families.dense import decoder_recipes, evens_first, parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig

__all__ = ["parse", "recipes"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of an ERNIE 4.5. Raises ConfigError for features that lowlat does not implement."""
    biased = fields.boolean("use_bias", False)
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="ernie4_5",
        architecture="Ernie4_5ForCausalLM",
        default_head_dim=128,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        tied=True,
        default_theta=500000.0,
    )


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of an ERNIE 4.5."""

    def turned(recipe: Recipe) -> Recipe:
        if not recipe.weight.rpartition(".")[0].endswith(".qkv"):
            return recipe
        query, key, value = recipe.pieces
        size = config.attention.head_dim
        return replace(recipe, pieces=(evens_first(query, size, size), evens_first(key, size, size), value))

    return list(map(turned, decoder_recipes(config)))
