"""Mistral (dense): config.json to geometry, its windows as a limit of the context."""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import window_limit

__all__ = ["parse"]

DEFAULT_WINDOW = 4096


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Mistral. Raises ConfigError for what lowlat does not implement.

    A window limits the context: up to its size nothing differs. A config without the key has one of 4096 positions; a
    model without windows says null. Source: transformers models/mistral.
    """
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="mistral",
        architecture="MistralForCausalLM",
        window_limit=window_limit(fields, default=DEFAULT_WINDOW),
    )
