"""This module makes the canonical weights of EAGLE3 draft models.

It uses the names of `tensors`; `config` and `draft_file` read configs and layouts.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from lowlat.checkpoint.recipes import Progress, Recipe
from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.speculators.draft_files.weights import LoadedDraftModel, load_tensors
from lowlat.speculators.draft_parts import layer_recipes, one_piece, own_weight_plan, table_recipes
from lowlat.speculators.eagle3.config import EAGLE3, DraftKind, parse_draft
from lowlat.speculators.eagle3.emitter import layer_name
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.tensors import MASK_HIDDEN

__all__ = ["draft_recipes", "draft_weight_plan", "load_draft_model"]


def draft_recipes(config: Eagle3Config, dtype: torch.dtype) -> list[Recipe]:
    """The recipes of all canonical weights of a draft model but the draft map; pieces have normalised names."""
    hidden, width, features = config.hidden_size, config.target_hidden_size, len(config.capture_boundaries)

    def one(weight: str, name: str, *shape: int) -> Recipe:
        return one_piece(f"draft_model.{weight}", name, dtype, *shape)

    made = [] if config.final_hidden else [one("fc.weight", "fc.weight", hidden, features * width)]
    for layer in range(config.num_layers):
        made += _layer_recipes(config, dtype, layer)
    made.append(one("norm.weight", "norm.weight", hidden))
    if config.norm_before_fc:
        made.append(one("input_norm.weight", "input_norm.weight", features * width))
    if config.fc_norm:
        made += [one(f"fc_norm.{k}.weight", f"fc_norm.{k}.weight", width) for k in range(features)]
    made += table_recipes(config, dtype)
    return made if config.quantisation is None else config.quantisation.apply(made)


def _layer_recipes(config: Eagle3Config, dtype: torch.dtype, layer: int) -> list[Recipe]:
    """The recipes of one layer: the first reads embedding and feature, concatenated, the others the layer before.

    The last layer computes keys and values for more rows than queries, so their projections are separate.
    """
    hidden, letters = config.hidden_size, config.attentions[layer].projected
    products = ("q", letters.removeprefix("q")) if layer == config.num_layers - 1 else (letters,)
    norms = {"attn_norm": "input_layernorm"}
    if not layer:
        norms = {"embed_norm": "input_layernorm", "hidden_norm": "hidden_norm"}
    columns = hidden if layer else 2 * hidden
    names = (layer_name(layer), f"layers.{layer}")
    return layer_recipes(config.layers[layer], hidden, dtype, names, products=products, columns=columns, norms=norms)


def draft_weight_plan(
    config: Eagle3Config, *, dtype: str = "bfloat16"
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Canonical name -> (shape, dtype) of every weight of the draft model itself, in a compute dtype.

    Embedding and LM head are absent if they are the target's. Raises ConfigError for another dtype.
    """
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be 'bfloat16' or 'float32', got {dtype!r}")
    return own_weight_plan(config, draft_recipes(config, TORCH_DTYPES[dtype]), TORCH_DTYPES[dtype])


def load_draft_model(
    directory: str | Path,
    target: ModelConfig,
    *,
    capture_layers: tuple[int, ...] | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
    kind: DraftKind = EAGLE3,
) -> LoadedDraftModel[Eagle3Config]:
    """Load an EAGLE3 draft model for a target: geometry, and weights by canonical name, on the CPU.

    capture_layers  boundaries that override the config's
    dtype           "bfloat16" or "float32", whatever the stored dtype; None: the target's
    progress        called with (bytes done, bytes in all)
    kind            the method that it must belong to; P-EAGLE's `mask_hidden` is left out
    draft_model.draft_to_target is always present, int32; it is the identity if the whole vocabulary is drafted. Raises
    ConfigError, which names file, tensor, expected and found.
    """
    directory = Path(directory)
    name = target.dtype if dtype is None else dtype
    if name not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be 'bfloat16' or 'float32', got {name!r}")
    config, tensors, notes = parse_draft(directory, target, capture_layers, kind)
    unused = (MASK_HIDDEN, *(("fc.weight",) if config.final_hidden else ()))
    recipes = draft_recipes(config, TORCH_DTYPES[name])
    return LoadedDraftModel(config, load_tensors(config, tensors, recipes, unused, progress), directory, notes)
