"""This module makes the MTP layer's canonical weights as the target's family makes those of its layers."""

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

STORED, CANONICAL = "layers.0.", "layers.0."  # of the only layer, in names of tensors and of weights
FUSED = "qkv"
# canonical weights of norms that are none of the layer's -> their tensors
NORMS = {"embed_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "norm": "norm"}
DTYPES: Mapping[torch.dtype, ComputeDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def mtp_recipes(config: MtpConfig, dtype: torch.dtype) -> list[Recipe]:
    """How every canonical weight of the layer is made of the target's tensors, by part where they are quantised.

    Of the attention queries are made of fewer rows than keys and values: the family's fused projection is taken apart.
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
    """A piece of the family's first layer, by the name that it has in the MTP layer."""
    _, found, rest = piece.name.partition(STORED)
    if not found:
        raise ValueError(f"expected a tensor of layer 0, found {piece.name}")
    conversion = piece.conversion
    if conversion is not None:
        conversion = replace(conversion, beside=tuple(map(_moved, conversion.beside)))
    return replace(piece, name=f"{PREFIX}{STORED}{rest}", conversion=conversion)


def _apart(recipe: Recipe, part: str) -> list[Recipe]:
    """Queries, and keys with values, of the projection of all three."""
    query, *others = recipe.pieces
    return [
        replace(recipe, weight=f"draft_model.q.{part}", pieces=(query,)),
        replace(recipe, weight=f"draft_model.kv.{part}", pieces=tuple(others)),
    ]


def mtp_weight_plan(config: MtpConfig, dtype: torch.dtype) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical name -> (shape, dtype) of every weight that the target does not have under a name of its own."""
    return own_weight_plan(config, mtp_recipes(config, dtype), dtype)


def load_mtp(config: MtpConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The layer's weights by canonical name, on the CPU. Raises ConfigError naming file, tensor, expected and found."""
    recipes = mtp_recipes(config, dtype)
    others = {name for name in checkpoint.entries if not name.startswith(PREFIX)}
    unused = set() if config.quantisation is None else config.quantisation.unused(checkpoint)
    check_recipes(checkpoint, recipes, others | unused)
    groups = part_groups(narrowed(recipes, checkpoint.entries), checkpoint.entries)
    weights = StoredWeights(checkpoint, groups).loaded()
    return {**weights, DRAFT_MAP: torch.arange(config.draft_vocab_size, dtype=torch.int32)}
