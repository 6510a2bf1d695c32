"""This module finds the tensors of a draft model by the names of its method, whatever the names in its files."""

import re
from dataclasses import dataclass

from lowlat.checkpoint.tensors import Checkpoint, TensorEntry
from lowlat.errors import ConfigError

__all__ = ["DraftTensors"]

# Buffers that are recomputed, and copies of the target's tensors that some trainers store.
IGNORED = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|verifier_(lm_head|norm)\.weight")
LAYER = re.compile(r"layers\.(\d{1,9})\.")


@dataclass(frozen=True)
class DraftTensors:
    """Maps a method's names of tensors to the stored names in a draft model's files.

    has_midlayer  whether its only layer is called `midlayer.`
    """

    checkpoint: Checkpoint
    stored: dict[str, str]
    has_midlayer: bool

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def entry(self, name: str, dimensions: int) -> TensorEntry:
        """Find the entry of a tensor. Raises ConfigError if it is missing, or has another number of dimensions."""
        if name not in self.stored:
            directory = self.checkpoint.directory
            raise ConfigError(f"{directory}: tensor {name!r} is missing; the draft model needs it")
        entry = self.checkpoint.entries[self.stored[name]]
        if len(entry.shape) != dimensions:
            raise ConfigError(
                f"{entry.file}: tensor {entry.name!r}: expected {dimensions} dimensions, found {list(entry.shape)}"
            )
        return entry

    def in_any_layer(self, part: str) -> bool:
        """Whether a layer has this part."""
        return any(name.endswith(part) and LAYER.match(name) for name in self.stored)

    def ignored(self) -> set[str]:
        """Stored names of tensors that are not needed."""
        return {stored for name, stored in self.stored.items() if IGNORED.fullmatch(name)}

    def check_layers(self, num_layers: int, hidden_size: int, label: str) -> None:
        """Raise ConfigError for tensors of more layers than stated, and for later layers that read the embedding."""
        for name, stored in self.stored.items():
            layer = LAYER.match(name)
            if layer is not None and int(layer[1]) >= num_layers:
                raise ConfigError(
                    f"{self.checkpoint.directory}: tensor {stored!r} is of draft layer {int(layer[1])}, but {label}: "
                    f"num_hidden_layers is {num_layers}"
                )
        for number in range(1, num_layers):
            name = f"layers.{number}.self_attn.q_proj.weight"
            if name in self and self.entry(name, 2).shape[1] == 2 * hidden_size:
                raise ConfigError(
                    f"{self.checkpoint.directory}: tensor {self.stored[name]!r} has {2 * hidden_size} columns: draft "
                    f"models whose later layers read the embedding, too, are not implemented"
                )
