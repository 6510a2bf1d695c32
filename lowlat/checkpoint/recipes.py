"""From checkpoint tensors to canonical weights: recipes, checked as a whole before the first byte is read.

A recipe says which stored tensors make one weight, and how; rows of a stored tensor can be placed without the rest of
it. It knows neither configs nor families, and it reads nothing: that is `stored`'s.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lowlat.checkpoint.json_file import shown
from lowlat.checkpoint.tensors import DTYPES, FLOAT_NAMES, Checkpoint, TensorEntry, check_finite
from lowlat.errors import ConfigError

__all__ = ["Arrange", "Piece", "Progress", "Recipe", "check_recipes", "check_values", "place_rows", "placed_rows"]

Arrange = Literal["rows", "deinterleave", "transpose", "transpose_deinterleave"]
Progress = Callable[[int, int], None]

FLOATS = tuple(FLOAT_NAMES)


@dataclass(frozen=True)
class Piece:
    """One stored tensor: its name, and the shape that the config makes it have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """How one canonical weight is made of stored pieces.

    rows                    pieces stacked along dimension 0
    deinterleave            [E, 2I, ...], gate and up rows alternating -> all gate rows, then all up rows
    transpose               [E, in, out] -> [E, out, in]
    transpose_deinterleave  [E, N, 2I] -> [E, 2I, N], gate rows first
    """

    weight: str
    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    arrange: Arrange = "rows"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the canonical weight."""
        first = self.pieces[0].shape
        if self.arrange == "rows":
            return (sum(piece.shape[0] for piece in self.pieces), *first[1:])
        if self.arrange == "deinterleave":
            return first
        return (first[0], first[2], first[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the canonical weight."""
        return math.prod(self.shape) * self.dtype.itemsize

    def stored_dtypes(self) -> tuple[str, ...]:
        """The dtypes that the pieces may be stored in."""
        return FLOATS if self.dtype.is_floating_point else ("U8",)


def check_recipes(checkpoint: Checkpoint, recipes: Sequence[Recipe], ignored: Collection[str] = ()) -> None:
    """Compare recipes with headers: what is missing, ill-shaped, ill-typed or surplus is refused, with its file.

    ignored names stored tensors that are not read; every other tensor without a recipe is surplus. Raises ConfigError
    naming file, tensor, expected and found.
    """
    wanted: set[str] = set()
    for recipe in recipes:
        for piece in recipe.pieces:
            wanted.add(piece.name)
            entry = checkpoint.entries.get(piece.name)
            if entry is None:
                raise ConfigError(
                    f"{checkpoint.directory}: tensor {piece.name!r} is missing; expected shape {list(piece.shape)}"
                )
            if entry.shape != piece.shape:
                raise ConfigError(
                    f"{entry.file}: tensor {piece.name!r}: expected shape {list(piece.shape)}, "
                    f"found {list(entry.shape)}"
                )
            allowed = recipe.stored_dtypes()
            if entry.dtype not in allowed:
                raise ConfigError(
                    f"{entry.file}: tensor {piece.name!r}: expected dtype {' or '.join(allowed)}, found {entry.dtype}"
                )
    surplus = [entry for name, entry in checkpoint.entries.items() if name not in wanted and name not in ignored]
    if surplus:
        raise ConfigError(
            f"{surplus[0].file}: unexpected tensor {shown(surplus[0].name)} of shape {list(surplus[0].shape)}, "
            f"{len(surplus)} such in all; the config does not ask for it"
        )


def placed_rows(recipe: Recipe, out: torch.Tensor, offset: int, first: int, count: int) -> torch.Tensor:
    """Where rows [first, first + count) of a stored tensor go in the canonical weight, contiguous.

    offset  rows of the pieces before this one; the other arrangements have one piece, whose first dimension they keep
    """
    start = offset + first if recipe.arrange == "rows" else first
    return out[start : start + count]


def place_rows(recipe: Recipe, placed: torch.Tensor, stored: torch.Tensor) -> None:
    """Copy rows of a stored piece to their place (see `placed_rows`), arranging and converting them."""
    if recipe.arrange == "rows":
        placed.copy_(stored)
        return
    source = stored.transpose(1, 2) if recipe.arrange.startswith("transpose") else stored
    if recipe.arrange == "transpose":
        placed.copy_(source)
        return
    half = placed.shape[1] // 2
    placed[:, :half].copy_(source[:, 0::2])
    placed[:, half:].copy_(source[:, 1::2])


def check_values(recipe: Recipe, entry: TensorEntry, placed: torch.Tensor, first: int) -> None:
    """Refuse NaN, infinity, and finite values that the compute dtype cannot hold; first is that of `placed_rows`."""
    if not recipe.dtype.is_floating_point:
        return
    note = "" if DTYPES[entry.dtype] == recipe.dtype else f" (stored as {entry.dtype}, read as {recipe.dtype})"
    row = math.prod(entry.shape[1:])
    label = f"{entry.file}: tensor {entry.name!r}{note}"
    check_finite(placed, label, first=first * row, total=math.prod(entry.shape))
