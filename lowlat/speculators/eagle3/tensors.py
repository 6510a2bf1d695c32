"""The tensors of EAGLE3 draft models under one set of names, whatever their producer called them, and the layout.

Names lose a leading `model.`, and `midlayer.` becomes `layers.0.`. It knows names and shapes, not configs.
"""

from dataclasses import dataclass
from pathlib import Path

from lowlat.checkpoint.tensors import Checkpoint, TensorEntry
from lowlat.errors import ConfigError

__all__ = ["DraftTensors", "open_draft_model"]

MLA_PARTS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm")
# Buffers that are recomputed, and copies of the target's that some trainers leave behind.
IGNORED = frozenset(
    {
        "rotary_emb.inv_freq",
        "layers.0.self_attn.rotary_emb.inv_freq",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }
)


@dataclass(frozen=True)
class DraftTensors:
    """A head's checkpoint, and the stored name of each normalised one."""

    checkpoint: Checkpoint
    stored: dict[str, str]
    has_midlayer: bool

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def entry(self, name: str, dimensions: int) -> TensorEntry:
        """The entry of a tensor that must be there with that many dimensions. Raises ConfigError."""
        if name not in self.stored:
            directory = self.checkpoint.directory
            raise ConfigError(f"{directory}: tensor {name!r} is missing; an EAGLE3 draft model needs it")
        entry = self.checkpoint.entries[self.stored[name]]
        if len(entry.shape) != dimensions:
            raise ConfigError(
                f"{entry.file}: tensor {entry.name!r}: expected {dimensions} dimensions, found {list(entry.shape)}"
            )
        return entry

    def ignored(self) -> set[str]:
        """Stored names of tensors that nobody needs."""
        return {self.stored[name] for name in IGNORED if name in self.stored}


def _normalised(name: str) -> str:
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


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
        if parts[0] == "layers" and len(parts) > 1 and parts[1] != "0":
            raise refuse(name, "draft models of more than one layer are not implemented")
    if "fc.bias" in names:
        hint = "" if "layers.0.hidden_norm.weight" in names else ": EAGLE-1 and EAGLE-2 are not EAGLE3"
        raise refuse("fc.bias", f"a bias on fc is not implemented{hint}")
    if "fc.weight" not in names:
        raise ConfigError(
            f"{directory}: tensor 'fc.weight' is missing: not an EAGLE3 draft model, or one trained with "
            f"use_aux_hidden_state false, which is not implemented"
        )
    if "layers.0.hidden_norm.weight" not in names:
        raise ConfigError(f"{directory}: tensor 'hidden_norm.weight' is missing: EAGLE-1 and EAGLE-2 are not EAGLE3")


def open_draft_model(directory: Path) -> DraftTensors:
    """Read the headers of a draft model's weights and bring the names to one form. Raises ConfigError.

    Refused by name: MLA, several layers, parallel drafting, Medusa, EAGLE-1 and EAGLE-2, a bias on fc, two tensors
    of one name.
    """
    checkpoint = Checkpoint.open(directory)
    stored: dict[str, str] = {}
    for name in checkpoint.entries:
        plain = _normalised(name)
        if plain in stored:
            raise ConfigError(f"{directory}: tensors {stored[plain]!r} and {name!r} are both {plain!r}")
        stored[plain] = name
    _refuse_other_kinds(directory, stored)
    has_midlayer = any("midlayer." in name for name in checkpoint.entries)
    return DraftTensors(checkpoint, stored, has_midlayer)
