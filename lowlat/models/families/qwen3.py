"""Qwen3 (dense): config.json to geometry. Its weights are Llama's and the norms of query and key heads."""

from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import parse_sizes
from lowlat.models.families.llama import recipes
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import (
    HARMLESS_KEYS,
    check_architecture,
    parse_rope,
    refuse_windows,
    special_tokens,
)

__all__ = ["parse", "recipes"]

DEFAULT_HEAD_DIM = 128


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """The geometry of a Qwen3. Raises ConfigError for what lowlat does not implement.

    Source: transformers models/qwen3.
    """
    check_architecture(fields, ("Qwen3ForCausalLM",))
    fields.refuse_unless("hidden_act", ("silu",), "only the SiLU gate")
    fields.refuse_unless("quantization_config", (), "quantised weights, but for gpt-oss in MXFP4")
    refuse_windows(fields, off_by_default=True)
    sizes = parse_sizes(fields, default_head_dim=DEFAULT_HEAD_DIM)
    attention_bias = fields.boolean("attention_bias", False)
    ends, begin = special_tokens(directory, fields, sizes.vocab_size)
    config = ModelConfig(
        family="qwen3",
        **vars(sizes),
        rope=parse_rope(fields, max_position=sizes.max_position),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=False,
        qk_norm=True,
        sinks=False,
        windows=(None,) * sizes.num_layers,
        experts=None,
        dtype=dtype,
        eos_token_ids=ends,
        bos_token_id=begin,
    )
    fields.refuse_unknown(HARMLESS_KEYS)
    return config
