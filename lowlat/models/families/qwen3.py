"""Qwen3 (dense): config.json to geometry. Query and key heads are normed."""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import layer_windows

__all__ = ["parse"]

DEFAULT_HEAD_DIM = 128


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Qwen3. Raises ConfigError for features that lowlat does not implement.

    Source: transformers models/qwen3.
    """
    biased = fields.boolean("attention_bias", False)
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="qwen3",
        architecture="Qwen3ForCausalLM",
        default_head_dim=DEFAULT_HEAD_DIM,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        windows=layer_windows(fields, off_by_default=True, default=4096, default_first=28),
    )
