"""Llama: config.json to geometry."""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import MAX_LAYERS, parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import SLIDING, layer_windows, sliding_kinds

__all__ = ["parse"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Llama. Raises ConfigError for features that lowlat does not implement.

    Source: transformers models/llama.
    """
    biased = fields.boolean("attention_bias", False)
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    fields.optional_integer("sliding_window", 0, 1 << 30)  # applies to the layers that layer_types names
    fields.refuse_unless("use_sliding_window", (False,), "windows of the layers that layer_types names")
    has_windows = SLIDING in sliding_kinds(fields, count)
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="llama",
        architecture="LlamaForCausalLM",
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", False),
        windows=layer_windows(fields) if has_windows else (),
    )
