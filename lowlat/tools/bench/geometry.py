"""This module makes targets and draft models of named geometries with random weights.

A step's time does not depend on the weights' values, except by an MoE layer's choice of experts, which random routers
spread evenly. A target's weights are in no file, so that a model larger than the disk can be measured.
"""

import json
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from lowlat.checkpoint.recipes import Recipe
from lowlat.checkpoint.source import Named, WeightSource
from lowlat.errors import ConfigError
from lowlat.models.geometry import ModelConfig
from lowlat.models.target import OpenedTarget, read_model_config, target_recipes
from lowlat.speculators.mtp.config import COUNT_KEYS
from lowlat.speculators.mtp.geometry import MtpConfig

__all__ = ["Geometry", "Head", "Noise", "RandomWeights", "random_target", "read_geometries"]

TABLE = Path(__file__).parent / "geometries.toml"
NOISE = (1 << 22) + 3  # numbers drawn once for all weights; odd, so that rows of a matrix differ
SCALES = (119, 121)  # MXFP4: 2 ** -8 and 2 ** -7, which keep activations at their size


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A draft model of the target's width and heads.

    draft_vocab_size  rows of its LM head, which is the target's if it has none
    boundaries        the target's boundaries that it reads
    block_size        rows of a block, with the last known token's; DFlash and DSpark only
    markov_rank       DSpark only
    """

    intermediate_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    num_layers: int = 1
    block_size: int | None = None
    markov_rank: int = 0


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A target's shape, as its config.json, and the shapes of its draft models by method: `head` is EAGLE3's."""

    target: dict[str, Any]
    head: Head | None = None
    peagle: Head | None = None
    dflash: Head | None = None
    dspark: Head | None = None

    @property
    def has_draft_models(self) -> bool:
        """Whether it has a draft model of any method."""
        return any(self._drafters.values())

    @property
    def _drafters(self) -> dict[str, Head | None]:
        return {"eagle3": self.head, "peagle": self.peagle, "dflash": self.dflash, "dspark": self.dspark}

    def with_whole_vocabulary(self) -> "Geometry":
        """Return the same shape with draft models that draft all of the target's ids."""
        whole = {
            field: msgspec.structs.replace(each, draft_vocab_size=self.target["vocab_size"])
            for field in ("head", "peagle", "dflash", "dspark")
            if (each := getattr(self, field)) is not None
        }
        return msgspec.structs.replace(self, **whole)

    @property
    def drafting(self) -> str:
        """Return the method for "auto": the target's MTP layer, else that of the first draft model.

        Raises ConfigError if there is neither.
        """
        if any(self.target.get(key) for key in COUNT_KEYS):
            return MtpConfig.method
        found = next((method for method, head in self._drafters.items() if head is not None), None)
        if found is None:
            raise ConfigError(
                "method 'auto' finds nothing to draft with: the geometry has neither MTP nor draft models"
            )
        return found

    def drafter(self, method: str) -> Head:
        """Return the draft model of a method. Raises ConfigError if the geometry has none."""
        found = self._drafters
        head = found.get(method)
        if head is None:
            known = ", ".join(name for name, each in found.items() if each is not None) or "none"
            raise ConfigError(f"the geometry has no draft model of method {method!r:.80}; it has {known}")
        return head


def read_geometries(path: Path = TABLE) -> dict[str, Geometry]:
    """Read a table of geometries. Raises ConfigError for another file."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, Geometry])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: no table of geometries: {error}") from error


def random_target(
    geometry: Geometry, directory: Path, dtype: str = "auto", device: torch.device | None = None
) -> OpenedTarget:
    """Write the target's config.json into a directory, and open it with random weights. Raises ConfigError.

    device  the device on which weights are made; None: the CPU
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(geometry.target, indent=1), encoding="utf-8")
    config = read_model_config(directory, dtype=dtype)
    return OpenedTarget(config, RandomWeights(config, device=device), directory)


class Noise:
    """Random numbers of a seed, on a device, with which weights of all sizes are filled."""

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._codes = torch.randint(0, 256, (NOISE,), dtype=torch.uint8, generator=generator).to(device)
        self._normal = torch.randn(NOISE, generator=generator).to(device)

    def weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a weight; its canonical name determines mean, deviation, and its start in the noise."""
        if dtype == torch.uint8:
            low, high = SCALES
            noise = low + self._codes % (high - low) if name.endswith("scales") else self._codes
        else:
            mean, deviation = _spread(name, shape)
            noise = (mean + deviation * self._normal).to(dtype)
        start = zlib.crc32(name.encode()) % NOISE  # another start for each weight
        out = torch.empty(shape, dtype=dtype, device=noise.device)
        flat = out.view(-1)
        done = min(NOISE - start, flat.numel())
        flat[:done] = noise[start : start + done]
        while done < flat.numel():
            count = min(NOISE, flat.numel() - done)
            flat[done : done + count] = noise[:count]
            done += count
        return out


class RandomWeights(WeightSource):
    """A target's canonical weights, random by a seed, made on a device at each look-up."""

    def __init__(self, config: ModelConfig, seed: int = 0, device: torch.device | None = None) -> None:
        self._recipes = {recipe.weight: recipe for recipe in target_recipes(config)}
        self._aliases = {"lm_head.weight": "embed.weight"} if config.tie_embeddings else {}
        self._noise = Noise(seed, device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._draw(self._recipes[self._aliases.get(name, name)])

    def __iter__(self) -> Iterator[str]:
        yield from self._recipes
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._recipes) + len(self._aliases)

    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """See `WeightSource.stream`; each tensor has memory of its own."""
        second = {own: name for name, own in self._aliases.items()}
        for name, recipe in self._recipes.items():
            yield (name, second[name]) if name in second else (name,), self._draw(recipe)

    def shapes(self) -> dict[str, torch.Tensor]:
        """See `WeightSource.shapes`."""
        found = {name: torch.empty(r.shape, dtype=r.dtype, device="meta") for name, r in self._recipes.items()}
        return found | {name: found[own] for name, own in self._aliases.items()}

    @property
    def arena_bytes(self) -> int:
        """0: nothing is read."""
        return 0

    def _draw(self, recipe: Recipe) -> torch.Tensor:
        return self._noise.weight(recipe.weight, recipe.shape, recipe.dtype)


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return a weight's mean and deviation, so that activations keep their size and routers spread their rows."""
    if "norm" in name or name.endswith((".scalar", "router.scale")):
        return 1.0, 0.1
    if name.endswith("bias"):
        return 0.0, 0.0 if "router" in name else 0.02
    if name.endswith(("sinks", "embed.weight", "delta_a.weight", "delta_dt.weight")):
        return 0.0, 1.0
    return 0.0, shape[-1] ** -0.5
