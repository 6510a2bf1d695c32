"""This module makes the canonical weights of DFlash draft models, from names and shapes; it reads no configs.

A layer computes keys and values for two kinds of rows: for the block's rows together with the queries, for the target's
features together with all other layers'. So each layer's projection of keys and values is kept twice.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from lowlat.checkpoint.recipes import Piece, Recipe
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.speculators.dflash.config import parse_dflash
from lowlat.speculators.dflash.geometry import DflashConfig
from lowlat.speculators.draft_files.weights import LoadedDraftModel, load_tensors
from lowlat.speculators.draft_parts import layer_recipes, one_piece, own_weight_plan, table_recipes

__all__ = ["dflash_recipes", "dflash_weight_plan", "load_dflash"]


def dflash_recipes(config: DflashConfig, dtype: torch.dtype) -> list[Recipe]:
    """The recipes of all canonical weights but the draft map; pieces have names without `model.`."""
    hidden = config.hidden_size

    def one(weight: str, tensor: str, *shape: int) -> Recipe:
        return one_piece(f"draft_model.{weight}", tensor, dtype, *shape)

    made = [
        one("fc.weight", "fc.weight", hidden, len(config.capture_boundaries) * config.target_hidden_size),
        one("hidden_norm.weight", "hidden_norm.weight", hidden),
        one("norm.weight", "norm.weight", hidden),
    ]
    norms = {"attn_norm": "input_layernorm"}
    for layer in range(config.num_layers):
        spec, names = config.layers[layer], (f"draft_model.layers.{layer}", f"layers.{layer}")
        products = (config.attention.projected,)
        made += layer_recipes(spec, hidden, dtype, names, products=products, columns=hidden, norms=norms)
    made += _dflash2(config, dtype)
    made += [
        _context(config, dtype, "weight", hidden),
        *([_context(config, dtype, "bias")] if config.attention.qkv_bias else []),
    ]
    made += table_recipes(config, dtype)
    return made if config.quantisation is None else config.quantisation.apply(made)


def _dflash2(config: DflashConfig, dtype: torch.dtype) -> list[Recipe]:
    """The recipes of the layers' convolutions and of the selector; [] without these."""
    hidden, made = config.hidden_size, list[Recipe]()
    if config.conv is not None:
        taps, wide = config.conv.taps, 2 * config.conv.taps * (hidden // config.conv.group)
        for layer in range(config.num_layers):
            for part, stored in (("attn_conv", "attention_conv"), ("ffn_conv", "mlp_conv")):
                name, own = f"draft_model.layers.{layer}.{part}", f"layers.{layer}.{stored}"
                made.append(one_piece(f"{name}.base", f"{own}.base_kernel", dtype, 2, taps, hidden))
                made.append(one_piece(f"{name}.project.weight", f"{own}.kernel_projection.weight", dtype, wide, hidden))
    if config.selector is not None:
        rank, own = config.selector.rank, "candidate_selector"
        shape, table = (rank, hidden), (config.vocab_size, rank)
        made.append(one_piece("draft_model.selector.project.weight", f"{own}.hidden_projection.weight", dtype, *shape))
        for part in ("predecessor", "successor"):
            made.append(one_piece(f"draft_model.selector.{part}s", f"{own}.{part}_codebook", dtype, *table))
    return made


def _context(config: DflashConfig, dtype: torch.dtype, part: str, *width: int) -> Recipe:
    """The recipe of all layers' key and value projections, one layer after another."""
    pieces = tuple(
        Piece(f"layers.{layer}.self_attn.{each}_proj.{part}", (spec.kv_size, *width))
        for layer, spec in config.attentions.items()
        for each in config.context
    )
    return Recipe(f"draft_model.context.{config.context}.{part}", pieces, dtype)


def dflash_weight_plan(config: DflashConfig, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical name -> (shape, dtype) of every weight of the draft model itself, in a compute dtype."""
    return own_weight_plan(config, dflash_recipes(config, TORCH_DTYPES[dtype]), TORCH_DTYPES[dtype])


def load_dflash(
    directory: str | Path, target: ModelConfig, *, capture_layers: tuple[int, ...] | None = None
) -> LoadedDraftModel[DflashConfig]:
    """Load a DFlash draft model in its target's dtype: geometry, and weights by canonical name, on the CPU.

    capture_layers  boundaries that override the config's
    Raises ConfigError, which names file, tensor, expected and found.
    """
    config, tensors = parse_dflash(Path(directory), target, capture_layers)
    weights = load_tensors(config, tensors, dflash_recipes(config, TORCH_DTYPES[target.dtype]))
    return LoadedDraftModel(config, weights, tensors.checkpoint.directory, ())
