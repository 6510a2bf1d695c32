"""This module opens a target: it reads a Hugging Face directory into a checked geometry and canonical weights.

The family's recipes make canonical weights from stored tensors; formats check quantised tensors.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from lowlat.checkpoint import hub
from lowlat.checkpoint.foreign import foreign_directory
from lowlat.checkpoint.formats import narrowed, part_groups
from lowlat.checkpoint.json_file import shown
from lowlat.checkpoint.kv_scales import kv_scale_names, read_kv_scales
from lowlat.checkpoint.quantising import QuantisedWeights, Quantiser
from lowlat.checkpoint.recipes import Progress, Recipe, check_recipes, chosen_recipes, renamed_recipe
from lowlat.checkpoint.source import WeightSource
from lowlat.checkpoint.stored import Group, StoredWeights
from lowlat.checkpoint.tensors import DTYPES, Checkpoint, OpenFiles, TensorEntry, stored_names
from lowlat.errors import ConfigError
from lowlat.models.families import FAMILIES
from lowlat.models.geometry import CodedKV, Decoder, ModelConfig
from lowlat.models.hf_config import dtype_error, is_quantised, read_config, resolve_dtype, stored_dtype
from lowlat.options.model_names import display_name

__all__ = [
    "LoadedTarget",
    "OpenedTarget",
    "StoredTarget",
    "code_kv",
    "coded",
    "fetch_target",
    "load_target",
    "open_target",
    "quantise_target",
    "read_model_config",
    "rounding",
    "target_groups",
    "target_recipes",
]

logger = logging.getLogger("lowlat")
KEPT_RECIPES = 4  # cached geometries: of a target and of a draft model, each also for its runtime's context
COMPARED_BYTES = 8 << 20
LM_HEAD = "lm_head.weight"
Config = TypeVar("Config", bound=Decoder)


@dataclass(frozen=True)
class LoadedTarget:
    """A target's geometry, and its weights on the CPU by canonical name."""

    config: ModelConfig
    weights: dict[str, torch.Tensor]
    directory: Path


@dataclass(frozen=True)
class OpenedTarget:
    """A target's geometry and a source of its weights; tokenizer and config.json are in `directory`."""

    config: ModelConfig
    weights: WeightSource
    directory: Path


@dataclass(frozen=True)
class StoredTarget(OpenedTarget):
    """A target whose weights stay in their files and are read on demand."""

    weights: StoredWeights


def read_model_config(directory: str | Path, *, dtype: str = "auto") -> ModelConfig:
    """Read and check config.json and generation_config.json; no weights are read.

    dtype is "auto", "bfloat16" or "float32"; "auto" is the config's, and where it names none the dtype of the
    largest stored tensor, for which the weight files' headers are read. Raises ConfigError.
    """
    directory = Path(directory)
    fields = read_config(directory)
    family = fields.optional_string("model_type")
    if family is None or family not in FAMILIES:
        why = foreign_directory(directory) if family is None else None
        raise ConfigError(
            f"{fields.label}: model_type {shown(family)} is not implemented; implemented: {', '.join(FAMILIES)}"
            f"{f' ({why})' if why else ''}"
        )
    try:
        config = FAMILIES[family].parse(fields, directory, resolve_dtype(fields, dtype, directory))
        names = stored_names(directory) if FAMILIES[family].ties_by_files else None
        if names is not None:
            lm_head = f"{FAMILIES[family].names_in(names).lm_head}."
            config = replace(config, tie_embeddings=not any(name.startswith(lm_head) for name in names))
        if config.quantisation is not None:
            target_recipes(config)  # a layer that its format cannot hold is known before anything is fetched
        if dtype == "auto" and is_quantised(fields, directory) and not _has_codes(config):
            name, source = stored_dtype(fields, directory)
            if name == "float16":  # what is quantised is no weight: the KV cache
                raise dtype_error(name, source)
    except ConfigError as error:
        raise ConfigError(f"{error} (model_type {family!r})") from error
    return config


def _has_codes(config: ModelConfig) -> bool:
    """Whether any weights are stored as codes."""
    experts = [layer.experts for layer in config.layers if layer.experts is not None]
    return config.quantisation is not None or any(each.weight_format != "bf16" for each in experts)


