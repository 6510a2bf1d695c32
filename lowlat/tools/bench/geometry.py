"""Named geometries with random weights: a target that is filled while it is loaded, and a draft model in files.

A step's time does not depend on the weights' values, but for a mixture's choice of experts: random routers spread it.
A target's weights lie in no file, so that a model larger than the disk can be measured.
"""

import json
import math
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from lowlat.checkpoint.recipes import Recipe
from lowlat.checkpoint.source import Named, WeightSource
from lowlat.errors import ConfigError
from lowlat.models.geometry import DraftConfig, ModelConfig, RopeConfig
from lowlat.models.target import OpenedTarget, read_model_config, target_recipes
from lowlat.speculators.eagle3.weights import draft_recipes

__all__ = ["Geometry", "Head", "RandomWeights", "draft_config", "random_target", "read_geometries", "write_draft_model"]

TABLE = Path(__file__).parent / "geometries.toml"
NOISE = (1 << 22) + 3  # numbers drawn once and used everywhere; odd, so that rows of a matrix differ
SCALES = (119, 121)  # MXFP4: 2 ** -8 and 2 ** -7, which keep activations at their size


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A draft model of the target's width and heads; `boundaries` are those that it reads of the target."""

    intermediate_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pair's shapes: what the target's config.json says, and the draft model."""

    target: dict[str, Any]
    head: Head


def read_geometries(path: Path = TABLE) -> dict[str, Geometry]:
    """The geometries in a table. Raises ConfigError for a file that is none."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, Geometry])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no table of geometries: {error}") from error


def random_target(
    geometry: Geometry, directory: Path, dtype: str = "auto", device: torch.device | None = None
) -> OpenedTarget:
    """Write the target's config.json into a directory, and open it with random weights. Raises ConfigError.

    device  on which they are made; None: the CPU
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(geometry.target, indent=1), encoding="utf-8")
    config = read_model_config(directory, dtype=dtype)
    return OpenedTarget(config, RandomWeights(config, device=device), directory)


class RandomWeights(WeightSource):
    """A target's canonical weights, of numbers drawn from a seed, made on a device when they are asked for."""

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | None = None) -> None:
        self._recipes = {recipe.weight: recipe for recipe in target_recipes(config)}
        self._aliases = {"lm_head.weight": "embed.weight"} if config.tie_embeddings else {}
        generator = torch.Generator().manual_seed(seed)
        self._codes = torch.randint(0, 256, (NOISE,), dtype=torch.uint8, generator=generator).to(device)
        self._normal = torch.randn(NOISE, generator=generator).to(device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._draw(self._recipes[self._aliases.get(name, name)])

    def __iter__(self) -> Iterator[str]:
        yield from self._recipes
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._recipes) + len(self._aliases)

    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """See `WeightSource.stream`; every tensor has memory of its own."""
        second = {own: name for name, own in self._aliases.items()}
        for name, recipe in self._recipes.items():
            yield (name, second[name]) if name in second else (name,), self._draw(recipe)

    def shapes(self) -> dict[str, torch.Tensor]:
        """See `WeightSource.shapes`."""
        found = {name: torch.empty(r.shape, dtype=r.dtype, device="meta") for name, r in self._recipes.items()}
        return found | {name: found[own] for name, own in self._aliases.items()}

    @property
    def arena_bytes(self) -> int:
        """None is needed: nothing is read."""
        return 0

    def _draw(self, recipe: Recipe) -> torch.Tensor:
        name = recipe.weight
        if recipe.dtype == torch.uint8:
            low, high = SCALES
            noise = low + self._codes % (high - low) if name.endswith("scales") else self._codes
        else:
            mean, deviation = _spread(name, recipe.shape)
            noise = (mean + deviation * self._normal).to(recipe.dtype)
        start = zlib.crc32(name.encode()) % NOISE  # another place for every weight
        out = torch.empty(recipe.shape, dtype=recipe.dtype, device=noise.device)
        flat = out.view(-1)
        done = min(NOISE - start, flat.numel())
        flat[:done] = noise[start : start + done]
        while done < flat.numel():
            count = min(NOISE, flat.numel() - done)
            flat[done : done + count] = noise[:count]
            done += count
        return out


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a weight, so that activations keep their size and routers spread their rows."""
    if "norm" in name:
        return 1.0, 0.1
    if name.endswith("bias"):
        return 0.0, 0.0 if "router" in name else 0.02
    if name.endswith(("sinks", "embed.weight")):
        return 0.0, 1.0
    return 0.0, shape[-1] ** -0.5


def write_draft_model(geometry: Geometry, target: ModelConfig, directory: Path, seed: int = 1) -> Path:
    """Write a random EAGLE3 draft model for a target, in SpecForge's layout; return its directory."""
    from safetensors.torch import save_file

    head = geometry.head
    config = draft_config(head, target)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for recipe in draft_recipes(config, torch.bfloat16):
        mean, deviation = _spread(recipe.weight, recipe.shape)
        for piece in recipe.pieces:
            noise = torch.randn(math.prod(piece.shape), generator=generator)
            tensor = (mean + deviation * noise).to(torch.bfloat16).view(piece.shape)
            tensors[piece.name.replace("layers.0.", "midlayer.")] = tensor
    tensors["d2t"] = torch.zeros(head.draft_vocab_size, dtype=torch.int64)  # the lowest ids of the target
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_published(config), indent=1), encoding="utf-8")
    return directory


def draft_config(head: Head, target: ModelConfig) -> DraftConfig:
    """The geometry of a draft model for a target."""
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position", "rms_norm_eps")
    return DraftConfig(
        layout="specforge",
        target_hidden_size=target.hidden_size,
        intermediate_size=head.intermediate_size,
        draft_vocab_size=head.draft_vocab_size,
        rope=RopeConfig(theta=target.rope.theta),
        capture_boundaries=head.boundaries,
        **{name: getattr(target, name) for name in names},
    )


def _published(config: DraftConfig) -> Mapping[str, Any]:
    """The config.json of a draft model for a geometry."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(config.capture_boundaries),
    }
