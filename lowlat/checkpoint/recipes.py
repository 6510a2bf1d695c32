"""From checkpoint tensors to canonical weights: recipes, checked as a whole before the first byte is read.

A recipe says which stored tensors make one weight, and how. It knows neither configs nor families.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lowlat.checkpoint.json_file import shown
from lowlat.checkpoint.tensors import DTYPES, FLOAT_NAMES, Checkpoint, TensorEntry, check_finite
from lowlat.errors import ConfigError

__all__ = ["Arrange", "Piece", "Progress", "Recipe", "assemble"]

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

    def stored_dtypes(self) -> tuple[str, ...]:
        """The dtypes that the pieces may be stored in."""
        return FLOATS if self.dtype.is_floating_point else ("U8",)


def _check(checkpoint: Checkpoint, recipes: Sequence[Recipe], ignored: Collection[str]) -> None:
    """Missing, ill-shaped, ill-typed and surplus tensors, each named with its file."""
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


def _place(recipe: Recipe, out: torch.Tensor, offset: int, stored: torch.Tensor) -> None:
    """Copy one stored piece to its place in the canonical weight, converting it."""
    if recipe.arrange == "rows":
        out[offset : offset + stored.shape[0]].copy_(stored)
        return
    source = stored.transpose(1, 2) if recipe.arrange.startswith("transpose") else stored
    if recipe.arrange == "transpose":
        out.copy_(source)
        return
    half = out.shape[1] // 2
    out[:, :half].copy_(source[:, 0::2])
    out[:, half:].copy_(source[:, 1::2])


def _check_values(recipe: Recipe, entry: TensorEntry, values: torch.Tensor) -> None:
    """NaN, infinity, and finite values that the compute dtype cannot hold."""
    if not values.is_floating_point():
        return
    note = "" if DTYPES[entry.dtype] == recipe.dtype else f" (stored as {entry.dtype}, read as {recipe.dtype})"
    check_finite(values, f"{entry.file}: tensor {entry.name!r}{note}")


def assemble(
    checkpoint: Checkpoint,
    recipes: Sequence[Recipe],
    *,
    ignored: Collection[str] = (),
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Make every canonical weight, one stored tensor in memory at a time beside the results.

    ignored names stored tensors that are not read; every other tensor without a recipe is refused. progress is
    called with (bytes done, bytes in all) after each stored tensor. Returns contiguous CPU tensors by canonical
    name. Raises ConfigError naming file, tensor, expected and found.
    """
    _check(checkpoint, recipes, ignored)
    total = sum(checkpoint.entries[piece.name].num_bytes for recipe in recipes for piece in recipe.pieces)
    done = 0
    weights: dict[str, torch.Tensor] = {}
    for recipe in recipes:
        out = torch.empty(recipe.shape, dtype=recipe.dtype)
        offset = 0
        for entry, stored in checkpoint.read([piece.name for piece in recipe.pieces]):
            _place(recipe, out, offset, stored)
            placed = out[offset : offset + stored.shape[0]] if recipe.arrange == "rows" else out
            _check_values(recipe, entry, placed)
            offset += stored.shape[0]
            done += entry.num_bytes
            if progress is not None:
                progress(done, total)
        weights[recipe.weight] = out
    return weights
