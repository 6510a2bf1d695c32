"""Gemma 4, alone or as the text part of a model for images and sound: config.json to geometry.

Layers with full attention have wider heads, of which a quarter turns, and may take keys as values. Small models add a
token's embedding in each layer, and their last layers read the keys and values of others; one has experts next to a
dense FFN. What sees and hears is skipped. Source: transformers models/gemma4, gemma4_unified.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Conversion, Piece, Recipe, reshaped_piece
from lowlat.checkpoint.tensors import FLOAT_NAMES
from lowlat.errors import ConfigError
from lowlat.models.families.dense import MAX_EXPERTS, MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, Sizes, parse_sizes
from lowlat.models.families.gemma import (
    gemma_config,
    gemma_recipes,
    refuse_others,
    with_defaults,
)
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import FULL, SLIDING, check_architecture, check_head_counts, layer_kinds, parse_ropes
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, ParallelSpec, RopeConfig
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["SKIPPED", "layer_specs", "parse", "recipes"]

ARCHITECTURES = tuple(
    f"Gemma4{kind}{ending}"
    for kind in ("", "Unified")
    for ending in ("ForConditionalGeneration", "ForCausalLM", "TextModel")
)
SKIPPED = tuple(f"model.{name}." for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio"))
SKIPPED += ("model.vision_embedder.",)
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
INTERVAL = 6  # of layers with full attention


@dataclass(frozen=True)
class Heads:
    """The heads of a layer: their size, and the number of key-value heads."""

    head_dim: int
    num_kv_heads: int


def _heads(fields: Fields, sizes: Sizes, kinds: tuple[str, ...], keys_as_values: bool) -> tuple[Heads, ...]:
    """The heads of each layer: by per_layer_config if there is one, else by the keys for full attention."""
    wide = fields.integer("global_head_dim", 2, MAX_HEAD_DIM, default=512)
    few = fields.optional_integer("num_global_key_value_heads", 1, MAX_HEADS)
    plain = Heads(sizes.head_dim, sizes.num_kv_heads)
    full = Heads(wide, few if keys_as_values and few is not None else sizes.num_kv_heads)
    by_layer = fields.optional_object("per_layer_config")
    found = [full if kind == FULL and by_layer is None else plain for kind in kinds]
    for layer in range(len(kinds)) if by_layer is not None else ():
        own = by_layer.optional_object(str(layer)) if by_layer is not None else None
        if own is not None:
            found[layer] = Heads(
                own.integer("head_dim", 2, MAX_HEAD_DIM, default=sizes.head_dim),
                own.integer("num_key_value_heads", 1, MAX_HEADS, default=sizes.num_kv_heads),
            )
            own.refuse_unknown(())
    if by_layer is not None:
        by_layer.refuse_unknown(())
    for heads in dict.fromkeys(found):
        check_head_counts(fields, sizes.num_heads, heads.num_kv_heads, heads.head_dim)
    return tuple(found)


def _kinds(fields: Fields, count: int) -> tuple[str, ...]:
    """The kind of each layer; the last has full attention, whatever the config states."""
    return (*layer_kinds(fields, count, INTERVAL)[:-1], FULL)


def _attentions(fields: Fields, sizes: Sizes, ropes: dict[str, RopeConfig]) -> list[AttentionSpec]:
    kinds = _kinds(fields, sizes.num_layers)
    keys_as_values = fields.boolean("attention_k_eq_v", False)
    default = 1024 if _is_unified(fields) else 512
    windows = {SLIDING: fields.integer("sliding_window", 1, 1 << 30, default=default), FULL: None}
    num_shared = fields.integer("num_kv_shared_layers", 0, sizes.num_layers - 1, default=0)
    first_shared = sizes.num_layers - num_shared
    made: list[AttentionSpec] = []
    for layer, (kind, heads) in enumerate(zip(kinds, _heads(fields, sizes, kinds, keys_as_values), strict=True)):
        kept = None
        if layer >= first_shared:
            kept = next((each for each in reversed(range(first_shared)) if kinds[each] == kind), None)
            if kept is None:
                raise ConfigError(
                    f"{fields.label}: num_kv_shared_layers {num_shared} leaves no layer of {kind} whose keys and "
                    f"values layer {layer} could read"
                )
        spec = AttentionSpec(
            num_heads=sizes.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            rope=ropes[kind],
            qk_norm=True,
            v_norm=True,
            keys_as_values=keys_as_values and kind == FULL,
            kv_layer=kept,
            window=windows[kind],
            scale=1.0,
        )
        if kept is not None and (spec.num_kv_heads, spec.head_dim) != (made[kept].num_kv_heads, made[kept].head_dim):
            raise ConfigError(f"{fields.label}: layer {layer} reads keys and values of layer {kept}, of other heads")
        made.append(spec)
    return made


def _is_unified(fields: Fields) -> bool:
    return str(fields.values.get("model_type")).startswith("gemma4_unified")


def _experts(fields: Fields) -> ExpertsSpec | None:
    has_experts = fields.boolean("enable_moe_block", False)
    count = fields.optional_integer("num_experts", 1, MAX_EXPERTS)
    chosen = fields.optional_integer("top_k_experts", 1, count or MAX_EXPERTS)
    inner = fields.optional_integer("moe_intermediate_size", 1, MAX_WIDTH)
    if not has_experts:
        return None
    if count is None or chosen is None or inner is None:
        raise ConfigError(
            f"{fields.label}: enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size, found "
            f"{count}, {chosen} and {inner}"
        )
    return ExpertsSpec(inner_size=inner, num_experts=count, num_experts_per_token=chosen, activation="gelu_tanh")


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a Gemma 4. Raises ConfigError for features that lowlat does not implement."""
    own_embeddings = 0 if _is_unified(fields) else 256
    fields = with_defaults(fields, max_position_embeddings=262144 if _is_unified(fields) else 131072)
    check_architecture(fields, ARCHITECTURES)
    sizes = parse_sizes(fields)
    return gemma_config(fields, directory, dtype, sizes, layer_specs(fields, sizes, own_embeddings))


