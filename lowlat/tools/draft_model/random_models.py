"""This module makes random draft models for a named geometry: the geometry alone, or files in the published layouts.

    method  layout     embedding and LM head     of several layers
    eagle3  SpecForge  the target's; its own     one
    peagle  SpecForge  the target's; its own     those after the first read the layer before
    dflash  z-lab      the target's; the target's
    dspark  DeepSpec   its own; its own

In DFlash's and DSpark's layers attention norms queries and keys, for any target, as in the published models.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowlat.checkpoint.recipes import Recipe
from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, LayerSpec, RopeConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.speculators.base import Speculator
from lowlat.speculators.dflash.geometry import DflashConfig
from lowlat.speculators.dflash.speculator import DflashSpeculator
from lowlat.speculators.dflash.weights import dflash_recipes
from lowlat.speculators.dspark.config import DEEPSPEC
from lowlat.speculators.dspark.geometry import DsparkConfig
from lowlat.speculators.dspark.speculator import DsparkSpeculator
from lowlat.speculators.dspark.weights import dspark_recipes
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.eagle3.tensors import MASK_HIDDEN
from lowlat.speculators.eagle3.weights import draft_recipes
from lowlat.speculators.mtp.geometry import MtpConfig, mtp_config
from lowlat.speculators.mtp.speculator import MtpSpeculator
from lowlat.speculators.mtp.weights import mtp_recipes
from lowlat.speculators.peagle.geometry import PeagleConfig
from lowlat.speculators.peagle.speculator import PeagleSpeculator
from lowlat.tools.bench.geometry import Geometry, Head, Noise

__all__ = [
    "DRAFT_MODELS",
    "draft_config",
    "random_speculator",
    "write_draft_model",
    "write_mtp_layer",
]

DRAFT_MODELS: Mapping[str, type[Eagle3Speculator] | type[DflashSpeculator]] = {
    each.method: each for each in (Eagle3Speculator, PeagleSpeculator, DflashSpeculator, DsparkSpeculator)
}


def draft_config(head: Head, target: ModelConfig, method: str = "eagle3") -> Eagle3Config | DflashConfig:
    """Return the geometry of a draft model, with the attention heads of the target's first attention layer.

    Raises ConfigError for sizes that no such draft model has.
    """
    names = ("hidden_size", "vocab_size", "max_position", "rms_norm_eps")
    shape = next(iter(target.attentions.values()))
    mixer = AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope=RopeConfig(theta=shape.rope.theta),
        qk_norm=method not in ("eagle3", "peagle"),
    )
    layer = LayerSpec(mixer=mixer, ffn=DenseSpec(inner_size=head.intermediate_size))
    shared: dict[str, Any] = {
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": head.draft_vocab_size,
        "capture_boundaries": head.boundaries,
        "layers": (layer,) * head.num_layers,
        **{name: getattr(target, name) for name in names},
    }
    mask = target.vocab_size - 1
    if method == "eagle3":
        return Eagle3Config(layout="specforge", **shared)
    if method == "peagle":
        return PeagleConfig(layout="specforge", mask_token=mask, **shared)
    if head.block_size is None or head.draft_vocab_size != target.vocab_size:
        raise ConfigError(
            f"a geometry's {method} needs a block_size and the target's {target.vocab_size} tokens; found block_size "
            f"{head.block_size} and draft_vocab_size {head.draft_vocab_size}"
        )
    shared |= {"mask_token": mask, "block_size": head.block_size, "own_draft_map": False}
    if method == "dflash":
        return DflashConfig(layout="z-lab", own_lm_head=False, **shared)
    shared |= {"markov_rank": head.markov_rank, "markov_gated": False, "confidence": True, "confidence_markov": True}
    return DsparkConfig(layout="deepspec", own_embedding=True, anchor_drafts=True, **shared)


def random_speculator(geometry: Geometry, target: ModelConfig, method: str) -> Speculator:
    """Plan the speculator of a geometry's draft model, without files. Raises ConfigError if it has none."""
    if method == MtpConfig.method:
        return MtpSpeculator(mtp_config(target))
    config = draft_config(geometry.drafter(method), target, method)
    if isinstance(config, DsparkConfig):
        return DsparkSpeculator(config)
    if isinstance(config, DflashConfig):
        return DflashSpeculator(config)
    if isinstance(config, PeagleConfig):
        return PeagleSpeculator(config)
    return Eagle3Speculator(config)


