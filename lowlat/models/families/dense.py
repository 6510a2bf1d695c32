"""This module has common parts of the target families: keys of all configs, and recipes of attention and dense FFN.

It uses the tensor names of transformers' text models. Each family's own keys are in its own module.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats import read_quantisation
from lowlat.checkpoint.recipes import Conversion, Piece, Recipe, Span, picked_piece
from lowlat.checkpoint.tensors import FLOAT_NAMES
from lowlat.models.families.known_keys import HARMLESS_KEYS, check_settled
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import (
    MAX_VOCABULARY,
    check_architecture,
    check_head_counts,
    max_positions,
    parse_rope,
    partial_rotary_dims,
    special_tokens,
)
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec, RopeConfig
from lowlat.models.layers import TORCH_DTYPES

__all__ = [
    "Sizes",
    "attention_recipes",
    "decoder_recipes",
    "dense_recipes",
    "evens_first",
    "outer_recipes",
    "parse_decoder",
    "parse_sizes",
    "plus_one_norm",
    "with_stored_matrices",
]

MAX_WIDTH = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_EXPERTS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = 1 << 30


@dataclass(frozen=True)
class Sizes:
    """The sizes that every decoder's config.json has."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float

    def attention(self, rope: RopeConfig, **further: Any) -> AttentionSpec:
        """The attention spec of layers with these heads; further: other fields of the spec."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, rope=rope, **further
        )

    def model(self) -> dict[str, Any]:
        """The fields of a whole model except max_position, which RoPE scaling may extend."""
        return {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size, "rms_norm_eps": self.rms_norm_eps}


def parse_sizes(
    fields: Fields,
    *,
    default_head_dim: int | None = None,
    default_inner_size: int | None = None,
    default_vocab_size: int | None = None,
    default_max_position: int | None = None,
) -> Sizes:
    """Read and check a decoder's sizes. Without head_dim and a default it is hidden_size / num_attention_heads."""
    hidden_size = fields.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_HEADS, default=num_heads)
    head_dim = fields.optional_integer("head_dim", 2, MAX_HEAD_DIM) or default_head_dim
    if head_dim is None:
        if hidden_size % num_heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads {num_heads}, without head_dim,")
        head_dim = hidden_size // num_heads
    check_head_counts(fields, num_heads, num_kv_heads, head_dim)
    return Sizes(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, MAX_WIDTH, default=default_inner_size),
        num_layers=fields.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", 1, MAX_VOCABULARY, default=default_vocab_size),
        max_position=fields.integer("max_position_embeddings", 1, MAX_POSITIONS, default=default_max_position),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-12, 1.0),
    )


def parse_decoder(
    fields: Fields,
    directory: Path,
    dtype: ComputeDtype,
    *,
    family: str,
    architecture: str | tuple[str, ...],
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    experts: ExpertsSpec | None = None,
    windows: Sequence[int | None] = (),
    partial: float | None = None,
    scale: float | None = None,
    tied: bool = False,
    rope: RopeConfig | None = None,
    default_theta: float = 10000.0,
    rope_keys: Collection[str] = (),
    harmless: Collection[str] = (),
) -> ModelConfig:
    """Read the geometry of a decoder whose layers differ only in windows, from the keys that families share.

    architecture  the class, or the classes, that its configs name
    experts       replace the dense FFN; None: the FFN is dense
    windows       of the layers, in order; (): no layer has a window
    partial       the default of partial_rotary_factor, the share of a head that RoPE rotates; None: it rotates all
    scale         of scores
    rope          of the layers, if the family has read it; None: it is read here, one for all layers
    tied          the default of tie_word_embeddings
    rope_keys     keys of rope_parameters that the family reads itself
    harmless      keys of the config that the family reads itself, or that have no effect
    The family must read its own keys before, since every key that was not read is refused here. Raises ConfigError.
    """
    check_architecture(fields, (architecture,) if isinstance(architecture, str) else architecture)
    check_settled(fields, qk_norm=qk_norm)
    fields.refuse_unless("hidden_act", ("silu", "swish"), "only the SiLU gate")
    quantisation = read_quantisation(fields, directory)
    sizes = parse_sizes(fields, default_head_dim=default_head_dim)
    ends, begin = special_tokens(directory, fields, sizes.vocab_size)
    if rope is None:
        rope = parse_rope(
            fields,
            max_position=sizes.max_position,
            default_theta=default_theta,
            partial=partial is not None,
            known=rope_keys,
            head_dim=sizes.head_dim,
        )
    dims = sizes.head_dim if partial is None else partial_rotary_dims(fields, sizes.head_dim, default=partial)
    rotary = None if dims == sizes.head_dim else dims
    mixer = sizes.attention(
        rope, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=qk_norm, scale=scale, rotary_dims=rotary
    )
    ffn = DenseSpec(inner_size=sizes.intermediate_size, bias=mlp_bias) if experts is None else experts
    config = ModelConfig(
        family=family,
        **sizes.model(),
        max_position=max_positions(rope, sizes.max_position),
        layers=tuple(
            LayerSpec(mixer=replace(mixer, window=window), ffn=ffn) for window in windows or (None,) * sizes.num_layers
        ),
        tie_embeddings=fields.boolean("tie_word_embeddings", tied),
        dtype=dtype,
        eos_token_ids=ends,
        bos_token_id=begin,
        quantisation=quantisation,
        drops_windows=True,
    )
    fields.refuse_unknown(HARMLESS_KEYS.union(harmless))
    return config


def evens_first(piece: Piece, head_dim: int, dims: int) -> Piece:
    """Reorder rows of queries or keys of a model whose RoPE rotates neighbours, pairs (2i, 2i + 1) of a head's `dims`.

    With even rows before odd ones these become pairs (i, i + dims / 2), which lowlat rotates.
    """
    return picked_piece(piece, _evens_first(piece.shape[0], head_dim, dims))


