"""This module makes the canonical weights of DSpark draft models, from names and shapes; it reads no configs.

A gate's projection reads a row's state concatenated with a token's vector. It is split in two, since the state's part
can be computed for all rows before the first token is drafted.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from lowlat.checkpoint.recipes import Recipe
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.speculators.dflash.geometry import DflashConfig
from lowlat.speculators.dflash.weights import dflash_recipes, dflash_weight_plan
from lowlat.speculators.draft_files.weights import LoadedDraftModel, load_tensors
from lowlat.speculators.draft_parts import one_piece
from lowlat.speculators.dspark.config import parse_dspark
from lowlat.speculators.dspark.geometry import DsparkConfig

__all__ = ["dspark_recipes", "dspark_weight_plan", "load_dspark"]

GATE, STATE_GATE, TOKEN_GATE = (f"draft_model.markov.{name}.weight" for name in ("gate", "state_gate", "token_gate"))
CONFIDENCE = ("draft_model.confidence.weight", "draft_model.confidence.bias")  # checked at load; no step reads them


def dspark_recipes(config: DsparkConfig, dtype: torch.dtype) -> list[Recipe]:
    """The recipes of all weights but the draft map, as stored: the gate in one, and the confidence head included."""
    return [*dflash_recipes(config, dtype), *_head_recipes(config, dtype)]


def _head_recipes(config: DsparkConfig, dtype: torch.dtype) -> list[Recipe]:
    """The recipes of the heads after the block's rows, as stored."""
    hidden, rank, made = config.hidden_size, config.markov_rank, list[Recipe]()
    if rank:
        stored = "markov_head.markov_"
        made.append(one_piece("draft_model.markov.tokens.weight", f"{stored}w1.weight", dtype, config.vocab_size, rank))
        made.append(
            one_piece("draft_model.markov.bias.weight", f"{stored}w2.weight", dtype, config.draft_vocab_size, rank)
        )
    if config.markov_gated:
        made.append(one_piece(GATE, "markov_head.gate_proj.weight", dtype, rank, hidden + rank))
        made.append(one_piece("draft_model.markov.state_gate.bias", "markov_head.gate_proj.bias", dtype, rank))
    if config.confidence:
        width = hidden + (rank if config.confidence_markov else 0)
        made.append(one_piece(CONFIDENCE[0], "confidence_head.proj.weight", dtype, 1, width))
        made.append(one_piece(CONFIDENCE[1], "confidence_head.proj.bias", dtype, 1))
    return made


def dspark_weight_plan(config: DsparkConfig, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical name -> (shape, dtype) of every weight of the draft model itself, in a compute dtype."""
    recipes = [recipe for recipe in _head_recipes(config, TORCH_DTYPES[dtype]) if recipe.weight not in CONFIDENCE]
    own = {recipe.weight: (recipe.shape, recipe.dtype) for recipe in recipes}
    if GATE in own:
        (rank, both), stored = own.pop(GATE)
        own |= {STATE_GATE: ((rank, both - rank), stored), TOKEN_GATE: ((rank, rank), stored)}
    return MappingProxyType({**dflash_weight_plan(config, dtype), **own})


def load_dspark(
    directory: str | Path, target: ModelConfig, *, capture_layers: tuple[int, ...] | None = None
) -> LoadedDraftModel[DflashConfig]:
    """Load a DSpark draft model in its target's dtype: geometry, and weights by canonical name, on the CPU.

    capture_layers  boundaries that override the config's
    Raises ConfigError, which names file, tensor, expected and found.
    """
    config, tensors = parse_dspark(Path(directory), target, capture_layers)
    weights = load_tensors(config, tensors, dspark_recipes(config, TORCH_DTYPES[target.dtype]))
    if GATE in weights:
        both = weights.pop(GATE)
        weights[STATE_GATE] = both[:, : config.hidden_size].contiguous()
        weights[TOKEN_GATE] = both[:, config.hidden_size :].contiguous()
    for name in CONFIDENCE:
        weights.pop(name, None)
    return LoadedDraftModel(config, weights, tensors.checkpoint.directory, ())
