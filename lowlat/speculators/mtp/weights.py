"""This module makes the MTP layer's canonical weights, by the recipes of the target's family for its own layers."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from lowlat.checkpoint.formats import narrowed, part_groups
from lowlat.checkpoint.recipes import Piece, Recipe, check_recipes, chosen_recipes
from lowlat.checkpoint.stored import StoredWeights
from lowlat.checkpoint.tensors import Checkpoint
from lowlat.models.families import FAMILIES
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.speculators.draft_parts import DRAFT_MAP, one_piece, own_weight_plan
from lowlat.speculators.mtp.config import FC, PREFIX
from lowlat.speculators.mtp.geometry import MtpConfig

__all__ = ["load_mtp", "mtp_recipes", "mtp_weight_plan"]

STORED, CANONICAL = "layers.0.", "layers.0."  # prefix of the only layer, in names of tensors and of weights
FUSED = "qkv"
# canonical weights of the norms outside of the layer -> their tensors
NORMS = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"}
DTYPES: Mapping[torch.dtype, ComputeDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def mtp_recipes(config: MtpConfig, dtype: torch.dtype) -> list[Recipe]:
    """The recipes of all canonical weights of the layer from the target's tensors; quantised ones have parts.

    The layer computes queries for fewer rows than keys and values, so the family's fused projection is split.
    """
    whole = ModelConfig(
        family=config.family,
        tie_embeddings=True,
        dtype=DTYPES[dtype],
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        rms_norm_eps=config.rms_norm_eps,
        layers=config.layers,
    )
    recipes = chosen_recipes(FAMILIES[config.family].recipes(whole), None, others=not config.fused_experts)
    family = {recipe.weight: recipe for recipe in recipes}
    made = [one_piece("draft_model.fc.weight", FC, dtype, config.hidden_size, 2 * config.hidden_size)]
    for weight, tensor in NORMS.items():
        made.append(_renamed(family["norm.weight"], f"draft_model.{weight}.weight", f"{PREFIX}{tensor}.weight"))
    for weight, recipe in family.items():
        if not weight.startswith(CANONICAL):
            continue
        own = weight.removeprefix(CANONICAL)
        recipe = replace(recipe, weight=f"draft_model.{own}", pieces=tuple(map(_moved, recipe.pieces)))
        made += _apart(recipe, own.removeprefix(f"{FUSED}.")) if own.startswith(f"{FUSED}.") else [recipe]
    return made if config.quantisation is None else config.quantisation.apply(made)


def _renamed(recipe: Recipe, weight: str, tensor: str) -> Recipe:
    (piece,) = recipe.pieces
    return replace(recipe, weight=weight, pieces=(replace(piece, name=tensor),))


def _moved(piece: Piece) -> Piece:
    """Rename a piece of the family's first layer to its name in the MTP layer."""
    _, found, rest = piece.name.partition(STORED)
    if not found:
        raise ValueError(f"expected a tensor of layer 0, found {piece.name}")
    conversion = piece.conversion
    if conversion is not None:
        conversion = replace(conversion, beside=tuple(map(_moved, conversion.beside)))
    return replace(piece, name=f"{PREFIX}{STORED}{rest}", conversion=conversion)


def _apart(recipe: Recipe, part: str) -> list[Recipe]:
    """Split the recipe of a fused projection into one of queries, and one of keys with values."""
    query, *others = recipe.pieces
    return [
        replace(recipe, weight=f"draft_model.q.{part}", pieces=(query,)),
        replace(recipe, weight=f"draft_model.kv.{part}", pieces=tuple(others)),
    ]


def mtp_weight_plan(config: MtpConfig, dtype: torch.dtype) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical name -> (shape, dtype) of every weight that the target itself does not have."""
    return own_weight_plan(config, mtp_recipes(config, dtype), dtype)


def load_mtp(config: MtpConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Load the layer's weights by canonical name, on the CPU.

    Raises ConfigError, which names file, tensor, expected and found.
    """
    recipes = mtp_recipes(config, dtype)
    others = {name for name in checkpoint.entries if not name.startswith(PREFIX)}
    unused = set() if config.quantisation is None else config.quantisation.unused(checkpoint)
    check_recipes(checkpoint, recipes, others | unused)
    groups = part_groups(narrowed(recipes, checkpoint.entries), checkpoint.entries)
    weights = StoredWeights(checkpoint, groups).loaded()
    return {**weights, DRAFT_MAP: torch.arange(config.draft_vocab_size, dtype=torch.int32)}
