"""This module shrinks a draft model's vocabulary: it writes a copy whose LM head has fewer rows.

Tokens outside the draft vocabulary are never drafted. The output stays the target's; drafting is faster, and acceptance
lower. The new directory keeps the layout's names, so that readers of the old draft model can read the new one.
"""

import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lowlat.checkpoint.json_file import read_object
from lowlat.checkpoint.tensors import Checkpoint
from lowlat.errors import ConfigError
from lowlat.models.families import FAMILIES
from lowlat.models.geometry import ModelConfig
from lowlat.models.hf_config import MAX_VOCABULARY
from lowlat.models.target import read_model_config
from lowlat.speculators.draft_files.tensors import DraftTensors
from lowlat.speculators.draft_files.weights import read_draft_map
from lowlat.speculators.eagle3.tensors import open_draft_model
from lowlat.speculators.eagle3.weights import load_draft_model
from lowlat.text.counts import most_frequent

__all__ = ["Shrunk", "head_vocabulary", "shrink_draft_model"]

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")
MAX_COPIED_BYTES = 16 << 20


@dataclass(frozen=True)
class Shrunk:
    """The result of shrinking: draft ids before and after, as target ids ascending, and the bytes of all tensors."""

    directory: Path
    old_ids: torch.Tensor
    new_ids: torch.Tensor
    old_bytes: int
    new_bytes: int
    lm_head_row_bytes: int
    not_kept: tuple[int, ...]  # ids to keep that the old draft model does not draft either


def head_vocabulary(directory: str | Path, target: str | Path | None = None) -> int:
    """Return the size of a draft model's target vocabulary: from the target's config if given, else from its own.

    Raises ConfigError.
    """
    if target is not None:
        return read_model_config(target).vocab_size
    config = read_object(Path(directory) / "config.json")
    layer = config.get("transformer_layer_config")
    for place in (config, layer if isinstance(layer, dict) else {}):
        found = place.get("vocab_size")
        if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= MAX_VOCABULARY:
            return found
    raise ConfigError(f"{directory}: config.json names no vocab_size: give the target")


def shrink_draft_model(
    directory: str | Path,
    out: str | Path,
    counts: torch.Tensor,
    draft_vocab: int,
    *,
    keep: Collection[int] = (),
    target: str | Path | None = None,
) -> Shrunk:
    """Write a draft model for the `draft_vocab` most frequent of the ids that the old one drafts.

    counts  [V] int64, occurrences by target id; ties go to the lower id
    keep    ids that stay at any count
    target  the target's directory; needed if the draft model uses the target's LM head
    The new directory must be empty or not exist; it appears complete or not at all. Raises ConfigError.
    """
    directory, out = Path(directory), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out}: is there already and not empty; a draft model is written to a new directory")
    tensors = open_draft_model(directory)
    model = None if target is None else read_model_config(target)
    if model is not None:
        load_draft_model(directory, model)  # refuses a draft model that does not fit
    vocab = head_vocabulary(directory, target)
    lm_head = _lm_head(tensors, vocab, None if target is None else Path(target), model)
    old_ids = read_draft_map(tensors, lm_head.shape[0], vocab).long()
    if not 1 <= draft_vocab < len(old_ids):
        limit = len(old_ids) - 1
        raise ConfigError(f"draft_vocab must be from 1 to {limit}, below the draft model's own, got {draft_vocab}")
    rows, missing = _chosen_rows(old_ids, counts, draft_vocab, keep)
    stored = {entry.name: tensor for entry, tensor in tensors.checkpoint.read(list(tensors.checkpoint.entries))}
    old_bytes = sum(tensor.nbytes for tensor in stored.values())
    new_ids = old_ids[rows]
    fc = stored[tensors.stored["fc.weight"]]
    stored[_name(tensors, "lm_head.weight")] = lm_head[rows].to(fc.dtype).contiguous()
    stored[_name(tensors, "d2t")] = new_ids - torch.arange(draft_vocab)
    stored[_name(tensors, "t2d")] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, new_ids, True)
    _write(directory, out, stored, draft_vocab, model)
    new_bytes = sum(tensor.nbytes for tensor in stored.values())
    row_bytes = lm_head.shape[1] * fc.element_size()
    return Shrunk(out, old_ids, new_ids, old_bytes, new_bytes, row_bytes, missing)


def _name(tensors: DraftTensors, name: str) -> str:
    """Return the stored name of a tensor; if it is new, the plain name, which all layouts have."""
    return tensors.stored.get(name, name)


def _lm_head(tensors: DraftTensors, vocab: int, target: Path | None, model: ModelConfig | None) -> torch.Tensor:
    """Read the draft model's LM head, [Vd, H], or the target's, [V, H]."""
    if "lm_head.weight" in tensors:
        entry = tensors.entry("lm_head.weight", 2)
        if entry.dtype not in ("BF16", "F16", "F32") or not 1 <= entry.shape[0] <= vocab:
            raise ConfigError(
                f"{entry.file}: tensor {entry.name!r}: expected up to {vocab} rows of floating point, "
                f"found {entry.dtype} {list(entry.shape)}"
            )
        checkpoint, name = tensors.checkpoint, entry.name
    elif target is None or model is None:
        raise ConfigError(
            f"{tensors.checkpoint.directory}: the draft model has no lm_head.weight of its own and uses its target's: "
            f"give the target (--target DIR)"
        )
    else:
        checkpoint = Checkpoint.open(target)
        own = FAMILIES[model.family].names_in(checkpoint.entries)
        name = own.stored("model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight")
        if name not in checkpoint.entries:
            raise ConfigError(f"{target}: tensor {name!r} is missing")
    ((_, found),) = checkpoint.read([name])
    return found


def _chosen_rows(
    old_ids: torch.Tensor, counts: torch.Tensor, draft_vocab: int, keep: Collection[int]
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the rows of the old LM head that stay, ascending, and the ids to keep that it lacks."""
    row_of = {int(token): row for row, token in enumerate(old_ids.tolist())}
    wanted = sorted(set(keep))
    kept = [row_of[token] for token in wanted if token in row_of]
    if len(kept) > draft_vocab:
        raise ConfigError(f"draft_vocab {draft_vocab} has no room for the {len(kept)} ids that must stay")
    rows = most_frequent(counts[old_ids], draft_vocab, kept)
    return rows, tuple(token for token in wanted if token not in row_of)


def _write(
    directory: Path, out: Path, stored: dict[str, torch.Tensor], draft_vocab: int, model: ModelConfig | None
) -> None:
    """Write the directory beside its final place, read it back, and move it there."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        for path in sorted(directory.iterdir()):
            small = path.is_file() and path.stat().st_size <= MAX_COPIED_BYTES
            if small and path.name != "config.json" and not path.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(path, partial / path.name)
        config = _config(read_object(directory / "config.json"), draft_vocab)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(stored, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)  # the library creates it for its owner alone
        if model is not None:
            load_draft_model(partial, model)
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(config: dict[str, Any], draft_vocab: int) -> dict[str, Any]:
    """Return the config with the new size, untied, since the new LM head is its own."""
    changed = {**config, "draft_vocab_size": draft_vocab}
    nested = changed.get("transformer_layer_config")
    if isinstance(nested, dict):
        changed["transformer_layer_config"] = nested = dict(nested)
    for place in (changed, nested):
        if isinstance(place, dict) and place.get("tie_word_embeddings"):
            place["tie_word_embeddings"] = False
    return changed
