"""This module gives the tensors of EAGLE3 draft models one set of names, whatever their producer called them.

A leading `model.` is removed. `midlayer.` becomes `layers.0.`, and `midlayer.N.` becomes `layers.N.` (ModelOpt's draft
models of several layers). In later layers the norm before the attention is always called `input_layernorm`. This module
reads names and shapes, not configs.
"""

import re
from pathlib import Path

from lowlat.checkpoint.tensors import Checkpoint
from lowlat.errors import ConfigError
from lowlat.speculators.draft_files.tensors import DraftTensors

__all__ = ["MASK_HIDDEN", "open_draft_model"]

MLA_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm")
MASK_HIDDEN = "mask_hidden"  # only in P-EAGLE: the features of rows that the target has not run
MIDLAYER = re.compile(r"midlayer\.(?:(\d+)\.)?")
LATER_NORM = re.compile(r"(layers\.[1-9]\d*)\.hidden_norm\.weight")


def _normalised(name: str) -> str:
    name = name.removeprefix("model.")
    return MIDLAYER.sub(lambda found: f"layers.{found[1] or 0}.", name) if name.startswith("midlayer.") else name


def _with_later_norms(stored: dict[str, str]) -> dict[str, str]:
    """Rename a later layer's `hidden_norm` to `input_layernorm`, unless the layer has both."""
    renamed = {}
    for name, original in stored.items():
        norm = LATER_NORM.fullmatch(name)
        plain = name if norm is None else f"{norm[1]}.input_layernorm.weight"
        renamed[name if plain in stored else plain] = original
    return renamed


def _refuse_other_kinds(directory: Path, names: dict[str, str]) -> None:
    """Refuse draft models that are not EAGLE3, or of a kind that is not implemented, by their tensors' names."""

    def refuse(name: str, kind: str) -> ConfigError:
        return ConfigError(f"{directory}: tensor {names[name]!r}: {kind}")

    for name in names:
        parts = name.split(".")
        if any(part in MLA_PARTS for part in parts):
            raise refuse(name, "draft models with multi-head latent attention (MLA) are not implemented")
        if parts[0] == "parallel_draft_heads":
            raise refuse(name, "parallel drafting (parallel_draft_step above 1) is not implemented")
        if parts[0].startswith("medusa"):
            raise refuse(name, "Medusa heads are not an EAGLE3 draft model; method must be 'eagle3'")
    if "fc.bias" in names:
        hint = "" if "layers.0.hidden_norm.weight" in names else ": EAGLE-1 and EAGLE-2 are not EAGLE3"
        raise refuse("fc.bias", f"a bias on fc is not implemented{hint}")
    if "layers.0.hidden_norm.weight" not in names:
        raise ConfigError(
            f"{directory}: tensor 'hidden_norm.weight' is missing: EAGLE-1 and EAGLE-2 are not EAGLE3 (a whole model "
            "drafts by method 'draft_model')"
        )


def open_draft_model(directory: Path) -> DraftTensors:
    """Read the headers of a draft model's weights, and normalise the names. Raises ConfigError.

    Names reveal what is refused: MLA, parallel draft heads, Medusa, EAGLE-1 and EAGLE-2, a bias on fc, and two tensors
    of one name.
    """
    checkpoint = Checkpoint.open(directory)
    stored: dict[str, str] = {}
    for name in checkpoint.entries:
        plain = _normalised(name)
        if plain in stored:
            raise ConfigError(f"{directory}: tensors {stored[plain]!r} and {name!r} are both {plain!r}")
        stored[plain] = name
    stored = _with_later_norms(stored)
    _refuse_other_kinds(directory, stored)
    has_midlayer = any(name.removeprefix("model.").startswith("midlayer.") for name in checkpoint.entries)
    numbered = any(name.removeprefix("model.").startswith("midlayer.0.") for name in checkpoint.entries)
    return DraftTensors(checkpoint, stored, has_midlayer and not numbered)
