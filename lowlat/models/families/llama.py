"""Llama: config.json to geometry."""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import window_limit

__all__ = ["parse"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Llama. Raises ConfigError for what lowlat does not implement.

    Source: transformers models/llama.
    """
    biased = fields.boolean("attention_bias", False)
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="llama",
        architecture="LlamaForCausalLM",
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=fields.boolean("mlp_bias", False),
        window_limit=window_limit(fields),
    )
