"""Mixtral: config.json to geometry, and its experts, which files store one by one. Layers are otherwise Mistral's.

Source: transformers models/mixtral.
"""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Piece, Recipe
from lowlat.models.families.dense import MAX_EXPERTS, MAX_WIDTH, decoder_recipes, parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import layer_windows
from lowlat.models.layer_spec import ExpertsSpec
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["parse", "recipes"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Mixtral. Raises ConfigError for features that lowlat does not implement."""
    count = fields.integer("num_local_experts", 1, MAX_EXPERTS, default=8)
    experts = ExpertsSpec(
        inner_size=fields.integer("intermediate_size", 1, MAX_WIDTH),
        num_experts=count,
        num_experts_per_token=fields.integer("num_experts_per_tok", 1, count, default=2),
    )
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="mixtral",
        architecture="MixtralForCausalLM",
        experts=experts,
        windows=layer_windows(fields),
        default_theta=1e6,
    )


def _expert_recipes(config: ModelConfig, layer: int) -> list[Recipe]:
    experts, dtype, hidden = config.layers[layer].experts, TORCH_DTYPES[config.dtype], config.hidden_size
    if experts is None:
        return []
    of, canonical, count = f"model.layers.{layer}.block_sparse_moe", f"layers.{layer}", experts.num_experts
    made = [Recipe(f"{canonical}.router.weight", (Piece(f"{of}.gate.weight", (count, hidden)),), dtype)]
    inner = experts.inner_size
    for name, parts, shape in (("gate_up", "13", (inner, hidden)), ("down", "2", (hidden, inner))):
        pieces = tuple(Piece(f"{of}.experts.{e}.w{part}.weight", shape) for e in range(count) for part in parts)
        made.append(Recipe(f"{canonical}.experts.{name}.weight", pieces, dtype, count=count))
    return made


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a Mixtral; an expert's w1 is the gate, w3 is up and w2 is down."""
    return decoder_recipes(config, _expert_recipes)
