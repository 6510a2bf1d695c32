"""Mellum 2: config.json to geometry. Its layers are Qwen3-MoE's, most with a window, and each kind has its own RoPE.

The multi-token prediction layer of its files is skipped. Source: transformers models/mellum.
"""

from dataclasses import replace
from pathlib import Path

from lowlat.checkpoint.fields import Fields
from lowlat.models.families.dense import MAX_LAYERS, MAX_POSITIONS, parse_decoder
from lowlat.models.families.qwen3_moe import parse_experts
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import FULL, SLIDING, layer_kinds, parse_ropes

__all__ = ["SKIPPED", "parse"]

SKIPPED = ("mtp.",)
ROPES = {
    FULL: {"rope_type": "default", "rope_theta": 5e5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
MTP_KEYS = frozenset({"num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"})


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Mellum 2. Raises ConfigError for features that are not implemented, as dense layers."""
    ropes = parse_ropes(fields, fields.integer("max_position_embeddings", 1, MAX_POSITIONS), ROPES)
    count = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    kinds = layer_kinds(fields, count, 1)
    windows = {FULL: None, SLIDING: fields.integer("sliding_window", 1, MAX_POSITIONS, default=1024)}
    for kind in fields.optional_strings("mlp_layer_types", max_count=MAX_LAYERS) or ():
        if kind != "sparse":
            raise fields.error(
                "mlp_layer_types", "'sparse' in every layer: layers without experts are not implemented,"
            )
    fields.optional_boolean("use_sliding_window")  # only layer_types decides which layers have one
    biased = fields.boolean("attention_bias", False)
    config = parse_decoder(
        fields,
        directory,
        dtype,
        family="mellum",
        architecture="MellumForCausalLM",
        default_head_dim=128,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        experts=parse_experts(fields, normed=True),
        windows=[windows[kind] for kind in kinds],
        rope=ropes[FULL],
        harmless=MTP_KEYS | {"rope_theta"},  # each kind has its own
    )
    layers = (
        layer if kind == FULL else replace(layer, mixer=replace(mixer, rope=ropes[kind]))
        for layer, mixer, kind in zip(config.layers, config.attentions.values(), kinds, strict=True)
    )
    return replace(config, layers=tuple(layers))
