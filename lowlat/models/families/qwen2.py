"""Qwen2 and Qwen2.5 (dense): config.json to geometry. Queries, keys and values have biases, always."""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import layer_windows

__all__ = ["parse"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Qwen2. Raises ConfigError for what lowlat does not implement.

    Its configs name a window's size even if no layer has a window: `use_sliding_window` says whether a layer has one.
    Source: transformers models/qwen2.
    """
    fields.optional_boolean("qkv_bias")  # ignored: there always are biases, and missing tensors are refused
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="qwen2",
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        windows=layer_windows(fields, off_by_default=True, default=4096, default_first=28),
    )