def fetch_target(model: str | Path, *, dtype: str = "auto", progress: Progress | None = None) -> Path:
    """The directory of a target, which is fetched where it is `ORG/NAME` of a repository (see `hub.fetch`).

    progress is called with (bytes fetched, bytes in all). Raises ConfigError; for what lowlat does not run, before any
    weight is fetched.
    """

    def check(directory: Path) -> None:
        fields = read_config(directory)
        named = fields.optional_string("dtype") or fields.optional_string("torch_dtype")
        # a config that names no dtype has its weights', which are not there yet
        read_model_config(directory, dtype=dtype if named or dtype != "auto" else "bfloat16")

    return hub.fetch(model, check=check, progress=progress)


def target_recipes(config: ModelConfig, names: Collection[str] | None = None) -> list[Recipe]:
    """How every canonical weight of a target is made of its checkpoint's tensors.

    names  the stored tensors' names; None: unknown, then weights that files store in two forms have the usual one
    """
    if names is None:
        return list(_usual_recipes(replace(config, quantiser=None)))  # recipes do not depend on the quantiser
    return _recipes(config, names)


@lru_cache(maxsize=KEPT_RECIPES)
def _usual_recipes(config: ModelConfig) -> tuple[Recipe, ...]:
    """`target_recipes` for unknown names; cached, since plans ask for the same geometry many times."""
    return tuple(_recipes(config, None))


def _recipes(config: ModelConfig, names: Collection[str] | None) -> list[Recipe]:
    family = FAMILIES[config.family]
    own, recipes = family.names_in(names), list(family.recipes(config))
    if not own.are_plain:
        recipes = [renamed_recipe(recipe, own.stored) for recipe in recipes]
    quantisation = config.quantisation
    recipes = chosen_recipes(recipes, names, others=quantisation is not None)
    if quantisation is None:
        return recipes
    return (quantisation if names is None else quantisation.in_files(names)).apply(recipes)


