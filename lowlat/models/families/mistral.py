"""Mistral, Ministral 3 and the text of Mistral Small 3.1 and later (dense): config.json to geometry.

Ministral 3 scales queries by their position beyond a certain context; that context is a limit here.
Source: transformers models/mistral, ministral3, mistral3.
"""

from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import MAX_POSITIONS, parse_decoder
from lowlat.models.families.known_keys import IMAGE_KEYS
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import layer_windows

__all__ = ["SKIPPED", "parse"]

SKIPPED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
DEFAULT_WINDOW = 4096
ARCHITECTURES = {
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
}
BETA = "llama_4_scaling_beta"
ROPE_KEYS = (BETA, "max_position_embeddings")


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Mistral. Raises ConfigError for features that lowlat does not implement.

    A Mistral's config without the key `sliding_window` has windows of 4096 positions; null means no windows.
    """
    family = str(fields.values["model_type"])
    rope = fields.optional_object("rope_parameters")
    scaled = rope is not None and bool(rope.optional_number(BETA, 0.0, 1e3))
    config = parse_decoder(
        fields,
        directory,
        dtype,
        family=family,
        architecture=ARCHITECTURES[family],
        default_head_dim=None if family == "mistral" else 128,
        windows=layer_windows(fields, default=DEFAULT_WINDOW if family == "mistral" else None),
        rope_keys=ROPE_KEYS,
        harmless=IMAGE_KEYS if family == "mistral3" else (),
    )
    if rope is None or not scaled:
        return config
    return replace(config, query_limit=rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS))
