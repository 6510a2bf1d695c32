"""gpt-oss: config.json to geometry, experts in bf16 or MXFP4, sinks, alternating windows.

Stored experts interleave gate and up; the canonical weights have all gate rows, then all up rows.
Source: transformers models/gpt_oss and integrations/mxfp4.
"""

from pathlib import Path

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Arrange, Piece, Recipe
from lowlat.errors import ConfigError
from lowlat.models.families.dense import Sizes, attention_recipes, outer_recipes, parse_sizes
from lowlat.models.geometry import ComputeDtype, ExpertsConfig, ModelConfig
from lowlat.models.hf_config import HARMLESS_KEYS, check_architecture, parse_rope, special_tokens
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["normalise_scales", "parse", "recipes"]

MXFP4_BLOCK = 32  # weights that share a scale
MAX_EXPERTS = 4096

# A scale s stands for 2**(s - 127). From 2 on every product with an FP4 value (0.5 to 6) is a normal bfloat16 number:
# below, it is subnormal, and kernels that build the exponent from bits differ. The kernels keep s + 63 in a byte that
# is an exponent: up to 191, for 2**64, that is a number. 255 is NaN.
LOWEST_SCALE = 2
HIGHEST_SCALE = 191
UNIT_SCALE = 127
MAGNITUDE_BITS = 0x77  # both nibbles without their signs