@lru_cache(maxsize=64)  # all layers have the same
def _evens_first(rows: int, head_dim: int, dims: int) -> tuple[Span, ...]:
    """Spans of the rows, see `evens_first`."""
    spans = [(row, row + 1) for row in (*range(0, dims, 2), *range(1, dims, 2))]
    spans += [(dims, head_dim)] if dims < head_dim else []
    return tuple((head + start, head + stop) for head in range(0, rows, head_dim) for start, stop in spans)


def plus_one_norm(weight: str, tensor: str, size: int) -> Recipe:
    """The recipe of a norm that multiplies by 1 + w, with w in files: the canonical weight is 1 + w in float32."""
    added = Conversion((size,), tuple(FLOAT_NAMES), lambda label, stored: 1 + stored.float())
    return Recipe(weight, (Piece(tensor, (size,), added),), torch.float32)


def outer_recipes(config: ModelConfig) -> list[Recipe]:
    """Recipes of embedding, final norm, and the LM head, unless it is the embedding."""
    dtype = TORCH_DTYPES[config.dtype]
    table = (config.vocab_size, config.hidden_size)
    recipes = [
        Recipe("embed.weight", (Piece("model.embed_tokens.weight", table),), dtype),
        Recipe("norm.weight", (Piece("model.norm.weight", (config.hidden_size,)),), dtype),
    ]
    if not config.tie_embeddings:
        recipes.append(Recipe("lm_head.weight", (Piece("lm_head.weight", table),), dtype))
    return recipes


def attention_recipes(config: ModelConfig, layer: int) -> list[Recipe]:
    """Recipes of one layer's norms, fused projections, biases, query and key norms, and sinks."""
    dtype, spec = TORCH_DTYPES[config.dtype], config.attentions[layer]
    stored, canonical = f"model.layers.{layer}", f"layers.{layer}"
    hidden, rows = config.hidden_size, {"q": spec.query_size, "k": spec.kv_size, "v": spec.kv_size}
    attention = f"{stored}.self_attn"

    def one(weight: str, name: str, *shape: int, as_dtype: torch.dtype = dtype) -> Recipe:
        return Recipe(f"{canonical}.{weight}", (Piece(name, shape),), as_dtype)

    fused = tuple(Piece(f"{attention}.{part}_proj.weight", (count, hidden)) for part, count in rows.items())
    recipes = [
        one("attn_norm.weight", f"{stored}.input_layernorm.weight", hidden),
        Recipe(f"{canonical}.qkv.weight", fused, dtype),
        one("o.weight", f"{attention}.o_proj.weight", hidden, spec.query_size),
        one("ffn_norm.weight", f"{stored}.post_attention_layernorm.weight", hidden),
    ]
    if spec.qkv_bias:
        biases = tuple(Piece(f"{attention}.{part}_proj.bias", (count,)) for part, count in rows.items())
        recipes.append(Recipe(f"{canonical}.qkv.bias", biases, dtype))
    if spec.output_bias:
        recipes.append(one("o.bias", f"{attention}.o_proj.bias", hidden))
    if spec.qk_norm:
        recipes += [one(f"{part}_norm.weight", f"{attention}.{part}_norm.weight", spec.head_dim) for part in "qk"]
    if spec.sinks:
        recipes.append(one("sinks", f"{attention}.sinks", spec.num_heads, as_dtype=torch.float32))
    return recipes


def dense_recipes(config: ModelConfig, layer: int) -> list[Recipe]:
    """Recipes of one layer's gated FFN; [] if the layer has another FFN."""
    dtype, ffn = TORCH_DTYPES[config.dtype], config.layers[layer].dense
    if ffn is None:
        return []
    stored, canonical = f"model.layers.{layer}.mlp", f"layers.{layer}"
    hidden, inner = config.hidden_size, ffn.inner_size
    gates = tuple(Piece(f"{stored}.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up"))
    recipes = [
        Recipe(f"{canonical}.gate_up.weight", gates, dtype),
        Recipe(f"{canonical}.down.weight", (Piece(f"{stored}.down_proj.weight", (hidden, inner)),), dtype),
    ]
    if ffn.bias:
        biases = tuple(Piece(f"{stored}.{part}_proj.bias", (inner,)) for part in ("gate", "up"))
        recipes += [
            Recipe(f"{canonical}.gate_up.bias", biases, dtype),
            Recipe(f"{canonical}.down.bias", (Piece(f"{stored}.down_proj.bias", (hidden,)),), dtype),
        ]
    return recipes


def decoder_recipes(
    config: ModelConfig, ffn_recipes: Callable[[ModelConfig, int], list[Recipe]] = dense_recipes
) -> list[Recipe]:
    """The recipes of all canonical weights of a decoder; ffn_recipes: makes those of one layer's FFN or experts."""
    made = outer_recipes(config)
    for layer in range(config.num_layers):
        made += attention_recipes(config, layer)
        made += ffn_recipes(config, layer)
    return made


def with_stored_matrices(recipes: Iterable[Recipe], paths: Mapping[str, str]) -> list[Recipe]:
    """Change recipes of layers' matrices that files store as one matrix each.

    paths  the matrix's path in a stored layer, by its canonical name, such as "gate_up"
    """

    def own(recipe: Recipe) -> Recipe:
        layer, _, name = recipe.weight.removesuffix(".weight").rpartition(".")
        if name not in paths:
            return recipe
        return replace(recipe, pieces=(Piece(f"model.{layer}.{paths[name]}.weight", recipe.shape),))

    return list(map(own, recipes))
