"""Mistral (dense, without windows): config.json to geometry."""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.families.dense import parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import refuse_windows

__all__ = ["parse"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Mistral. Raises ConfigError for what lowlat does not implement, windows among it.

    A config must say `"sliding_window": null`: without the key, the model has a window of 4096 positions.
    Source: transformers models/mistral.
    """
    if "sliding_window" not in fields.values:
        raise ConfigError(
            f"{fields.label}: sliding_window is missing, which means 4096 to Mistral, and sliding window attention is "
            "not implemented for this family; a model without windows says null"
        )
    refuse_windows(fields, off_by_default=False)
    return parse_decoder(fields, directory, dtype, family="mistral", architecture="MistralForCausalLM")