# What transformers takes when config.json names no RoPE at all.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.integer("sliding_window", 1, 1 << 30, default=128)
    kinds = fields.optional_strings("layer_types", max_count=num_layers)
    if kinds is None:
        kinds = tuple("full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise ConfigError(f"{fields.label}: layer_types has {len(kinds)} entries, expected {num_layers}, one a layer")
    sizes = {"sliding_attention": window, "full_attention": None}
    for kind in kinds:
        if kind not in sizes:
            raise ConfigError(f"{fields.label}: layer_types entry {kind!r} is not implemented")
    return tuple(sizes[kind] for kind in kinds)


def _is_mxfp4(fields: Fields, sizes: Sizes) -> bool:
    quantization = fields.optional_object("quantization_config")
    if quantization is None:
        return False
    method = quantization.optional_string("quant_method")
    if method != "mxfp4":
        raise ConfigError(f"{quantization.label}: quant_method {method!r} is not implemented; implemented: 'mxfp4'")
    quantization.optional_strings("modules_to_not_convert", max_count=4096)
    quantization.refuse_unknown(())
    for key, size in (("hidden_size", sizes.hidden_size), ("intermediate_size", sizes.intermediate_size)):
        if size % MXFP4_BLOCK:
            raise ConfigError(f"{fields.label}: {key} must be a multiple of {MXFP4_BLOCK} for MXFP4, found {size}")
    return True


def _experts(fields: Fields, sizes: Sizes) -> ExpertsConfig:
    count = fields.integer("num_local_experts", 1, MAX_EXPERTS)
    chosen = fields.optional_integer("num_experts_per_tok", 1, count)
    older = fields.optional_integer("experts_per_token", 1, count)
    if chosen is None and older is None:
        raise ConfigError(f"{fields.label}: num_experts_per_tok is missing; expected an integer from 1 to {count}")
    if chosen is not None and older is not None and chosen != older:
        raise ConfigError(f"{fields.label}: num_experts_per_tok {chosen} and experts_per_token {older} differ")
    return ExpertsConfig(
        num_experts=count,
        num_experts_per_token=chosen or older or 0,
        swiglu_limit=fields.number("swiglu_limit", 1e-3, 1e6, default=7.0),
        swiglu_alpha=fields.number("swiglu_alpha", 1e-3, 1e3, default=1.702),
        mxfp4=_is_mxfp4(fields, sizes),
    )


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a gpt-oss. Raises ConfigError for what lowlat does not implement."""
    check_architecture(fields, ("GptOssForCausalLM",))
    fields.refuse_unless("hidden_act", ("silu",), "only the SiLU gate")
    sizes = parse_sizes(fields, default_head_dim=64)
    attention_bias = fields.boolean("attention_bias", True)
    ends, begin = special_tokens(directory, fields, sizes.vocab_size)
    config = ModelConfig(
        family="gpt_oss",
        **vars(sizes),
        rope=parse_rope(fields, max_position=sizes.max_position, default_theta=150000.0, absent=DEFAULT_ROPE),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=True,
        qk_norm=False,
        sinks=True,
        windows=_windows(fields, sizes.num_layers),
        experts=_experts(fields, sizes),
        dtype=dtype,
        eos_token_ids=ends,
        bos_token_id=begin,
    )
    fields.refuse_unknown(HARMLESS_KEYS)
    return config


def _expert_recipes(config: ModelConfig, experts: ExpertsConfig, layer: int) -> list[Recipe]:
    dtype = TORCH_DTYPES[config.dtype]
    count, hidden, inner = experts.num_experts, config.hidden_size, config.intermediate_size
    mlp, canonical = f"model.layers.{layer}.mlp", f"layers.{layer}"

    def one(weight: str, name: str, shape: tuple[int, ...], arrange: Arrange = "rows") -> Recipe:
        as_dtype = torch.uint8 if weight.endswith(("blocks", "scales")) else dtype
        return Recipe(f"{canonical}.{weight}", (Piece(f"{mlp}.{name}", shape),), as_dtype, arrange)

    made = [
        one("router.weight", "router.weight", (count, hidden)),
        one("router.bias", "router.bias", (count,)),
        one("experts.gate_up.bias", "experts.gate_up_proj_bias", (count, 2 * inner), "deinterleave"),
        one("experts.down.bias", "experts.down_proj_bias", (count, hidden)),
    ]
    if not experts.mxfp4:
        wide, narrow = (count, hidden, 2 * inner), (count, inner, hidden)
        return [
            *made,
            one("experts.gate_up.weight", "experts.gate_up_proj", wide, "transpose_deinterleave"),
            one("experts.down.weight", "experts.down_proj", narrow, "transpose"),
        ]
    gates, downs = (count, 2 * inner, hidden // MXFP4_BLOCK), (count, hidden, inner // MXFP4_BLOCK)
    codes = (MXFP4_BLOCK // 2,)
    return [
        *made,
        one("experts.gate_up.blocks", "experts.gate_up_proj_blocks", gates + codes, "deinterleave"),
        one("experts.gate_up.scales", "experts.gate_up_proj_scales", gates, "deinterleave"),
        one("experts.down.blocks", "experts.down_proj_blocks", downs + codes),
        one("experts.down.scales", "experts.down_proj_scales", downs),
    ]


def recipes(config: ModelConfig) -> list[Recipe]:
    """How every canonical weight of gpt-oss is made; without experts there are none."""
    made = outer_recipes(config)
    if config.experts is not None:
        for layer in range(config.num_layers):
            made += attention_recipes(config, layer)
            made += _expert_recipes(config, config.experts, layer)
    return made


def normalise_scales(label: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Refuse MXFP4 scales outside what kernels compute exactly; give all-zero blocks a scale inside it.

    blocks  [E, rows, K / 32, 16]  uint8  two codes a byte, the low nibble first
    scales  [E, rows, K / 32]      uint8  in and out: blocks of zeros outside 2..191 get 127, their value unchanged
    label names file and tensor. Raises ConfigError for the first scale that is NaN (255), or outside 2..191 with
    codes that are not zero.
    """
    low, high = torch.aminmax(scales)
    if int(low) >= LOWEST_SCALE and int(high) <= HIGHEST_SCALE:
        return
    outside = (scales < LOWEST_SCALE) | (scales > HIGHEST_SCALE)
    live = ((blocks[outside] & MAGNITUDE_BITS) != 0).any(dim=-1)
    refused = live | (scales[outside] == 255)
    if bool(refused.any()):
        at = outside.nonzero()[refused][0].tolist()
        raise ConfigError(
            f"{label}: expected MXFP4 scales from {LOWEST_SCALE} to {HIGHEST_SCALE}, "
            f"found {int(scales[tuple(at)])} in expert {at[0]}"
        )
    scales[outside] = UNIT_SCALE
