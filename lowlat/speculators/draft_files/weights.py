"""This module loads the weights of a draft model, and checks the map of its ids to the target's.

Each method has its own recipes, whose pieces have the names of `draft_files.tensors`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from lowlat.checkpoint.formats import narrowed
from lowlat.checkpoint.recipes import Progress, Recipe, check_recipes, renamed_recipe
from lowlat.checkpoint.stored import Group, StoredWeights
from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftConfig
from lowlat.speculators.draft_files.tensors import DraftTensors
from lowlat.speculators.draft_parts import DRAFT_MAP

__all__ = ["LoadedDraftModel", "load_tensors", "read_draft_map", "stored_recipe", "unused_tensors"]

Config = TypeVar("Config", bound=DraftConfig)


@dataclass(frozen=True)
class LoadedDraftModel(Generic[Config]):
    """A draft model's geometry, its weights on the CPU by canonical name, and notes for its user."""

    config: Config
    weights: dict[str, torch.Tensor]
    directory: Path
    notes: tuple[str, ...]


def stored_recipe(recipe: Recipe, tensors: DraftTensors) -> Recipe:
    """Rename a recipe's pieces to the names in the draft model's files."""
    return renamed_recipe(recipe, lambda name: tensors.stored.get(name, name))


def unused_tensors(config: DraftConfig, tensors: DraftTensors) -> set[str]:
    """Stored names of tensors that are not needed."""
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
    """Read the target ids of the draft ids, [Vd] int32: index plus stored offset, strictly increasing, below V.

    Without a stored map they are the identity. Raises ConfigError.
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


def load_tensors(
    config: DraftConfig,
    tensors: DraftTensors,
    recipes: Sequence[Recipe],
    unused: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Load the weights of a parsed draft model by canonical name, the draft map among them. Raises ConfigError.

    recipes  their pieces have the names of `tensors`
    unused   tensors that may be present but are not needed
    """
    draft_map = read_draft_map(tensors, config.draft_vocab_size, config.vocab_size)
    ignored = {tensors.stored[name] for name in ("d2t", "t2d", *unused) if name in tensors}
    stored = [stored_recipe(recipe, tensors) for recipe in recipes]
    check_recipes(tensors.checkpoint, stored, ignored | unused_tensors(config, tensors))
    groups = [Group((recipe,)) for recipe in narrowed(stored, tensors.checkpoint.entries)]
    return {**StoredWeights(tensors.checkpoint, groups, progress=progress).loaded(), DRAFT_MAP: draft_map}
