"""This module makes the canonical weights of EAGLE3 draft models, and checks the map of draft ids to target ids.

It knows the normalised names of head tensors; `config` and `draft_file` read configs and layouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from lowlat.checkpoint.formats import narrowed
from lowlat.checkpoint.recipes import Progress, Recipe, check_recipes, renamed_recipe
from lowlat.checkpoint.stored import Group, StoredWeights
from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.speculators.draft_parts import DRAFT_MAP, layer_recipes, one_piece, own_weight_plan, table_recipes
from lowlat.speculators.eagle3.config import EAGLE3, DraftKind, parse_draft
from lowlat.speculators.eagle3.emitter import layer_name
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.tensors import MASK_HIDDEN, DraftTensors

__all__ = [
    "LoadedDraftModel", "draft_recipes", "draft_weight_plan", "load_draft_model", "load_tensors", "read_draft_map",
    "stored_recipe", "unused_tensors",
]  # fmt: skip

Config = TypeVar("Config", bound=DraftConfig)


@dataclass(frozen=True)
class LoadedDraftModel(Generic[Config]):
    """A draft model's geometry, its weights on the CPU by canonical name, and notes for its user."""

    config: Config
    weights: dict[str, torch.Tensor]
    directory: Path
    notes: tuple[str, ...]


def draft_recipes(config: Eagle3Config, dtype: torch.dtype) -> list[Recipe]:
    """How every canonical weight of a draft model but the draft map is made, of pieces by normalised name."""
    hidden, width, features = config.hidden_size, config.target_hidden_size, len(config.capture_boundaries)

    def one(weight: str, name: str, *shape: int) -> Recipe:
        return one_piece(f"head.{weight}", name, dtype, *shape)

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
    """The weights of one layer: the first reads embedding and feature side by side, the others the layer before.

    Of the last, keys and values are made of more rows than queries are.
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
    """Canonical name -> (shape, dtype) of every weight of a draft model's own, in a compute dtype.

    Embedding and LM head are absent where they are the target's. Raises ConfigError for another dtype.
    """
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be 'bfloat16' or 'float32', got {dtype!r}")
    return own_weight_plan(config, draft_recipes(config, TORCH_DTYPES[dtype]), TORCH_DTYPES[dtype])


def stored_recipe(recipe: Recipe, tensors: DraftTensors) -> Recipe:
    """The recipe with the names that this head's file uses."""
    return renamed_recipe(recipe, lambda name: tensors.stored.get(name, name))


def unused_tensors(config: DraftConfig, tensors: DraftTensors) -> set[str]:
    """Stored names of tensors that nobody needs."""
    quantisation = config.quantisation
    return tensors.ignored() | (set() if quantisation is None else quantisation.unused(tensors.checkpoint))


def _vocabulary_tensor(tensors: DraftTensors, name: str, dtypes: tuple[str, ...], size: int) -> torch.Tensor:
    entry = tensors.entry(name, 1)
    if entry.dtype not in dtypes or entry.shape != (size,):
        raise ConfigError(
            f"{entry.file}: tensor {entry.name!r}: expected dtype {' or '.join(dtypes)} and shape [{size}], "
            f"found {entry.dtype} {list(entry.shape)}"
        )
    (found,) = (tensor for _, tensor in tensors.checkpoint.read([entry.name]))
    return found


def read_draft_map(tensors: DraftTensors, draft_vocab_size: int, vocab_size: int) -> torch.Tensor:
    """Target ids of the draft ids, [Vd] int32: index plus stored offset, strictly increasing, below V.

    Raises ConfigError.
    """
    draft = torch.arange(draft_vocab_size, dtype=torch.int64)
    if "d2t" not in tensors:
        if draft_vocab_size != vocab_size:
            raise ConfigError(
                f"{tensors.checkpoint.directory}: tensor 'd2t' is missing; {draft_vocab_size} draft ids cannot be "
                f"mapped to the target's {vocab_size}"
            )
        return draft.to(torch.int32)
    file = tensors.entry("d2t", 1).file
    offsets = _vocabulary_tensor(tensors, "d2t", ("I64", "I32"), draft_vocab_size).to(torch.int64)
    room = vocab_size - draft_vocab_size  # ascending ids leave no more
    ids = draft + offsets
    wrong = (offsets < 0) | (offsets > room)
    wrong[1:] |= ids[1:] <= ids[:-1]
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise ConfigError(
            f"{file}: tensor 'd2t': expected offsets whose target ids, index + offset, ascend from 0 to "
            f"{vocab_size - 1}, found offset {int(offsets[at])} at {at}"
        )
    if "t2d" in tensors:
        mask = _vocabulary_tensor(tensors, "t2d", ("BOOL", "U8"), vocab_size).to(torch.bool)
        if not torch.equal(mask.nonzero().reshape(-1), ids):
            raise ConfigError(f"{file}: tensors 'd2t' and 't2d' name different target ids")
    return ids.to(torch.int32)


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

    kind is the method that it must be of; P-EAGLE's `mask_hidden` is left out. capture_layers, boundaries, overrides
    what the config says. dtype is "bfloat16" or "float32", None the target's, whatever the draft model is stored in.
    head.draft_to_target is always there, int32, the identity where the whole vocabulary is drafted. progress is called
    with (bytes done, bytes in all). Raises ConfigError naming file, tensor, expected and found.
    """
    directory = Path(directory)
    name = target.dtype if dtype is None else dtype
    if name not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be 'bfloat16' or 'float32', got {name!r}")
    config, tensors, notes = parse_draft(directory, target, capture_layers, kind)
    unused = (MASK_HIDDEN, *(("fc.weight",) if config.final_hidden else ()))
    recipes = draft_recipes(config, TORCH_DTYPES[name])
    return LoadedDraftModel(config, load_tensors(config, tensors, recipes, unused, progress), directory, notes)


def load_tensors(
    config: DraftConfig,
    tensors: DraftTensors,
    recipes: Sequence[Recipe],
    unused: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Load the weights of a parsed draft model by canonical name, the draft map among them. Raises ConfigError.

    recipes  name pieces as `tensors` does
    unused   tensors that may be there, and nobody needs
    """
    draft_map = read_draft_map(tensors, config.draft_vocab_size, config.vocab_size)
    ignored = {tensors.stored[name] for name in ("d2t", "t2d", *unused) if name in tensors}
    stored = [stored_recipe(recipe, tensors) for recipe in recipes]
    check_recipes(tensors.checkpoint, stored, ignored | unused_tensors(config, tensors))
    groups = [Group((recipe,)) for recipe in narrowed(stored, tensors.checkpoint.entries)]
    return {**StoredWeights(tensors.checkpoint, groups, progress=progress).loaded(), DRAFT_MAP: draft_map}
