"""This module draws a model's random weights, on the device, directly as the parts of their formats.

A step's time does not depend on their values, except by an MoE layer's choice of experts: random routers spread their
rows. Codes are random bits, all of which are numbers, and scales keep activations at their size. No two matrices are
alike, so the L2 helps no more than it does with real ones. Weights are drawn in an order that the model fixes, by one
generator: a seed gives the same ones whenever they are drawn.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

import torch

from lowlat.checkpoint.quantising import LAYERS
from lowlat.checkpoint.source import Named, WeightSource
from lowlat.errors import ConfigError
from lowlat.kernels.formats import MATRIX_FORMATS
from lowlat.models.geometry import ModelConfig
from lowlat.models.weight_plan import WeightPlan

__all__ = ["Part", "Plan", "RandomParts", "planned"]

MXFP4_SCALES = (119, 121)  # 2 ** -8 and 2 ** -7: uniform codes have deviation 2.9, and 2880 columns want 1 / 54
DEVIATIONS = {"fp8": 60.0, "fp8_block": 60.0, "nvfp4": 30.0}  # of random codes, about
INT4_DEVIATION = 4.6
NVFP4_ONE = 0x38  # the scale 1.0


@dataclass(frozen=True)
class Part:
    """A weight, or a part of a matrix that is held by several.

    scale  that its format's scales have, so that the matrix keeps activations at their size; 0 of a plain weight
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Plan = Mapping[str, Part]  # canonical name -> what it is


def planned(plain: WeightPlan, format_of: Callable[[str], str]) -> Plan:
    """A plan of plain weights with their linear layers, experts' among them, in formats by canonical name.

    Raises ConfigError for a format that is not known, or that does not hold a matrix of that shape.
    """
    plan: dict[str, Part] = {}
    for name, (shape, dtype) in plain.items():
        kind = format_of(name) if _is_linear(name) else "bf16"
        if kind == "bf16":
            plan[name] = Part(shape, dtype)
            continue
        if kind not in MATRIX_FORMATS:
            raise ConfigError(f"weights {kind!r:.40} are no format; there are {', '.join(MATRIX_FORMATS)}")
        *outer, rows, columns = shape
        if columns % MATRIX_FORMATS[kind].block:
            raise ConfigError(f"{name} has {columns} columns, no multiple of {kind}'s {MATRIX_FORMATS[kind].block}")
        scale = columns**-0.5 / DEVIATIONS.get(kind, INT4_DEVIATION)
        for part, (own, held) in MATRIX_FORMATS[kind].specs(rows, columns, torch.bfloat16).items():
            stored = torch.bfloat16 if part == "int4_scales" else held
            plan[f"{name.removesuffix('.weight')}.{part}"] = Part((*outer, *own), stored, scale)
    return plan


def _is_linear(name: str) -> bool:
    owner, _, part = name.rpartition(".")
    return part == "weight" and owner.rpartition(".")[2] in (*LAYERS, "lm_head")


class RandomParts(WeightSource):
    """A plan's weights, made on the device one at a time as they are streamed.

    plan    canonical name -> shape and dtype
    config  of the target, whose vocabulary the ids of a draft model's tokens are chosen from
    """

    def __init__(self, plan: Plan, config: ModelConfig, device: torch.device, *, seed: int = 0) -> None:
        self._plan, self._device, self._seed = plan, device, seed
        self._vocab_size = config.vocab_size
        tied = config.tie_embeddings and "lm_head.weight" not in plan and "embed.weight" in plan
        self._aliases = {"lm_head.weight": "embed.weight"} if tied else {}

    def __getitem__(self, name: str) -> torch.Tensor:
        own = self._aliases.get(name, name)
        for drawn, tensor in self._draw():
            if drawn == own:
                return tensor
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._plan
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._plan) + len(self._aliases)

    def __contains__(self, name: object) -> bool:
        return name in self._plan or name in self._aliases

    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """See `WeightSource.stream`; every tensor has memory of its own, on the device."""
        second = {own: name for name, own in self._aliases.items()}
        for name, tensor in self._draw():
            yield (name, second[name]) if name in second else (name,), tensor

    def shapes(self) -> dict[str, torch.Tensor]:
        """See `WeightSource.shapes`."""
        found = {name: torch.empty(part.shape, dtype=part.dtype, device="meta") for name, part in self._plan.items()}
        return found | {name: found[own] for name, own in self._aliases.items()}

    @property
    def arena_bytes(self) -> int:
        """0: nothing is read."""
        return 0

    def _draw(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Draw the weights in the plan's order."""
        generator = torch.Generator(self._device).manual_seed(self._seed)
        for name, part in self._plan.items():
            yield name, self._drawn(name, part, generator)

    def _drawn(self, name: str, part: Part, generator: torch.Generator) -> torch.Tensor:
        if part.dtype == torch.int32 and not part.scale:  # the ids of a draft model's tokens
            chosen = torch.randperm(self._vocab_size, generator=generator, device=self._device)[: part.shape[0]]
            return chosen.sort().values.to(torch.int32)
        made = torch.empty(part.shape, dtype=part.dtype, device=self._device)
        if name.endswith((".blocks", ".scales")):  # MXFP4
            low, high = MXFP4_SCALES if name.endswith("scales") else (0, 256)
            return made.random_(low, high, generator=generator)
        if not part.scale:
            return made.normal_(*_spread(name, part.shape), generator=generator)
        kind = name.rpartition(".")[2]
        if part.dtype in (torch.float32, torch.bfloat16):
            return made.copy_(torch.tensor(part.scale).bfloat16())
        if kind == "nvfp4_scales":
            return made.fill_(NVFP4_ONE)
        made.random_(0, 16 if kind.endswith("zeros") else 256, generator=generator)
        return made.bitwise_and_(0xF7) if kind == "fp8" else made  # no NaN


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and deviation of a weight, so that activations keep their size and routers spread their rows."""
    if "router" in name:
        return 0.0, 0.0 if name.endswith("bias") else shape[-1] ** -0.5
    if "norm" in name:
        return 1.0, 0.1
    if name.endswith("bias"):
        return 0.0, 0.02
    if name.endswith(("sinks", "embed.weight")):
        return 0.0, 1.0
    return 0.0, shape[-1] ** -0.5
