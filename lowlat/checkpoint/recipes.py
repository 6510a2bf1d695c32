"""A recipe describes which stored tensors make a canonical weight, and how.

All recipes are checked against the files' headers before a tensor is read. Rows of a stored tensor can be placed
without the rest of it. `stored` reads the tensors.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lowlat.checkpoint.json_file import shown
from lowlat.checkpoint.tensors import DTYPES, FLOAT_NAMES, Checkpoint, TensorEntry, check_finite
from lowlat.errors import ConfigError

__all__ = [
    "Arrange", "Conversion", "Piece", "Progress", "Recipe", "Span", "check_recipes", "check_values", "chosen_recipes",
    "picked_piece", "place_rows", "placed_rows", "renamed_piece",
    "renamed_recipe", "reshaped_piece",
]  # fmt: skip

Arrange = Literal["rows", "deinterleave", "transpose", "transpose_deinterleave"]
Span = tuple[int, int]
Progress = Callable[[int, int], None]

FLOATS = tuple(FLOAT_NAMES)


@dataclass(frozen=True)
class Piece:
    """One stored tensor: its name, the shape that the config implies, and its conversion to rows, if it needs one.

    spans  the rows of the stored matrix that are used, see `picked_piece`; None: all
    """

    name: str
    shape: tuple[int, ...]
    conversion: "Conversion | None" = None
    spans: tuple[Span, ...] | None = None

    @property
    def made(self) -> tuple[int, ...]:
        """The shape of the rows that it gives."""
        return self.shape if self.conversion is None else self.conversion.shape

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes in which it may be stored."""
        return (self.shape,) if self.conversion is None else (self.shape, *self.conversion.also)