def write_draft_model(
    geometry: Geometry, target: ModelConfig, directory: Path, seed: int = 1, *, method: str = "eagle3"
) -> Path:
    """Write a geometry's random draft model for a target; returns its directory.

    Raises ConfigError if the geometry has none of that method.
    """
    from safetensors.torch import save_file

    config = draft_config(geometry.drafter(method), target, method)
    noise, tensors = Noise(seed), dict[str, torch.Tensor]()
    for recipe in _recipes(config):
        made = noise.weight(recipe.weight, recipe.shape, torch.bfloat16)
        parts = made.split([piece.shape[0] for piece in recipe.pieces]) if len(recipe.pieces) > 1 else (made,)
        for piece, part in zip(recipe.pieces, parts, strict=True):
            name = piece.name.replace("layers.0.", "midlayer.") if config.layout == "specforge" else piece.name
            tensors[name] = part.clone() if len(parts) > 1 else part  # safetensors refuses shared memory
    if config.own_draft_map:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)  # the lowest ids of the target
    if method == "peagle":
        width = len(config.capture_boundaries) * config.target_hidden_size
        tensors[MASK_HIDDEN] = noise.weight(MASK_HIDDEN, (1, 1, width), torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_published(config, target), indent=1), encoding="utf-8")
    return directory


def write_mtp_layer(target: ModelConfig, directory: Path, seed: int = 1) -> None:
    """Write a random MTP layer into a target's directory, as its only weights; the target's own are not in files."""
    from safetensors.torch import save_file

    noise, tensors = Noise(seed), dict[str, torch.Tensor]()
    for recipe in mtp_recipes(mtp_config(target), TORCH_DTYPES["bfloat16"]):
        for piece in recipe.pieces:
            is_norm = len(piece.shape) == 1  # files store w of norms that multiply by 1 + w
            made = torch.zeros(piece.shape) if is_norm else noise.weight(recipe.weight, piece.shape, torch.bfloat16)
            tensors.setdefault(piece.name, made.to(torch.bfloat16))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _recipes(config: DraftConfig) -> list[Recipe]:
    dtype = TORCH_DTYPES["bfloat16"]
    if isinstance(config, DsparkConfig):
        return dspark_recipes(config, dtype)
    if isinstance(config, DflashConfig):
        return dflash_recipes(config, dtype)
    if isinstance(config, Eagle3Config):
        return draft_recipes(config, dtype)
    raise ConfigError(f"no random draft models are made of method {config.method!r}")


def _published(config: DraftConfig, target: ModelConfig) -> dict[str, Any]:
    """Return a draft model's config.json for a geometry."""
    layers = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn.inner_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.attention.num_heads,
        "num_key_value_heads": config.attention.num_kv_heads,
        "head_dim": config.attention.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.attention.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if not isinstance(config, DflashConfig):
        layers["architectures"] = ["LlamaForCausalLMEagle3"]
        layers["draft_vocab_size"] = config.draft_vocab_size
        layers["eagle_aux_hidden_state_layer_ids"] = list(config.capture_boundaries)
        return {**layers, "mask_token_id": config.mask_token} if isinstance(config, PeagleConfig) else layers
    layers |= {"model_type": "qwen3", "block_size": config.block_size, "num_target_layers": target.num_layers}
    own = {
        "mask_token_id": config.mask_token,
        "target_layer_ids": [boundary - 1 for boundary in config.capture_boundaries],  # layers whose output is meant
    }
    if not isinstance(config, DsparkConfig):
        return {**layers, "architectures": ["DFlashDraftModel"], "dflash_config": own}
    heads = {
        "markov_rank": config.markov_rank,
        "markov_head_type": "gated" if config.markov_gated else "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_markov,
    }
    return {**layers, "architectures": [DEEPSPEC[0]], **own, **heads}
