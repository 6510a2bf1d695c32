"""Targets: a Hugging Face directory in, checked geometry and canonical weights out.

It knows which families there are; what each needs is in the family's module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from lowlat.checkpoint import gpt_oss, llama, qwen3
from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.hf_config import read_config, resolve_dtype
from lowlat.checkpoint.json_file import shown
from lowlat.checkpoint.recipes import Progress, Recipe, assemble
from lowlat.checkpoint.tensors import Checkpoint
from lowlat.errors import ConfigError
from lowlat.geometry import ComputeDtype, ModelConfig

__all__ = ["LoadedTarget", "load_target", "read_model_config", "target_recipes"]

Parse = Callable[[Fields, Path, ComputeDtype], ModelConfig]
FAMILIES: Mapping[str, tuple[Parse, Callable[[ModelConfig], list[Recipe]]]] = {
    "llama": (llama.parse, llama.recipes),
    "qwen3": (qwen3.parse, qwen3.recipes),
    "gpt_oss": (gpt_oss.parse, gpt_oss.recipes),
}


@dataclass(frozen=True)
class LoadedTarget:
    """A target's geometry, and its weights on the CPU by canonical name."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    directory: Path


def read_model_config(directory: str | Path, *, dtype: str = "auto") -> ModelConfig:
    """Read and check config.json and generation_config.json; no weights are read.

    dtype is "auto", "bfloat16" or "float32"; "auto" is the config's, and where it names none the dtype of the
    largest stored tensor, for which the weight files' headers are read. Raises ConfigError.
    """
    directory = Path(directory)
    fields = read_config(directory)
    family = fields.optional_string("model_type")
    if family is None or family not in FAMILIES:
        raise ConfigError(
            f"{fields.label}: model_type {shown(family)} is not implemented; implemented: {', '.join(FAMILIES)}"
        )
    return FAMILIES[family][0](fields, directory, resolve_dtype(fields, dtype, directory))


def target_recipes(config: ModelConfig) -> list[Recipe]:
    """How every canonical weight of a target is made of its checkpoint's tensors."""
    return FAMILIES[config.family][1](config)


def _ignored(config: ModelConfig, checkpoint: Checkpoint) -> set[str]:
    """Buffers that old versions of transformers stored, and the copy of a tied embedding."""
    ignored = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.num_layers)}
    ignored.add("model.rotary_emb.inv_freq")
    if config.tie_embeddings:
        ignored.add("lm_head.weight")
    return ignored & set(checkpoint.entries)


def _check_tied_copy(checkpoint: Checkpoint, embedding: torch.Tensor) -> None:
    for entry, stored in checkpoint.read(["lm_head.weight"]):
        if not torch.equal(stored.to(embedding.dtype), embedding):
            raise ConfigError(
                f"{entry.file}: tensor 'lm_head.weight' differs from the embedding, though config.json says that "
                f"they are tied (tie_word_embeddings)"
            )


def _normalise_scales(config: ModelConfig, checkpoint: Checkpoint, weights: dict[str, torch.Tensor]) -> None:
    for layer in range(config.num_layers):
        for part in ("gate_up", "down"):
            entry = checkpoint.entries[f"model.layers.{layer}.mlp.experts.{part}_proj_scales"]
            name = f"layers.{layer}.experts.{part}"
            label = f"{entry.file}: tensor {entry.name!r}"
            gpt_oss.normalise_scales(label, weights[f"{name}.blocks"], weights[f"{name}.scales"])


def load_target(directory: str | Path, *, dtype: str = "auto", progress: Progress | None = None) -> LoadedTarget:
    """Load a target: geometry, and weights by canonical name, in the compute dtype, on the CPU.

    progress is called with (bytes done, bytes in all) after each stored tensor. MXFP4 experts stay blocks and
    scales in either dtype; sinks are float32. With tied embeddings lm_head.weight is the very tensor of
    embed.weight. Everything is checked against the headers before the first tensor is read. Time: one pass
    over the files; memory: the weights and one stored tensor. Raises ConfigError naming file, tensor, expected
    and found.
    """
    directory = Path(directory)
    config = read_model_config(directory, dtype=dtype)
    checkpoint = Checkpoint.open(directory)
    ignored = _ignored(config, checkpoint)
    weights = assemble(checkpoint, target_recipes(config), ignored=ignored, progress=progress)
    if config.tie_embeddings:
        if "lm_head.weight" in ignored:
            _check_tied_copy(checkpoint, weights["embed.weight"])
        weights["lm_head.weight"] = weights["embed.weight"]
    if config.experts is not None and config.experts.mxfp4:
        _normalise_scales(config, checkpoint, weights)
    return LoadedTarget(config, weights, directory)
