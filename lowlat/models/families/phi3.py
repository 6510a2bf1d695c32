"""Phi-3 and Phi-4 (dense): config.json to geometry. Files have queries, keys and values in one matrix, and both gates.

Source: transformers models/phi3.
"""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Recipe
from lowlat.models.families.dense import MAX_POSITIONS, decoder_recipes, parse_decoder, with_stored_matrices
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import layer_windows

__all__ = ["parse", "recipes"]

FUSED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Phi-3. Raises ConfigError for what lowlat does not implement."""
    fields.optional_integer("original_max_position_embeddings", 1, MAX_POSITIONS)  # its own place for longrope's
    fields.refuse_unless("attention_bias", (False,), "attention without biases")
    fields.refuse_unless("mlp_bias", (False,), "an FFN without biases")
    fields.refuse_unless("lm_head_bias", (False,), "an LM head without biases")
    for key in ("full_attn_mod", "interpolate_factor"):  # Phi-4-mini's files have both, as 1
        fields.refuse_unless(key, (1,), "layers that are all alike")
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="phi3",
        architecture="Phi3ForCausalLM",
        windows=layer_windows(fields),
        partial=1.0,
    )


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a Phi-3."""
    return with_stored_matrices(decoder_recipes(config), FUSED)
