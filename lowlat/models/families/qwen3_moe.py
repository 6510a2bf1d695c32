"""Qwen3-MoE: config.json to geometry, and its experts, which files store one by one. Layers are otherwise Qwen3's.

Source: transformers models/qwen3_moe.
"""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Piece, Recipe
from lowlat.errors import ConfigError
from lowlat.models.families.dense import MAX_EXPERTS, MAX_WIDTH, decoder_recipes, parse_decoder
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import layer_windows
from lowlat.models.layer_spec import ExpertsSpec
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["parse", "parse_experts", "recipes"]


def parse_experts(fields: Fields, *, normed: bool = False) -> ExpertsSpec:
    """Read the experts of every layer; normed: whether the router's weights sum to 1 if norm_topk_prob is missing."""
    step = fields.integer("decoder_sparse_step", 1, 1 << 20, default=1)
    dense = fields.optional_integers("mlp_only_layers", 0, 1 << 20, max_count=1 << 12)
    if step != 1 or dense:
        raise ConfigError(
            f"{fields.label}: layers without experts (decoder_sparse_step {step}, mlp_only_layers {list(dense or ())}) "
            "are not implemented for this family"
        )
    older = fields.optional_integer("num_experts", 1, MAX_EXPERTS)
    count = fields.integer("num_local_experts", 1, MAX_EXPERTS, default=older)
    if older is not None and older != count:
        raise ConfigError(f"{fields.label}: num_experts {older} and num_local_experts {count} differ")
    return ExpertsSpec(
        inner_size=fields.integer("moe_intermediate_size", 1, MAX_WIDTH),
        num_experts=count,
        num_experts_per_token=fields.integer("num_experts_per_tok", 1, count),
        shares_of_all=not fields.boolean("norm_topk_prob", normed),
    )


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Qwen3-MoE. Raises ConfigError for features that are not implemented, as dense layers."""
    experts = parse_experts(fields)
    biased = fields.boolean("attention_bias", False)
    return parse_decoder(
        fields,
        directory,
        dtype,
        family="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        experts=experts,
        windows=layer_windows(fields, off_by_default=True, default=4096),
    )


def _expert_recipes(config: ModelConfig, layer: int) -> list[Recipe]:
    dtype, experts = TORCH_DTYPES[config.dtype], config.layers[layer].ffn
    if not isinstance(experts, ExpertsSpec):
        return []
    mlp, canonical = f"model.layers.{layer}.mlp", f"layers.{layer}"
    hidden, inner, count = config.hidden_size, experts.inner_size, experts.num_experts

    def stacked(weight: str, parts: tuple[str, ...], shape: tuple[int, int]) -> Recipe:
        names = [f"{mlp}.experts.{expert}.{part}_proj.weight" for expert in range(count) for part in parts]
        pieces = tuple(Piece(name, shape) for name in names)
        return Recipe(f"{canonical}.experts.{weight}.weight", pieces, dtype, count=count)

    return [
        Recipe(f"{canonical}.router.weight", (Piece(f"{mlp}.gate.weight", (count, hidden)),), dtype),
        stacked("gate_up", ("gate", "up"), (inner, hidden)),
        stacked("down", ("down",), (hidden, inner)),
    ]


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a Qwen3-MoE."""
    return decoder_recipes(config, _expert_recipes)
