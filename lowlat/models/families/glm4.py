"""GLM-4 of 2025 (glm4: 9B, 32B and Z1, with norms on both sides of a layer) and of 2024 (glm): config.json to geometry.

RoPE rotates the first half of a head, in pairs of neighbours: see `dense.evens_first`. Files store gate and up in one
matrix. Source: transformers models/glm4, models/glm.
"""

from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Piece, Recipe
from lowlat.models.families.dense import decoder_recipes, evens_first, parse_decoder, with_stored_matrices
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["parse", "recipes"]

ARCHITECTURES = {"glm": "GlmForCausalLM", "glm4": "Glm4ForCausalLM"}
FUSED = {"gate_up": "mlp.gate_up_proj"}
NORMS = {"post_attn_norm": "post_self_attn_layernorm", "post_ffn_norm": "post_mlp_layernorm"}


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a GLM-4. Raises ConfigError for features that lowlat does not implement."""
    family, biased = str(fields.values["model_type"]), fields.boolean("attention_bias", True)
    config = parse_decoder(
        fields.with_defaults({"rms_norm_eps": 1.5625e-7}),
        directory,
        dtype,
        family=family,
        architecture=ARCHITECTURES[family],
        default_head_dim=128,
        qkv_bias=biased,
        partial=0.5,
    )
    return replace(config, layers=tuple(replace(layer, sandwich=family == "glm4") for layer in config.layers))


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a GLM-4."""
    head_dim, dims = config.attention.head_dim, config.attention.rotation.dims

    def own(recipe: Recipe) -> Recipe:
        name = recipe.weight.split(".")[-2]
        if name != "qkv":
            return recipe
        *turned, value = recipe.pieces
        return replace(recipe, pieces=(*(evens_first(piece, head_dim, dims) for piece in turned), value))

    made = with_stored_matrices(map(own, decoder_recipes(config)), FUSED)
    dtype, hidden = TORCH_DTYPES[config.dtype], config.hidden_size
    for number, layer in enumerate(config.layers):
        for weight, name in NORMS.items() if layer.sandwich else ():
            piece = Piece(f"model.layers.{number}.{name}.weight", (hidden,))
            made.append(Recipe(f"layers.{number}.{weight}.weight", (piece,), dtype))
    return made
