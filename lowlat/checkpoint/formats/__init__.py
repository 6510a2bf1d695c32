"""This package has weight formats in files: names of tensors, keys of quantization_config, checks of values.

`STORED_FORMATS` is the table of experts' formats. `lowlat.kernels.formats` has the other side of each, packed and
decoded in kernels, under the same name. `linear` has the layouts of linear layers, `methods` reads from configs which
layers are quantised, and `quantisation` applies that to recipes. None of them knows families or operations.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats.base import Matrices, StoredFormat
from lowlat.checkpoint.formats.bf16 import STORED_BF16
from lowlat.checkpoint.formats.methods import read_quantisation
from lowlat.checkpoint.formats.mxfp4 import STORED_MXFP4
from lowlat.checkpoint.formats.quantisation import Quantisation, narrowed
from lowlat.checkpoint.recipes import Recipe
from lowlat.checkpoint.stored import Group, Weights
from lowlat.checkpoint.tensors import TensorEntry
from lowlat.errors import ConfigError
from lowlat.kernels.formats import matrix_name

__all__ = [
    "STORED_FORMATS", "Matrices", "Quantisation", "StoredFormat", "check_widths", "narrowed", "part_groups",
    "read_format", "read_quantisation",
]  # fmt: skip

STORED_FORMATS: Mapping[str, StoredFormat] = {each.name: each for each in (STORED_BF16, STORED_MXFP4)}


def read_format(fields: Fields, quantised: Sequence[str] = ()) -> StoredFormat:
    """Return the format of a model's matrices: that of quantization_config, or the plain one without such a key.

    quantised  names of the formats besides the plain one that the family implements
    Raises ConfigError for another quant_method, and for keys that are not implemented.
    """
    quantization = fields.optional_object("quantization_config")
    if quantization is None:
        return STORED_BF16
    method = quantization.optional_string("quant_method")
    for name in quantised:
        if STORED_FORMATS[name].method == method:
            STORED_FORMATS[name].check_quantization(quantization)
            return STORED_FORMATS[name]
    known = ", ".join(repr(STORED_FORMATS[name].method) for name in quantised) or "none, only plain weights"
    raise ConfigError(
        f"{quantization.label}: quant_method {method!r} is not implemented for this family; implemented: {known}"
    )


def check_widths(fields: Fields, stored: StoredFormat, widths: Mapping[str, int]) -> None:
    """Raise ConfigError for widths of matrices, by key in config.json, that the format cannot hold in rows."""
    block = stored.packed.block
    for key, size in widths.items():
        if size % block:
            raise ConfigError(
                f"{fields.label}: {key} must be a multiple of {block} for {stored.name.upper()}, found {size}"
            )


def part_groups(recipes: Sequence[Recipe], entries: Mapping[str, TensorEntry]) -> list[Group]:
    """Group recipes that are read and checked together: the parts of a quantised weight; each other weight is alone.

    entries  stored tensors, for the files in messages; may be empty
    """
    owners = {
        part: each for each in STORED_FORMATS.values() if len(each.packed.parts) > 1 for part in each.packed.parts
    }
    by_name = {recipe.weight: recipe for recipe in recipes}
    matrices: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        matrices.setdefault(matrix_name(recipe.weight) or recipe.weight, []).append(recipe)
    groups = []
    for weight in by_name:
        name, _, part = weight.rpartition(".")
        together = matrices.pop(matrix_name(weight) or weight, None)
        if part not in owners:
            if together is not None:
                groups.append(Group(tuple(together)))
        elif part == next(iter(owners[part].packed.parts)):
            parts = {each: by_name[f"{name}.{each}"] for each in owners[part].packed.parts}
            labels = {each: _label(found, entries) for each, found in parts.items()}
            groups.append(Group(tuple(parts.values()), partial(_check_parts, owners[part], labels, name)))
    return groups


def _label(recipe: Recipe, entries: Mapping[str, TensorEntry]) -> str:
    stored = recipe.pieces[0].name
    return f"{entries[stored].file}: tensor {stored!r}" if stored in entries else stored


def _check_parts(stored: StoredFormat, labels: Mapping[str, str], name: str, weights: Weights) -> None:
    parts: dict[str, torch.Tensor] = {part: weights[f"{name}.{part}"] for part in labels}
    stored.check_parts(labels, parts)
