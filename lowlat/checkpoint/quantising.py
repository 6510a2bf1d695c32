"""Plain weights quantised on their way to an executor: linear layers rounded to nearest, all else as it is.

The matrices of a layer become the parts of their format one at a time; there is never a second copy of all of them. It
knows neither files nor families.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from lowlat.checkpoint.source import Named, WeightSource, shapes_of
from lowlat.errors import ConfigError
from lowlat.kernels.formats import FP8, MatrixFormat
from lowlat.kernels.formats.fp8 import quantise_fp8
from lowlat.kernels.formats.int4 import int4_format, quantise_int4

__all__ = ["LAYERS", "QuantisedWeights", "Quantiser", "quantised"]

GROUP = 128
LAYERS = ("qkv", "q", "kv", "o", "gate_up", "down", "fc")  # canonical names of linear layers; the LM head is by choice
LM_HEAD = "lm_head"
SUFFIX = ".weight"
CHUNK = 16 << 20  # numbers that are rounded at once
KINDS: Mapping[str, tuple[MatrixFormat, Callable[[torch.Tensor], dict[str, torch.Tensor]]]] = {
    "fp8": (FP8, quantise_fp8),
    "int4": (int4_format(GROUP, has_zeros=False), partial(quantise_int4, group=GROUP)),
}


@dataclass(frozen=True)
class Quantiser:
    """The rounding of a model's linear layers, those of experts among them: to FP8 by row, or to INT4 in groups of 128.

    lm_head  whether the LM head is among them
    option   that asked for it, for messages
    """

    kind: Literal["fp8", "int4"]
    lm_head: bool = False
    option: str = "quantize"

    @property
    def packed(self) -> MatrixFormat:
        """The format of the layers."""
        return KINDS[self.kind][0]

    def takes(self, weight: str) -> bool:
        """Whether a canonical weight is a matrix that is rounded."""
        owner, _, part = weight.rpartition(".")
        name = owner.rpartition(".")[2]
        return part == "weight" and (name in LAYERS or (self.lm_head and name == LM_HEAD))

    def specs(self, weight: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of the parts of a matrix, or of a stack of them.

        Raises ConfigError for one that the format cannot hold.
        """
        *outer, rows, columns = shape
        if columns % self.packed.block:
            raise ConfigError(
                f"{self.option} {self.kind!r} needs layers of a multiple of {self.packed.block} inputs, and {weight} "
                f"has {columns}"
            )
        owner = weight.removesuffix(SUFFIX)
        specs = self.packed.specs(rows, columns, torch.bfloat16)
        if "int4_scales" in specs:
            specs["int4_scales"] = (specs["int4_scales"][0], torch.bfloat16)  # as `quantise_int4` rounds them
        return {f"{owner}.{part}": ((*outer, *own), dtype) for part, (own, dtype) in specs.items()}

    def parts(self, weight: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of a matrix by name. Raises ConfigError as `specs` does, and for numbers that are not finite."""
        shapes = {name: shape for name, (shape, _) in self.specs(weight, tuple(tensor.shape)).items()}
        step = max(1, CHUNK // tensor.shape[-1])
        try:
            pieces = [KINDS[self.kind][1](rows) for rows in tensor.flatten(0, -2).split(step)]
        except ConfigError as error:
            raise ConfigError(f"{weight}: {error}") from None
        made = {part: torch.cat([each[part] for each in pieces]) for part in self.packed.parts}
        return {name: made[name.rpartition(".")[2]].view(shape) for name, shape in shapes.items()}


def quantised(weights: Mapping[str, torch.Tensor], quantiser: Quantiser) -> dict[str, torch.Tensor]:
    """Weights in memory with their linear layers by part. Raises ConfigError as `Quantiser.parts` does."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        made.update(quantiser.parts(name, tensor) if quantiser.takes(name) else {name: tensor})
    return made


class QuantisedWeights(WeightSource):
    """Another source's weights, linear layers by part; a tied LM head that is rounded is a matrix of its own."""

    def __init__(self, source: WeightSource, quantiser: Quantiser) -> None:
        self._source = source
        self._quantiser = quantiser
        self._owners: dict[str, str] = {}
        self._shapes: dict[str, torch.Tensor] = {}
        for name, shape in shapes_of(source).items():
            if not quantiser.takes(name):
                self._shapes[name] = shape
                continue
            for part, (own, dtype) in quantiser.specs(name, tuple(shape.shape)).items():
                self._owners[part] = name
                self._shapes[part] = torch.empty(own, dtype=dtype, device="meta")

    def __getitem__(self, name: str) -> torch.Tensor:
        owner = self._owners.get(name)
        if owner is not None:
            return self._quantiser.parts(owner, self._source[owner])[name]
        if name not in self._shapes:
            raise KeyError(name)
        return self._source[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def stream(self, arena: torch.Tensor | None = None) -> Generator[Named, None, None]:
        """See `WeightSource.stream`; parts have memory of their own."""
        for names, tensor in self._source.stream(arena):
            plain = tuple(name for name in names if not self._quantiser.takes(name))
            for name in names:
                if name not in plain:
                    for part, made in self._quantiser.parts(name, tensor).items():
                        yield (part,), made
            if plain:
                yield plain, tensor

    def shapes(self) -> dict[str, torch.Tensor]:
        """See `WeightSource.shapes`."""
        return dict(self._shapes)

    @property
    def arena_bytes(self) -> int:
        """See `WeightSource.arena_bytes`."""
        return self._source.arena_bytes