def _ignored(config: ModelConfig, checkpoint: Checkpoint) -> set[str]:
    """Stored tensors that no recipe reads: buffers of old transformers versions, scales of the KV cache, the copy of a
    tied embedding, and tensors that are no part of the target."""
    own = FAMILIES[config.family].names_in(checkpoint.entries)
    ignored = {own.stored(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq") for layer in range(config.num_layers)}
    ignored |= {name for layer in config.attentions for names in kv_scale_names(layer, own.stem) for name in names}
    ignored.add(own.stored("model.rotary_emb.inv_freq"))
    if config.tie_embeddings:
        ignored.add(own.stored(LM_HEAD))
    ignored |= {name for name in checkpoint.entries if name.startswith((*own.skipped, *_unread(config, own.stem)))}
    if config.quantisation is not None:
        ignored |= config.quantisation.unused(checkpoint)
    return ignored & set(checkpoint.entries)


def _unread(config: ModelConfig, stem: str) -> list[str]:
    """Name prefixes of stored key and value tensors of layers that read another layer's keys and values."""
    layers = config.attentions.keys() - config.caching.keys()
    parts = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
    return [f"{stem}.layers.{layer}.self_attn.{part}" for layer in layers for part in parts]


def _check_tied_copy(checkpoint: Checkpoint, name: str, weights: Mapping[str, torch.Tensor]) -> None:
    embedding, entry = weights["embed.weight"], checkpoint.entries[name]
    if entry.shape != tuple(embedding.shape) or not _same_rows(entry, embedding):
        raise ConfigError(
            f"{entry.file}: tensor {name!r} differs from the embedding, though config.json says that "
            f"they are tied (tie_word_embeddings)"
        )


def _same_rows(entry: TensorEntry, embedding: torch.Tensor) -> bool:
    """Compare a stored table with one in memory, a few rows at a time."""
    step = max(1, COMPARED_BYTES // entry.row_bytes)
    with OpenFiles() as files:
        for first in range(0, entry.shape[0], step):
            known = embedding[first : first + step]
            stored = torch.empty(known.shape, dtype=DTYPES[entry.dtype])
            files.read(entry, stored, first=first)
            if not torch.equal(stored.to(known.dtype), known):
                return False
    return True


def target_groups(config: ModelConfig, checkpoint: Checkpoint | None = None) -> list[Group]:
    """The groups of weights that their formats read and check together; all names are checked against the headers.

    Without a checkpoint nothing is checked, and the groups only give sizes. Raises ConfigError.
    """
    recipes = target_recipes(config, None if checkpoint is None else checkpoint.entries)
    if checkpoint is None:
        return part_groups(recipes, {})
    check_recipes(checkpoint, recipes, _ignored(config, checkpoint))
    groups = part_groups(narrowed(recipes, checkpoint.entries), checkpoint.entries)
    name = FAMILIES[config.family].names_in(checkpoint.entries).stored(LM_HEAD)
    if config.tie_embeddings and name in checkpoint.entries:
        tied = partial(_check_tied_copy, checkpoint, name)
        groups = [replace(group, finish=tied) if _is_embedding(group) else group for group in groups]
    return groups


def _is_embedding(group: Group) -> bool:
    return any(recipe.weight == "embed.weight" for recipe in group.recipes)


def open_target(directory: str | Path, *, dtype: str = "auto", progress: Progress | None = None) -> StoredTarget:
    """Check a target's config and the headers of its weights, and read none of them yet.

    progress is called with (bytes read, bytes in all) as the weights are streamed. Quantised weights stay the
    parts of their format in either dtype; sinks are float32. With tied embeddings lm_head.weight is a second name of
    embed.weight. Raises ConfigError naming file, tensor, expected and found; values (NaN, scales) are checked as they
    are read.
    """
    directory = Path(directory)
    config = read_model_config(directory, dtype=dtype)
    checkpoint = Checkpoint.open(directory)
    if dtype == "auto" and stored_dtype(read_config(directory), directory)[0] == "float16":
        logger.warning(
            "%s is stored in float16 next to quantised weights, and runs in bfloat16; --dtype float32 keeps every bit",
            display_name(directory),
        )
    weights = StoredWeights(
        checkpoint,
        target_groups(config, checkpoint),
        aliases={"lm_head.weight": "embed.weight"} if config.tie_embeddings else None,
        progress=progress,
    )
    return StoredTarget(config, weights, directory)


def quantise_target(target: OpenedTarget, quantiser: Quantiser) -> OpenedTarget:
    """The same target with linear layers quantised while they are streamed. Raises ConfigError if they already are."""
    config = rounding(target.config, quantiser, f"{target.directory}: the target")
    return OpenedTarget(config, QuantisedWeights(target.weights, config.quantiser or quantiser), target.directory)


def code_kv(target: OpenedTarget) -> OpenedTarget:
    """The same target with an e4m3 KV cache and the scales in its files. Raises ConfigError for wrong scales."""
    checkpoint = target.weights.checkpoint if isinstance(target.weights, StoredWeights) else None
    return replace(target, config=coded(target.config, checkpoint))


def coded(config: ModelConfig, checkpoint: Checkpoint | None = None) -> ModelConfig:
    """The geometry with an e4m3 KV cache; without a checkpoint all scales are 1."""
    heads = {layer: spec.num_kv_heads for layer, spec in config.caching.items()}
    stem = FAMILIES[config.family].names_in(None if checkpoint is None else checkpoint.entries).stem
    return replace(config, coded_kv=CodedKV(read_kv_scales(checkpoint, heads, stem)))


def rounding(config: Config, quantiser: Quantiser, label: str) -> Config:
    """The geometry with linear layers quantised at load. Raises ConfigError if they already are."""
    if config.quantisation is not None:
        formats = ", ".join(sorted(config.quantisation.format_names))
        raise ConfigError(
            f"{label} is stored in {formats}, and {quantiser.option} {quantiser.kind!r} is for plain weights"
        )
    widths = {config.hidden_size, getattr(config, "target_hidden_size", 0)}
    widths |= {layer.mixer.mixed_size for layer in config.layers}
    widths |= {size for layer in config.layers for size in layer.inner_sizes if size}
    widths |= {layer.per_layer_size for layer in config.layers if layer.per_layer_size is not None}
    return replace(config, quantiser=quantiser.fitted(*widths))


def load_target(directory: str | Path, *, dtype: str = "auto", progress: Progress | None = None) -> LoadedTarget:
    """Load a target whole: what `open_target` gives, with all weights in memory on the CPU.

    With tied embeddings lm_head.weight is the very tensor of embed.weight. Time: one pass over the files; memory: the
    weights and a few pieces of some megabytes. Raises ConfigError naming file, tensor, expected and found.
    """
    target = open_target(directory, dtype=dtype, progress=progress)
    return LoadedTarget(target.config, target.weights.loaded(), target.directory)