@dataclass(frozen=True)
class Conversion:
    """The conversion of a stored tensor, read whole, to rows of a weight or of a part of a quantised one.

    shape   the shape of the rows
    dtypes  the dtypes in which the tensor may be stored, as safetensors names them
    make    make(label, tensor, *beside) returns the rows, in any dtype that converts exactly. The label names file and
            tensor; it raises ConfigError for values that are not implemented
    also    shapes that the tensor may have besides its piece's
    beside  small tensors that are read with it
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    make: Callable[..., torch.Tensor]
    also: tuple[tuple[int, ...], ...] = ()
    beside: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """The recipe of one canonical weight, made of stored pieces.

    rows                    pieces stacked along dimension 0
    deinterleave            [E, 2I, ...], gate and up rows alternating -> all gate rows, then all up rows
    transpose               [E, in, out] -> [E, out, in]
    transpose_deinterleave  [E, N, 2I] -> [E, 2I, N], gate rows first
    count                   number of matrices in the stacked rows: [E * N, ...] -> [E, N, ...]; None: they stay rows
    other                   a recipe of the same weight for files without these tensors; see `chosen_recipes`
    """

    weight: str
    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    arrange: Arrange = "rows"
    count: int | None = None
    other: "Recipe | None" = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the canonical weight."""
        first = self.pieces[0].made
        if self.arrange == "rows":
            rows = sum(piece.made[0] for piece in self.pieces)
            return (rows, *first[1:]) if self.count is None else (self.count, rows // self.count, *first[1:])
        if self.arrange == "deinterleave":
            return first
        return (first[0], first[2], first[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of the canonical weight."""
        return math.prod(self.shape) * self.dtype.itemsize

    def stored_dtypes(self, piece: Piece) -> tuple[str, ...]:
        """Return the dtypes in which one of the pieces may be stored."""
        if piece.conversion is not None:
            return piece.conversion.dtypes
        return FLOATS if self.dtype.is_floating_point else ("U8",)


def picked_piece(piece: Piece, spans: tuple[Span, ...]) -> Piece:
    """Return a piece with some of another's rows, span after span."""
    inner = piece.conversion

    def pick(label: str, stored: torch.Tensor, *beside: torch.Tensor) -> torch.Tensor:
        rows = stored if inner is None else inner.make(label, stored, *beside)
        return torch.cat([rows[start:stop] for start, stop in spans])

    shape = (sum(stop - start for start, stop in spans), *piece.made[1:])
    if inner is None:
        return Piece(piece.name, piece.shape, Conversion(shape, FLOATS, pick), spans)
    return Piece(piece.name, piece.shape, Conversion(shape, inner.dtypes, pick, inner.also, inner.beside), spans)


def reshaped_piece(name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    """Return the piece of a stored floating-point tensor that has another shape in its weight."""
    return Piece(name, stored, Conversion(shape, FLOATS, lambda _label, tensor: tensor.reshape(shape)))


def renamed_piece(piece: Piece, rename: Callable[[str], str]) -> Piece:
    """Return a piece with other names of stored tensors."""
    conversion = piece.conversion
    if conversion is not None and conversion.beside:
        conversion = replace(conversion, beside=tuple(renamed_piece(each, rename) for each in conversion.beside))
    return Piece(rename(piece.name), piece.shape, conversion, piece.spans)


def renamed_recipe(recipe: Recipe, rename: Callable[[str], str]) -> Recipe:
    """Return a recipe of the same weight with other names of stored tensors."""
    pieces = tuple(renamed_piece(piece, rename) for piece in recipe.pieces)
    other = None if recipe.other is None else renamed_recipe(recipe.other, rename)
    return replace(recipe, pieces=pieces, other=other)


def chosen_recipes(recipes: Sequence[Recipe], names: Collection[str] | None, *, others: bool) -> list[Recipe]:
    """Choose between each recipe and its `other`, by the tensors that the files have.

    names   names of the stored tensors; None: they are not known
    others  whether to choose `other` if the names are not known
    """

    def chosen(recipe: Recipe) -> Recipe:
        has_own = not others if names is None else all(piece.name in names for piece in recipe.pieces)
        return recipe if recipe.other is None or has_own else recipe.other

    return [chosen(recipe) for recipe in recipes]


def check_recipes(checkpoint: Checkpoint, recipes: Sequence[Recipe], ignored: Collection[str] = ()) -> None:
    """Compare recipes with headers; refuse tensors that are missing, surplus, or of another shape or dtype.

    ignored  stored tensors that are not read; any other tensor without a recipe is surplus
    Raises ConfigError with file, tensor, expected and found.
    """
    wanted: set[str] = set()
    for recipe in recipes:
        for piece in recipe.pieces:
            wanted.add(_check_piece(checkpoint, piece, recipe.stored_dtypes(piece)))
            for each in () if piece.conversion is None else piece.conversion.beside:
                wanted.add(_check_piece(checkpoint, each, ("I32", "I64")))
    surplus = [entry for name, entry in checkpoint.entries.items() if name not in wanted and name not in ignored]
    if surplus:
        raise ConfigError(
            f"{surplus[0].file}: unexpected tensor {shown(surplus[0].name)} of shape {list(surplus[0].shape)}, "
            f"{len(surplus)} such in all; the config does not ask for it"
        )


def _check_piece(checkpoint: Checkpoint, piece: Piece, dtypes: tuple[str, ...]) -> str:
    """Compare one piece with its header; returns its name."""
    entry = checkpoint.entries.get(piece.name)
    if entry is None:
        raise ConfigError(
            f"{checkpoint.directory}: tensor {piece.name!r} is missing; expected shape {list(piece.shape)}"
        )
    label = f"{entry.file}: tensor {piece.name!r}"
    if entry.shape not in piece.shapes:
        expected = " or ".join(str(list(shape)) for shape in piece.shapes)
        raise ConfigError(f"{label}: expected shape {expected}, found {list(entry.shape)}")
    if entry.dtype not in dtypes:
        raise ConfigError(f"{label}: expected dtype {' or '.join(dtypes)}, found {entry.dtype}")
    return piece.name


def placed_rows(recipe: Recipe, out: torch.Tensor, offset: int, first: int, count: int) -> torch.Tensor:
    """Return the contiguous place of rows [first, first + count) of a stored tensor in the canonical weight.

    offset  rows of the pieces before; arrangements other than "rows" have one piece, and keep its first dimension
    """
    start = offset + first if recipe.arrange == "rows" else first
    return (out if recipe.count is None else out.flatten(0, 1))[start : start + count]


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
    """Refuse NaN, infinity, and finite values that overflow the compute dtype; first: see `placed_rows`."""
    if not recipe.dtype.is_floating_point:
        return
    note = (
        ""
        if entry.dtype not in FLOAT_NAMES or DTYPES[entry.dtype] == recipe.dtype
        else f" (stored as {entry.dtype}, read as {recipe.dtype})"
    )
    row = math.prod(entry.shape[1:])
    label = f"{entry.file}: tensor {entry.name!r}{note}"
    check_finite(placed, label, first=first * row, total=math.prod(entry.shape))
