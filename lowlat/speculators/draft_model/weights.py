"""This module makes the canonical weights of a whole draft model: those of a target, cut to the vocabulary."""

from pathlib import Path
from types import MappingProxyType

import torch

from lowlat.kernels.formats import dequantised
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.models.target import open_target, target_recipes
from lowlat.models.weight_plan import WeightPlan, rounded_plan
from lowlat.speculators.draft_model.geometry import OWNER, WholeDraftConfig
from lowlat.speculators.draft_parts import DRAFT_MAP

__all__ = ["load_whole", "whole_weight_plan"]

EMBED, LM_HEAD = "embed.weight", "lm_head.weight"
TABLES = (EMBED, "per_layer_embed.weight")  # tables with a row for each token


def whole_weight_plan(config: WholeDraftConfig) -> WeightPlan:
    """Canonical name -> (shape, dtype) of every weight with its own storage, and of the map of draft ids."""
    plan = {recipe.weight: (recipe.shape, recipe.dtype) for recipe in target_recipes(config.decoder)}
    for name in TABLES:
        if name in plan:
            (_, *width), dtype = plan[name]
            plan[name] = ((config.vocab_size, *width), dtype)
    if not config.shares_head and (config.tie_embeddings or _cuts_head(config)):
        plan = {name: spec for name, spec in plan.items() if not name.startswith("lm_head.")}
        plan[LM_HEAD] = ((config.draft_vocab_size, config.hidden_size), TORCH_DTYPES[config.dtype])
    made = rounded_plan(plan, config.quantiser, tied=config.shares_head)
    named = {f"{OWNER}{name}": spec for name, spec in made.items()}
    return MappingProxyType({**named, DRAFT_MAP: ((config.draft_vocab_size,), torch.int32)})


def load_whole(directory: Path, config: WholeDraftConfig, target: ModelConfig) -> dict[str, torch.Tensor]:
    """Load the weights by canonical name, on the CPU. Raises ConfigError, which names file, tensor, expected and found.

    A tied LM head is the embedding's tensor itself if both have the same rows.
    """
    weights = dict(open_target(directory, dtype=target.dtype).weights.loaded())
    whole = weights[EMBED]
    for name in TABLES:
        if name in weights:
            weights[name] = _with_rows(weights[name], config.vocab_size)
    if config.shares_head:
        weights[LM_HEAD] = weights[EMBED]
    elif config.tie_embeddings or _cuts_head(config):
        lm_head = whole if config.tie_embeddings else dequantised(LM_HEAD, weights)
        weights = {name: tensor for name, tensor in weights.items() if not name.startswith("lm_head.")}
        weights[LM_HEAD] = lm_head[: config.draft_vocab_size].to(TORCH_DTYPES[config.dtype]).contiguous()
    named = {f"{OWNER}{name}": tensor for name, tensor in weights.items()}
    return {**named, DRAFT_MAP: torch.arange(config.draft_vocab_size, dtype=torch.int32)}


def _cuts_head(config: WholeDraftConfig) -> bool:
    """Whether the LM head has fewer rows than its files."""
    return config.is_cut or config.draft_vocab_size < config.stored_vocab_size


def _with_rows(table: torch.Tensor, count: int) -> torch.Tensor:
    """Give a table `count` rows: drop rows of ids that the target lacks, and add zeros for ids that the table lacks."""
    if table.shape[0] == count:
        return table
    made = table.new_zeros(count, *table.shape[1:])
    kept = min(count, table.shape[0])
    made[:kept] = table[:kept]
    return made
