"""The text of Qwen2-VL, 2.5-VL and 3-VL, dense or with experts: config.json to geometry. Vision parts are skipped.

In text all three numbers of a position are equal, so `mrope_section` has no effect.
Source: transformers models/qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe.
"""

from dataclasses import replace
from pathlib import Path

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Conversion, Piece, Recipe
from lowlat.checkpoint.tensors import FLOAT_NAMES
from lowlat.models.families import qwen3_moe
from lowlat.models.families.dense import parse_decoder
from lowlat.models.families.known_keys import IMAGE_KEYS
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import IMAGE_POSITIONS, layer_windows

__all__ = ["MOE", "SKIPPED", "parse", "recipes"]

MOE = "qwen3_vl_moe"
SKIPPED = ("model.visual.", "visual.")
CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", MOE: "Qwen3VLMoe"}


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of the text model. Raises ConfigError for features that lowlat does not implement."""
    family = str(fields.values["model_type"])
    third = family not in ("qwen2_vl", "qwen2_5_vl")
    biased = fields.boolean("attention_bias", False) if third else True
    return parse_decoder(
        fields,
        directory,
        dtype,
        family=family,
        architecture=f"{CLASSES[family]}ForConditionalGeneration",
        default_head_dim=128 if third else None,
        qkv_bias=biased,
        output_bias=biased and third,
        qk_norm=third,
        experts=qwen3_moe.parse_experts(fields, normed=True) if family == MOE else None,
        windows=layer_windows(fields, off_by_default=True, default=4096, default_first=28),
        default_theta=5e6 if third else 1e6,
        rope_keys=IMAGE_POSITIONS,
        harmless=IMAGE_KEYS,
    )


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a model with experts; files store these in one tensor, or one by one.

    In published files each expert's matrix is transposed; in files that transformers 5 writes it is not.
    """

    def fused(recipe: Recipe) -> Recipe:
        layer, _, name = recipe.weight.removesuffix(".weight").rpartition(".experts.")
        if not layer:
            return recipe
        count, rows, columns = recipe.shape

        def make(label: str, stored: torch.Tensor) -> torch.Tensor:
            plain = stored.shape[1:] == (rows, columns)
            return (stored if plain else stored.transpose(1, 2)).reshape(count * rows, columns)

        both = Conversion((count * rows, columns), tuple(FLOAT_NAMES), make, also=((count, rows, columns),))
        piece = Piece(f"model.{layer}.mlp.experts.{name}_proj", (count, columns, rows), both)
        return replace(recipe, pieces=(piece,), other=recipe)

    return list(map(fused, qwen3_moe.recipes(config)))
