"""Gemma 2: config.json to geometry. Scores and logits have softcaps; every other layer has a window.

Source: transformers models/gemma2.
"""

from pathlib import Path

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
from lowlat.models.hf_config import FULL, SLIDING, check_architecture, layer_kinds, parse_rope
from lowlat.models.layer_spec import DenseSpec, LayerSpec

__all__ = ["parse", "recipes"]

SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Gemma 2. Raises ConfigError for features that lowlat does not implement."""
    fields = with_defaults(fields, vocab_size=256000, max_position_embeddings=8192)
    check_architecture(fields, ("Gemma2ForCausalLM",))
    refuse_others(fields, qk_norm=False)
    sizes = parse_sizes(fields)
    fields.raw("sliding_window_size")  # older files have the window under this key, too
    softcap = fields.optional_number("attn_logit_softcapping", 1e-3, 1e6)
    if "attn_logit_softcapping" not in fields.values:
        softcap = SOFTCAPS["attn_logit_softcapping"]
    windows = {SLIDING: fields.integer("sliding_window", 1, 1 << 30, default=4096), FULL: None}
    rope = parse_rope(fields, max_position=sizes.max_position)
    scale = fields.number("query_pre_attn_scalar", 1e-3, 1e6, default=256.0) ** -0.5
    ffn = DenseSpec(inner_size=sizes.intermediate_size, activation="gelu_tanh")
    layers = tuple(
        LayerSpec(
            mixer=sizes.attention(rope, window=windows[kind], scale=scale, softcap=softcap), ffn=ffn, sandwich=True
        )
        for kind in layer_kinds(fields, sizes.num_layers, 2)
    )
    return gemma_config(fields, directory, dtype, sizes, layers, default=SOFTCAPS["final_logit_softcapping"])


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a Gemma 2."""
    return gemma_recipes(config, plus_one=True)
