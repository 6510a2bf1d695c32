"""DFlash draft models: canonical weights. It knows names and shapes, and no layout of configs.

A layer's keys and values are made of two kinds of rows, so their projection stands apart from the queries'.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from lowlat.checkpoint.recipes import Piece, Recipe, check_recipes
from lowlat.checkpoint.stored import Group, StoredWeights
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.models.weight_plan import rounded_plan
from lowlat.speculators.dflash.config import parse_dflash
from lowlat.speculators.eagle3.weights import DRAFT_MAP, LoadedDraftModel, read_draft_map, stored_recipe, unused_tensors

__all__ = ["dflash_weight_plan", "load_dflash"]


def dflash_recipes(config: DraftConfig, dtype: torch.dtype) -> list[Recipe]:
    """How every canonical weight but the draft map is made, of pieces by name without `model.`."""
    hidden = config.hidden_size

    def one(weight: str, name: str, *shape: int) -> Recipe:
        return Recipe(f"head.{weight}", (Piece(name, shape),), dtype)

    made = [
        one("fc.weight", "fc.weight", hidden, len(config.capture_boundaries) * config.target_hidden_size),
        one("hidden_norm.weight", "hidden_norm.weight", hidden),
        one("norm.weight", "norm.weight", hidden),
    ]
    for layer in range(config.num_layers):
        made += _layer_recipes(config, dtype, layer)
    if config.own_embedding:
        made.append(one("embed.weight", "embed_tokens.weight", config.vocab_size, hidden))
    if config.own_lm_head:
        made.append(one("lm_head.weight", "lm_head.weight", config.draft_vocab_size, hidden))
    return made if config.quantisation is None else config.quantisation.apply(made)


def _layer_recipes(config: DraftConfig, dtype: torch.dtype, layer: int) -> list[Recipe]:
    own, hidden, inner = f"layers.{layer}", config.hidden_size, config.intermediate_size
    rows = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}

    def one(weight: str, tensor: str, *shape: int) -> Recipe:
        return Recipe(f"head.{own}.{weight}", (Piece(f"{own}.{tensor}", shape),), dtype)

    def projections(names: str, part: str, *columns: int) -> Recipe:
        pieces = tuple(Piece(f"{own}.self_attn.{each}_proj.{part}", (rows[each], *columns)) for each in names)
        return Recipe(f"head.{own}.{names}.{part}", pieces, dtype)

    gates = tuple(Piece(f"{own}.mlp.{each}_proj.weight", (inner, hidden)) for each in ("gate", "up"))
    made = [
        one("attn_norm.weight", "input_layernorm.weight", hidden),
        projections("q", "weight", hidden),
        projections("kv", "weight", hidden),
        one("o.weight", "self_attn.o_proj.weight", hidden, config.query_size),
        one("ffn_norm.weight", "post_attention_layernorm.weight", hidden),
        Recipe(f"head.{own}.gate_up.weight", gates, dtype),
        one("down.weight", "mlp.down_proj.weight", hidden, inner),
    ]
    if config.qkv_bias:
        made += [projections("q", "bias"), projections("kv", "bias")]
    if config.output_bias:
        made.append(one("o.bias", "self_attn.o_proj.bias", hidden))
    if config.qk_norm:
        made += [one(f"{part}_norm.weight", f"self_attn.{part}_norm.weight", config.head_dim) for part in "qk"]
    return made


def dflash_weight_plan(config: DraftConfig, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical name -> (shape, dtype) of every weight of a draft model's own, in a compute dtype."""
    plan = {recipe.weight: (recipe.shape, recipe.dtype) for recipe in dflash_recipes(config, TORCH_DTYPES[dtype])}
    plan[DRAFT_MAP] = ((config.draft_vocab_size,), torch.int32)
    return MappingProxyType(rounded_plan(plan, config.quantiser))


def load_dflash(
    directory: str | Path, target: ModelConfig, *, capture_layers: tuple[int, ...] | None = None
) -> LoadedDraftModel:
    """Load a DFlash draft model in its target's dtype: geometry, and weights by canonical name, on the CPU.

    capture_layers, boundaries, overrides what the config says. Raises ConfigError naming file, tensor, expected and
    found.
    """
    directory = Path(directory)
    config, tensors = parse_dflash(directory, target, capture_layers)
    draft_map = read_draft_map(tensors, config.draft_vocab_size, config.vocab_size)
    ignored = unused_tensors(config, tensors) | {tensors.stored[name] for name in ("d2t", "t2d") if name in tensors}
    recipes = [stored_recipe(each, tensors) for each in dflash_recipes(config, TORCH_DTYPES[target.dtype])]
    check_recipes(tensors.checkpoint, recipes, ignored)
    weights = StoredWeights(tensors.checkpoint, [Group((recipe,)) for recipe in recipes]).loaded()
    return LoadedDraftModel(config, {**weights, DRAFT_MAP: draft_map}, directory, ())
