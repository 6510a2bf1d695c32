"""This module reads sizes and vocabulary of EAGLE3's and DFlash's draft models, and checks them against the target."""

from dataclasses import replace
from typing import Any

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.families.dense import Sizes
from lowlat.models.geometry import ModelConfig
from lowlat.models.hf_config import MAX_VOCABULARY, max_positions, parse_rope
from lowlat.models.layer_spec import Activation, DenseSpec, LayerSpec
from lowlat.speculators.draft_files.tensors import DraftTensors

__all__ = ["GATES", "check_target", "size_fields", "vocabulary_fields"]

GATES: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # by hidden_act


def check_target(top: Fields, target: ModelConfig) -> None:
    """Raise ConfigError for a draft model whose config states a target of another shape."""
    for key, own in (("target_hidden_size", target.hidden_size), ("num_target_layers", target.num_layers)):
        stated = top.optional_integer(key, 1, 1 << 20)
        if stated is not None and stated != own:
            raise ConfigError(f"{top.label}: {key} {stated} is not the target's {own}")


def size_fields(
    layer: Fields,
    tensors: DraftTensors,
    sizes: Sizes,
    target: ModelConfig,
    *,
    windows: tuple[int | None, ...],
    biases: tuple[bool, bool, bool],
) -> dict[str, Any]:
    """Read the fields of a DraftConfig that every draft model has: sizes, and layers.

    layer    the part of the config with the layers' sizes; its gate is one of `GATES`
    windows  of each layer; None: full attention
    biases   whether the QKV projections, the output projections, and the FFN have biases
    """
    rope, (qkv_bias, output_bias, mlp_bias) = parse_rope(layer, max_position=sizes.max_position), biases
    qk_norm = any(tensors.in_any_layer(f"self_attn.{part}_norm.weight") for part in "qk")
    mixer = sizes.attention(rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=qk_norm)
    activation = GATES[layer.optional_string("hidden_act") or "silu"]
    ffn = DenseSpec(inner_size=sizes.intermediate_size, activation=activation, bias=mlp_bias)
    return {
        **sizes.model(),
        "target_hidden_size": target.hidden_size,
        "max_position": max_positions(rope, sizes.max_position),
        "layers": tuple(LayerSpec(mixer=replace(mixer, window=window), ffn=ffn) for window in windows),
    }


def vocabulary_fields(top: Fields, tensors: DraftTensors, sizes: Sizes, target: ModelConfig) -> dict[str, Any]:
    """Read the draft vocabulary, and whether the draft model has its own embedding, LM head and map of ids.

    Raises ConfigError for another vocabulary than the target's, or one that the tensors contradict.
    """
    label = top.label
    if sizes.vocab_size != target.vocab_size:
        raise ConfigError(f"{label}: vocab_size {sizes.vocab_size} is not the target's {target.vocab_size}")
    own_lm_head = "lm_head.weight" in tensors
    rows = tensors.entry("lm_head.weight", 2).shape[0] if own_lm_head else target.vocab_size
    stated = top.optional_integer("draft_vocab_size", 1, MAX_VOCABULARY)
    if stated is not None and stated != rows:
        raise ConfigError(f"{label}: draft_vocab_size {stated} is not the {rows} rows of the LM head")
    if not 1 <= rows <= target.vocab_size:
        raise ConfigError(f"{label}: the draft vocabulary of {rows} is not from 1 to the target's {target.vocab_size}")
    return {
        "draft_vocab_size": rows,
        "own_embedding": "embed_tokens.weight" in tensors,
        "own_lm_head": own_lm_head,
        "own_draft_map": "d2t" in tensors,
    }
