"""This module quantises plain weights while they are loaded: it rounds the matrices of linear layers to nearest.

It turns one matrix at a time into the parts of its format, so that there is never a second copy of all of them.
"""

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lowlat.checkpoint.source import Named, WeightSource, shapes_of
from lowlat.errors import ConfigError
from lowlat.kernels.formats import ROUNDED_FORMATS, DenseFormat, matrix_name

__all__ = ["LAYERS", "QuantisedWeights", "Quantiser", "quantised", "rounding_bytes"]

# canonical names of linear layers; the LM head is optional
LAYERS = ("qkv", "qk", "q", "kv", "o", "gate", "delta_in", "delta_out", "gate_up", "down", "fc")
LM_HEAD = "lm_head"
SUFFIX = ".weight"
CHUNK = 4 << 20  # numbers that are rounded at a time
COPIES = 5  # the most float32 copies of a chunk


@dataclass(frozen=True)
class Quantiser:
    """The rounding of a model's linear layers, also in experts: to FP8 by row, or to INT4 in groups.

    kind     a key of `ROUNDED_FORMATS`
    lm_head  whether the LM head is rounded, too
    option   the option that asked for it, for messages
    group    the number of inputs that share a scale, for kinds with a choice of it
    """

    kind: Literal["fp8", "int4"]
    lm_head: bool = False
    option: str = "quantize"
    group: int = 128

    def fitted(self, *widths: int) -> "Quantiser":
        """Return a copy with the largest group size that divides all these numbers of inputs, or the smallest one."""
        common, groups = math.gcd(*widths), [each.block for each in ROUNDED_FORMATS[self.kind]]
        return replace(self, group=max((group for group in groups if common % group == 0), default=min(groups)))

    @property
    def packed(self) -> DenseFormat:
        """The format of the rounded layers."""
        known = ROUNDED_FORMATS[self.kind]
        return next((each for each in known if each.block == self.group), known[-1])

    def takes(self, weight: str) -> bool:
        """Whether this quantiser rounds a canonical weight."""
        owner, _, part = weight.rpartition(".")
        name = owner.rpartition(".")[2]
        return part == "weight" and (name in LAYERS or (self.lm_head and name == LM_HEAD))

    def specs(self, weight: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return names, shapes and dtypes of the parts of a matrix, or of a stack of matrices.

        Raises ConfigError if the format cannot hold it.
        """
        *outer, rows, columns = shape
        if columns % self.packed.block:
            raise ConfigError(
                f"{self.option} {self.kind!r} needs layers of a multiple of {self.packed.block} inputs, and {weight} "
                f"has {columns}"
            )
        owner = weight.removesuffix(SUFFIX)
        specs = self.packed.specs(rows, columns, torch.bfloat16)
        if self.packed.narrow and self.packed.scales is not None:
            specs[self.packed.scales] = (specs[self.packed.scales][0], torch.bfloat16)
        return {f"{owner}.{part}": ((*outer, *own), dtype) for part, (own, dtype) in specs.items()}

    def parts(self, weight: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Round a matrix; returns its parts by name. Raises ConfigError as `specs` does, and for NaN and infinity."""
        specs, step = self.specs(weight, tuple(tensor.shape)), max(1, CHUNK // tensor.shape[-1])
        made = {name: torch.empty(shape, dtype=dtype, device=tensor.device) for name, (shape, dtype) in specs.items()}
        rows, wholes = tensor.flatten(0, -2), {name: whole.flatten(0, -2) for name, whole in made.items()}
        try:
            for first in range(0, rows.shape[0], step):
                rounded = self.packed.quantise(rows[first : first + step])
                for name, whole in wholes.items():
                    whole[first : first + step] = rounded[name.rpartition(".")[2]]
        except ConfigError as error:
            raise ConfigError(f"{weight}: {error}") from None
        return made


def quantised(weights: Mapping[str, torch.Tensor], quantiser: Quantiser) -> dict[str, torch.Tensor]:
    """Return weights in memory with linear layers as parts. Raises ConfigError as `Quantiser.parts` does."""
    made: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        made.update(quantiser.parts(name, tensor) if quantiser.takes(name) else {name: tensor})
    return made


def rounding_bytes(shapes: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of host memory for rounding a matrix at a time: the largest one's parts, and float32 copies.

    shapes  tensors of the rounded weights' shapes and dtypes
    """
    sizes: dict[str, int] = {}
    for name, tensor in shapes.items():
        matrix = matrix_name(name)
        if matrix is not None:
            sizes[matrix] = sizes.get(matrix, 0) + tensor.nbytes
    return max(sizes.values()) + 4 * COPIES * CHUNK if sizes else 0


class QuantisedWeights(WeightSource):
    """Another source's weights with linear layers as parts; a tied LM head that is rounded is a matrix of its own."""

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

    @property
    def made_bytes(self) -> int:
        """See `WeightSource.made_bytes`."""
        return self._source.made_bytes + rounding_bytes({name: self._shapes[name] for name in self._owners})
