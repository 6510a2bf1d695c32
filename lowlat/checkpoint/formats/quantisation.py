"""This module decides which layers of a checkpoint are quantised, and how, by the rules of its config.

Families write recipes for plain weights. This module replaces those of quantised layers by recipes of their parts.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

import torch

from lowlat.checkpoint.formats.linear import StoredLinear
from lowlat.checkpoint.recipes import Piece, Recipe, Span, picked_piece
from lowlat.checkpoint.tensors import Checkpoint, TensorEntry
from lowlat.errors import ConfigError
from lowlat.kernels.formats import DENSE_FORMATS, MatrixFormat

__all__ = ["Names", "Quantisation", "Rule", "narrowed", "part_recipes"]

LAYER_CLASS = "Linear"
PLAIN = ("embed", "per_layer_embed", "router", "shared_gate")  # no linear layer's GEMM reads these weights
SUFFIX, BIAS = ".weight", ".bias"
SCALES = tuple({f".{each.scales}" for each in DENSE_FORMATS.values() if each.scales is not None})
# tensors about quantised activations and caches, not weights; see `lowlat.checkpoint.kv_scales`
UNUSED = (
    *("input_scale", "input_global_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale"),
    "activation_scale",
    *("kv_scale", "k_zero_point", "v_zero_point"),
)
MAX_EXPRESSION, MAX_REPEATS = 256, 4
PLAIN_EXPRESSION = re.compile(r"(?:[\w.^$|()\[\]?:-]|\\[.dw]|[*+])*")
NESTED_REPEAT = re.compile(r"\)[*+?{]|[*+][*+]")


@dataclass(frozen=True)
class Names:
    """Names of modules in a config: whole names or parts between dots, `re:` expressions, wildcards, or "Linear".

    whole  "Linear" is among them, which names all linear layers
    """

    patterns: tuple[str, ...] = ()
    whole: bool = False

    @classmethod
    def parse(cls, label: str, names: Iterable[str]) -> "Names":
        """Parse a list of names. Raises ConfigError for regular expressions that could take for ever."""
        names = tuple(names)
        for name in names:
            if name.startswith("re:"):
                _check_expression(label, name)
        return cls(tuple(name for name in names if name != LAYER_CLASS), LAYER_CLASS in names)

    def match(self, module: str) -> bool:
        """Whether they name this linear layer."""
        if self.whole:
            return True
        # look-ups by kind, for speed: configs list hundreds of names, models have tens of thousands of layers
        literal, lengths, others = self._by_kind
        parts = module.split(".")
        for start, first in enumerate(parts):
            for length in lengths.get(first, ()):
                if ".".join(parts[start : start + length]) in literal:
                    return True
        return any(_matches(pattern, module) for pattern in others)

    @cached_property
    def _by_kind(self) -> tuple[frozenset[str], Mapping[str, frozenset[int]], tuple[str, ...]]:
        """Literal names; their numbers of dotted parts, by first part; and patterns, which are matched one by one."""
        others = tuple(name for name in self.patterns if name.startswith("re:") or "*" in name or "?" in name)
        literal = frozenset(self.patterns).difference(others)
        lengths: dict[str, frozenset[int]] = {}
        for name in literal:
            parts = name.split(".")
            lengths[parts[0]] = lengths.get(parts[0], frozenset()) | {len(parts)}
        return literal, lengths, others


def _check_expression(label: str, name: str) -> None:
    text = name.removeprefix("re:")
    plain = len(text) <= MAX_EXPRESSION and PLAIN_EXPRESSION.fullmatch(text) and not NESTED_REPEAT.search(text)
    if not plain or sum(map(text.count, "*+")) > MAX_REPEATS:
        raise ConfigError(
            f"{label}: the expression {name!r:.80} is not implemented: at most {MAX_REPEATS} plain repeats"
        )
    try:
        re.compile(text)
    except re.error as error:
        raise ConfigError(f"{label}: {name!r:.80} is no expression: {error}") from None


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


@dataclass(frozen=True)
class Rule:
    """A rule: these layers are stored in this layout."""

    layers: Names
    stored: StoredLinear


@dataclass(frozen=True)
class Quantisation:
    """The quantised layers of a checkpoint.

    label   the config, for messages
    rules   rules in order: the first one that names a layer applies to it
    plain   layers to which no rule applies
    """

    label: str
    rules: tuple[Rule, ...]
    plain: Names = Names()

    @property
    def format_names(self) -> frozenset[str]:
        """The formats of all rules, also of rules that match no layer."""
        return frozenset(rule.stored.packed.name for rule in self.rules)

    def in_files(self, names: Collection[str]) -> "Quantisation":
        """Return a copy whose layouts use the files' tensor names; see `StoredLinear.in_files`."""
        return replace(self, rules=tuple(replace(rule, stored=rule.stored.in_files(names)) for rule in self.rules))

    def stored(self, module: str) -> StoredLinear | None:
        """Return the layout of a linear layer; None for a plain one."""
        if self.plain.match(module):
            return None
        return next((rule.stored for rule in self.rules if rule.layers.match(module)), None)

    def apply(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        """Replace the recipes of quantised layers by recipes of their parts.

        Raises ConfigError for a layer that its format cannot hold, and for fused layers in different layouts.
        """
        return [made for recipe in recipes for made in self._made(recipe)]

    def _made(self, recipe: Recipe) -> list[Recipe]:
        owner, _, part = recipe.weight.rpartition(".")
        plain = part != "weight" or owner.rpartition(".")[2] in PLAIN or recipe.arrange != "rows"
        if plain or any(len(piece.shape) != 2 or not piece.name.endswith(SUFFIX) for piece in recipe.pieces):
            return [recipe]
        modules = [piece.name.removesuffix(SUFFIX) for piece in recipe.pieces]
        found = {module: self.stored(module) for module in modules}
        stored, *others = found.values()
        if any(other != stored for other in others):
            shown = ", ".join(
                f"{name}: {'plain' if each is None else each.packed.name}" for name, each in found.items()
            )
            raise ConfigError(f"{self.label}: layers that are multiplied at once must be stored alike, found {shown}")
        if stored is None:
            return [recipe]
        columns = recipe.pieces[0].shape[1]
        if columns % stored.packed.block:
            raise ConfigError(
                f"{self.label}: {modules[0]} has {columns} inputs; {stored.packed.name} needs a multiple of "
                f"{stored.packed.block}"
            )
        pieces = [
            _picked(stored.pieces(module, piece.shape[0], columns), piece.spans)
            for module, piece in zip(modules, recipe.pieces, strict=True)
        ]
        return [replace(made, count=recipe.count) for made in part_recipes(owner, stored.packed, pieces, recipe.dtype)]

    def unused(self, checkpoint: Checkpoint) -> set[str]:
        """Return the stored tensors that are not read: those about activations and caches, and biases of zeros."""
        found = {name for name in checkpoint.entries if name.rpartition(".")[2] in UNUSED}
        biases = [name for name in checkpoint.entries if name.endswith(BIAS) and self._may_be_spare(name)]
        return found | {entry.name for entry, bias in checkpoint.read(biases) if not bool(bias.any())}

    def _may_be_spare(self, bias: str) -> bool:
        stored = self.stored(bias.removesuffix(BIAS))
        return stored is not None and stored.spare_biases


def _picked(parts: dict[str, Piece], spans: tuple[Span, ...] | None) -> dict[str, Piece]:
    """Return the parts of some rows of a layer; each part has a row for each row of the layer."""
    return parts if spans is None else {part: picked_piece(piece, spans) for part, piece in parts.items()}


def part_recipes(
    owner: str, packed: MatrixFormat, pieces: Sequence[dict[str, Piece]], dtype: torch.dtype
) -> list[Recipe]:
    """Return the recipe of each part of a matrix that stacks the rows of some layers."""
    dtypes = {part: each for part, (_, each) in packed.specs(1, packed.block, dtype).items()}
    return [Recipe(f"{owner}.{part}", tuple(each[part] for each in pieces), dtypes[part]) for part in packed.parts]


def narrowed(recipes: Sequence[Recipe], entries: Mapping[str, TensorEntry]) -> list[Recipe]:
    """Keep scales in bfloat16 if they are stored so, and not in float32: kernels then hold them in half the bytes."""
    return [
        replace(recipe, dtype=torch.bfloat16)
        if recipe.weight.endswith(SCALES) and all(entries[piece.name].dtype == "BF16" for piece in recipe.pieces)
        else recipe
        for recipe in recipes
    ]
