"""This module writes a quantised checkpoint of a plain one, in compressed-tensors' layouts.

FP8 becomes `float-quantized` with a scale for each row, INT4 `pack-quantized` in groups of 128, 64 or 32. Any engine
that reads compressed-tensors can read them. It reads and writes weights a file at a time.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lowlat.checkpoint.formats.linear import written_layout
from lowlat.checkpoint.json_file import read_object
from lowlat.checkpoint.quantising import Quantiser
from lowlat.checkpoint.tensors import INDEX_FILE, SINGLE_FILE, Checkpoint
from lowlat.errors import ConfigError
from lowlat.models.families import FAMILIES
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import open_target, rounding, target_recipes

__all__ = ["Written", "quantise_checkpoint"]

SHARD_BYTES = 2 << 30
MAX_COPIED_BYTES = 64 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
SUFFIX = ".weight"
ROUTERS = ("re:.*mlp[.]gate$", "re:.*mlp[.]shared_expert_gate$", "re:.*block_sparse_moe[.]gate$")
SMALL = "re:.*linear_attn[.]in_proj_(b|a|ba)$"  # of delta nets: one or two rows a head


@dataclass(frozen=True)
class Written:
    """A written checkpoint: its directory, rounded layers, and the bytes of all tensors before and after."""

    directory: Path
    layers: int
    old_bytes: int
    new_bytes: int


def quantise_checkpoint(directory: Path, out: Path, quantiser: Quantiser) -> Written:
    """Write a target's directory with its linear layers quantised, in the dtype in which it is stored.

    Embeddings and norms stay as they are. Raises ConfigError if the target cannot run, is quantised already, has
    experts in one tensor or layers that the format cannot hold, if the LM head to round is tied to the embedding, or if
    `out` exists.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; name a directory that does not")
    target = open_target(directory)
    quantiser = rounding(target.config, quantiser, str(directory)).quantiser or quantiser
    if quantiser.lm_head and target.config.tie_embeddings:
        raise ConfigError(
            f"{directory}: the LM head is the embedding (tie_word_embeddings), which stays plain; leave --lm-head out"
        )
    layers = _layers(target.config, quantiser, target.weights.checkpoint.entries)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _copy_beside(directory, partial)
        sizes = _write_shards(target.weights.checkpoint, partial, quantiser, layers)
        config = read_object(directory / "config.json")
        own = FAMILIES[target.config.family].names_in(target.weights.checkpoint.entries)
        plain = [] if quantiser.lm_head else [own.lm_head]
        plain += [] if target.config.experts is None else ROUTERS
        plain += [SMALL] if target.config.deltas else []
        plain += [f"re:{start.replace('.', '[.]')}.*" for start in own.skipped]
        config["quantization_config"] = _quantization_config(quantiser, plain)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        open_target(partial)
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Written(out, len(layers), *sizes)


def _layers(config: ModelConfig, quantiser: Quantiser, stored: Collection[str]) -> frozenset[str]:
    """Return stored names of the matrices to round. Raises ConfigError for one that the format cannot hold."""
    names: set[str] = set()
    for recipe in target_recipes(config, stored):
        if quantiser.takes(recipe.weight):
            quantiser.specs(recipe.weight, recipe.shape)
            stacked = next((piece.name for piece in recipe.pieces if len(piece.shape) != 2), None)
            if stacked is not None:
                raise ConfigError(f"writing {stacked}, which has all experts, in {quantiser.kind} is not implemented")
            names.update(piece.name for piece in recipe.pieces)
    return frozenset(names)


def _copy_beside(directory: Path, partial: Path) -> None:
    """Copy the tokenizer and other small files."""
    for path in sorted(directory.iterdir()):
        small = path.is_file() and path.stat().st_size <= MAX_COPIED_BYTES
        if small and path.name != "config.json" and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, partial / path.name)


def _quantization_config(quantiser: Quantiser, plain: list[str]) -> dict[str, Any]:
    layout, asked = written_layout(quantiser.packed).spelling
    weights = {**asked, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
        "kv_cache_scheme": None,
    }


def _stored(checkpoint: Checkpoint, quantiser: Quantiser, layers: frozenset[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of the new checkpoint, those of a layer together."""
    for entry, tensor in checkpoint.read(list(checkpoint.entries)):
        if entry.name not in layers:
            yield {entry.name: tensor}
            continue
        owner = entry.name.removesuffix(SUFFIX)
        parts = {name.rpartition(".")[2]: each for name, each in quantiser.parts(entry.name, tensor).items()}
        yield written_layout(quantiser.packed).tensors(owner, tuple(tensor.shape), parts)


def _write_shards(
    checkpoint: Checkpoint, partial: Path, quantiser: Quantiser, layers: frozenset[str]
) -> tuple[int, int]:
    """Write the tensors in files of some gigabytes, with an index for several; returns bytes before and after."""
    shards: list[dict[str, int]] = []
    waiting: dict[str, torch.Tensor] = {}

    def write() -> None:
        path = partial / f"model-{len(shards) + 1:05d}.safetensors"
        save_file(waiting, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library creates it for its owner alone
        shards.append({name: tensor.nbytes for name, tensor in waiting.items()})
        waiting.clear()

    for made in _stored(checkpoint, quantiser, layers):
        waiting.update(made)
        if sum(tensor.nbytes for tensor in waiting.values()) >= SHARD_BYTES:
            write()
    if waiting:
        write()
    total = sum(sum(shard.values()) for shard in shards)
    if len(shards) == 1:
        (partial / "model-00001.safetensors").rename(partial / SINGLE_FILE)
    else:
        files = {name: f"model-{place + 1:05d}.safetensors" for place, shard in enumerate(shards) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sum(entry.num_bytes for entry in checkpoint.entries.values()), total