def layer_specs(fields: Fields, sizes: Sizes, own_embeddings: int) -> tuple[LayerSpec, ...]:
    """Read the layers of a config. own_embeddings: the default width of per-layer embeddings. Raises ConfigError."""
    refuse_others(fields, qk_norm=True, bidirectional=("vision",))
    attentions = _attentions(fields, sizes, parse_ropes(fields, sizes.max_position, ROPES))
    experts = _experts(fields)
    has_none = fields.values.get("hidden_size_per_layer_input", 0) is None  # null: 0, and no default
    size = fields.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, default=0 if has_none else own_embeddings)
    ids = fields.integer("vocab_size_per_layer_input", 0, 1 << 24, default=sizes.vocab_size)
    if size and ids != sizes.vocab_size:
        raise ConfigError(
            f"{fields.label}: vocab_size_per_layer_input {ids} is not implemented (each of the vocabulary's "
            f"{sizes.vocab_size} tokens has an embedding in each layer)"
        )
    wide = fields.boolean("use_double_wide_mlp", False)
    layers = []
    for mixer in attentions:
        inner = sizes.intermediate_size * (2 if wide and mixer.kv_layer is not None else 1)
        dense = DenseSpec(inner_size=inner, activation="gelu_tanh")
        ffn = dense if experts is None else ParallelSpec(dense=dense, experts=experts)
        layers.append(LayerSpec(mixer=mixer, ffn=ffn, sandwich=True, scaled=True, per_layer_size=size or None))
    return tuple(layers)


def _expert_recipes(config: ModelConfig, layer: int, experts: ExpertsSpec, of: str) -> list[Recipe]:
    """The recipes of the router, of experts in one tensor or one by one, and of the norms around them."""
    dtype, hidden, canonical = TORCH_DTYPES[config.dtype], config.hidden_size, f"layers.{layer}"
    count, inner = experts.num_experts, experts.inner_size
    folded = Conversion((hidden,), tuple(FLOAT_NAMES), lambda _label, stored: stored.float() * hidden**-0.5)

    def one(weight: str, piece: Piece, as_dtype: torch.dtype = dtype) -> Recipe:
        return Recipe(f"{canonical}.{weight}", (piece,), as_dtype)

    made = [
        one("router.weight", Piece(f"{of}.router.proj.weight", (count, hidden))),
        one("router.scale", Piece(f"{of}.router.per_expert_scale", (count,)), torch.float32),
        one("router_norm.weight", Piece(f"{of}.router.scale", (hidden,), folded), torch.float32),
        one("post_dense_norm.weight", Piece(f"{of}.post_feedforward_layernorm_1.weight", (hidden,))),
        one("pre_experts_norm.weight", Piece(f"{of}.pre_feedforward_layernorm_2.weight", (hidden,))),
        one("post_experts_norm.weight", Piece(f"{of}.post_feedforward_layernorm_2.weight", (hidden,))),
    ]
    for weight, parts, (rows, columns) in (
        ("gate_up", ("gate", "up"), (inner, hidden)),
        ("down", ("down",), (hidden, inner)),
    ):
        whole = len(parts) * rows
        fused = reshaped_piece(f"{of}.experts.{weight}_proj", (count, whole, columns), (count * whole, columns))
        alone = tuple(
            Piece(f"{of}.experts.{number}.{part}_proj.weight", (rows, columns))
            for number in range(count)
            for part in parts
        )
        name = f"{canonical}.experts.{weight}.weight"
        made.append(Recipe(name, (fused,), dtype, count=count, other=Recipe(name, alone, dtype, count=count)))
    return made


def _per_layer_recipes(config: ModelConfig, layer: int, size: int, of: str) -> list[Recipe]:
    dtype, hidden = TORCH_DTYPES[config.dtype], config.hidden_size
    shapes = {
        "per_layer_gate": ("per_layer_input_gate", (size, hidden)),
        "per_layer_out": ("per_layer_projection", (hidden, size)),
        "post_per_layer_norm": ("post_per_layer_input_norm", (hidden,)),
    }
    return [
        Recipe(f"layers.{layer}.{weight}.weight", (Piece(f"{of}.{name}.weight", shape),), dtype)
        for weight, (name, shape) in shapes.items()
    ]


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a Gemma 4."""
    dtype, hidden, size = TORCH_DTYPES[config.dtype], config.hidden_size, config.per_layer_size
    made = gemma_recipes(config, plus_one=False)
    if size is not None:
        width = config.num_layers * size
        shapes = {
            "per_layer_embed": ("embed_tokens_per_layer", (config.vocab_size, width)),
            "per_layer_projection": ("per_layer_model_projection", (width, hidden)),
            "per_layer_norm": ("per_layer_projection_norm", (size,)),
        }
        made += [
            Recipe(f"{weight}.weight", (Piece(f"model.{name}.weight", shape),), dtype)
            for weight, (name, shape) in shapes.items()
        ]
    for layer, spec in enumerate(config.layers):
        of = f"model.layers.{layer}"
        made.append(Recipe(f"layers.{layer}.scalar", (Piece(f"{of}.layer_scalar", (1,)),), torch.float32))
        if size is not None:
            made += _per_layer_recipes(config, layer, size, of)
        if spec.experts is not None:
            made += _expert_recipes(config, layer, spec.experts, of)
    return made
