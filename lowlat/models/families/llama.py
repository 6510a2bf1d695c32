"""Llama: config.json to geometry. Its weights are the plain decoder's."""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Recipe
from lowlat.models.families.dense import attention_recipes, dense_recipes, outer_recipes, parse_sizes
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import (
    HARMLESS_KEYS,
    check_architecture,
    parse_rope,
    refuse_windows,
    special_tokens,
)

__all__ = ["parse", "recipes"]


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Llama. Raises ConfigError for what lowlat does not implement.

    Source: transformers models/llama.
    """
    check_architecture(fields, ("LlamaForCausalLM",))
    fields.refuse_unless("hidden_act", ("silu",), "only the SiLU gate")
    fields.refuse_unless("quantization_config", (), "quantised weights, but for gpt-oss in MXFP4")
    refuse_windows(fields, off_by_default=False)
    sizes = parse_sizes(fields)
    attention_bias = fields.boolean("attention_bias", False)
    ends, begin = special_tokens(directory, fields, sizes.vocab_size)
    config = ModelConfig(
        family="llama",
        **vars(sizes),
        rope=parse_rope(fields, max_position=sizes.max_position),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        qk_norm=False,
        sinks=False,
        windows=(None,) * sizes.num_layers,
        experts=None,
        dtype=dtype,
        eos_token_ids=ends,
        bos_token_id=begin,
    )
    fields.refuse_unknown(HARMLESS_KEYS)
    return config


def recipes(config: ModelConfig) -> list[Recipe]:
    """How every canonical weight of a dense decoder is made."""
    made = outer_recipes(config)
    for layer in range(config.num_layers):
        made += attention_recipes(config, layer)
        made += dense_recipes(config, layer)
    return made
