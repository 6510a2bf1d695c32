"""Gemma 3, alone or as the text of a vision-language model: config.json to geometry.

Five layers of six have a window and their own RoPE. The vision model is skipped, so requests with images are refused.
Source: transformers models/gemma3.
"""

from pathlib import Path
from typing import Any

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Recipe
from lowlat.models.families.dense import parse_sizes
from lowlat.models.families.gemma import (
    gemma_config,
    gemma_recipes,
    refuse_others,
    with_defaults,
)
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import FULL, SLIDING, check_architecture, layer_kinds, parse_ropes
from lowlat.models.layer_spec import DenseSpec, LayerSpec, RopeConfig

__all__ = ["SKIPPED", "parse", "recipes"]

ARCHITECTURES = ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM", "Gemma3TextModel")
SKIPPED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def _ropes(fields: Fields, max_position: int) -> dict[str, RopeConfig]:
    """Read the RoPE of each kind of layers, in either spelling."""
    scaling = fields.optional_object("rope_scaling")
    absent: dict[str, dict[str, Any]] = {
        FULL: {
            "rope_type": "default",
            **({} if scaling is None else scaling.values),
            "rope_theta": fields.number("rope_theta", 1.001, 1e15, default=1e6),
        },
        SLIDING: {
            "rope_type": "default",
            "rope_theta": fields.number("rope_local_base_freq", 1.001, 1e15, default=1e4),
        },
    }
    return parse_ropes(fields, max_position, absent)


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Gemma 3. Raises ConfigError for features that lowlat does not implement."""
    fields = with_defaults(fields, vocab_size=262208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26)
    check_architecture(fields, ARCHITECTURES)
    refuse_others(fields, qk_norm=True)
    sizes = parse_sizes(fields)
    fields.raw("attn_logit_softcapping")  # Gemma 2's key: this family's scores have no softcap
    windows = {SLIDING: fields.integer("sliding_window", 1, 1 << 30, default=4096), FULL: None}
    interval = fields.integer("sliding_window_pattern", 1, 1 << 20, default=6)
    ropes = _ropes(fields, sizes.max_position)
    scale = fields.number("query_pre_attn_scalar", 1e-3, 1e6, default=256.0) ** -0.5
    ffn = DenseSpec(inner_size=sizes.intermediate_size, activation="gelu_tanh")
    layers = tuple(
        LayerSpec(
            mixer=sizes.attention(ropes[kind], window=windows[kind], scale=scale, qk_norm=True), ffn=ffn, sandwich=True
        )
        for kind in layer_kinds(fields, sizes.num_layers, interval)
    )
    return gemma_config(fields, directory, dtype, sizes, layers)


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a Gemma 3."""
    return gemma_recipes(config, plus_one=True)
