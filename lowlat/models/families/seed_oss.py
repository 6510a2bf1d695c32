"""Seed-OSS (dense): config.json to geometry. Queries, keys and values have biases, the output projection has none.

Source: transformers models/seed_oss.
"""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig

__all__ = ["parse"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Seed-OSS. Raises ConfigError for features that lowlat does not implement."""
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="seed_oss",
        architecture="SeedOssForCausalLM",
        default_head_dim=128,
        qkv_bias=fields.boolean("attention_bias", True),
        output_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )
