"""gpt-oss: config.json to geometry, experts plain or quantised, sinks, alternating windows.

Stored experts interleave gate and up; the canonical weights have all gate rows, then all up rows.
Source: transformers models/gpt_oss.
"""

from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats import STORED_FORMATS, Matrices, check_widths, read_format
from lowlat.checkpoint.recipes import Arrange, Piece, Recipe
from lowlat.errors import ConfigError
from lowlat.models.families.dense import MAX_EXPERTS, Sizes, decoder_recipes, parse_sizes
from lowlat.models.families.known_keys import HARMLESS_KEYS, check_settled
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import FULL, SLIDING, check_architecture, layer_kinds, parse_rope, special_tokens
from lowlat.models.layer_spec import ExpertsSpec, LayerSpec
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["parse", "recipes"]

QUANTISED = ("mxfp4",)  # formats of its experts besides the plain one

# transformers' defaults for a config.json without RoPE parameters.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _experts(fields: Fields, sizes: Sizes) -> ExpertsSpec:
    count = fields.integer("num_local_experts", 1, MAX_EXPERTS)
    chosen = fields.optional_integer("num_experts_per_tok", 1, count)
    older = fields.optional_integer("experts_per_token", 1, count)
    if chosen is None and older is None:
        raise ConfigError(f"{fields.label}: num_experts_per_tok is missing; expected an integer from 1 to {count}")
    if chosen is not None and older is not None and chosen != older:
        raise ConfigError(f"{fields.label}: num_experts_per_tok {chosen} and experts_per_token {older} differ")
    stored = read_format(fields, QUANTISED)
    check_widths(fields, stored, {"hidden_size": sizes.hidden_size, "intermediate_size": sizes.intermediate_size})
    return ExpertsSpec(
        inner_size=sizes.intermediate_size,
        num_experts=count,
        num_experts_per_token=chosen or older or 0,
        swiglu_limit=fields.number("swiglu_limit", 1e-3, 1e6, default=7.0),
        swiglu_alpha=fields.number("swiglu_alpha", 1e-3, 1e3, default=1.702),
        weight_format=stored.name,
        biased=True,
    )


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a gpt-oss. Raises ConfigError for features that lowlat does not implement."""
    check_architecture(fields, ("GptOssForCausalLM",))
    check_settled(fields, qk_norm=False)
    fields.refuse_unless("hidden_act", ("silu",), "only the SiLU gate")
    sizes = parse_sizes(fields, default_head_dim=64)
    attention_bias = fields.boolean("attention_bias", True)
    ends, begin = special_tokens(directory, fields, sizes.vocab_size)
    rope = parse_rope(fields, max_position=sizes.max_position, default_theta=150000.0, absent=DEFAULT_ROPE)
    mixer = sizes.attention(rope, qkv_bias=attention_bias, output_bias=attention_bias, sinks=True)
    experts = _experts(fields, sizes)
    windows = {SLIDING: fields.integer("sliding_window", 1, 1 << 30, default=128), FULL: None}
    kinds = layer_kinds(fields, sizes.num_layers, 2)
    config = ModelConfig(
        family="gpt_oss",
        **sizes.model(),
        max_position=sizes.max_position,
        layers=tuple(LayerSpec(mixer=replace(mixer, window=windows[kind]), ffn=experts) for kind in kinds),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=dtype,
        eos_token_ids=ends,
        bos_token_id=begin,
    )
    fields.refuse_unknown(HARMLESS_KEYS)
    return config


def _expert_recipes(config: ModelConfig, layer: int) -> list[Recipe]:
    dtype, experts = TORCH_DTYPES[config.dtype], config.layers[layer].ffn
    if not isinstance(experts, ExpertsSpec):
        return []
    count, hidden, inner = experts.num_experts, config.hidden_size, experts.inner_size
    mlp, canonical = f"model.layers.{layer}.mlp", f"layers.{layer}"

    def one(weight: str, name: str, shape: tuple[int, ...], arrange: Arrange = "rows") -> Recipe:
        return Recipe(f"{canonical}.{weight}", (Piece(f"{mlp}.{name}", shape),), dtype, arrange)

    stored, of = STORED_FORMATS[experts.weight_format], f"{mlp}.experts"
    gate_up = Matrices(f"{canonical}.experts.gate_up", f"{of}.gate_up_proj", (count, 2 * inner, hidden), True, True)
    down = Matrices(f"{canonical}.experts.down", f"{of}.down_proj", (count, hidden, inner), transposed=True)
    return [
        one("router.weight", "router.weight", (count, hidden)),
        one("router.bias", "router.bias", (count,)),
        one("experts.gate_up.bias", "experts.gate_up_proj_bias", (count, 2 * inner), "deinterleave"),
        one("experts.down.bias", "experts.down_proj_bias", (count, hidden)),
        *stored.recipes(gate_up, dtype),
        *stored.recipes(down, dtype),
    ]


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a gpt-oss."""
    return decoder_recipes(config, _expert_recipes)
