"""Formats of weights, one file each: bytes, packing, decoding in registers, the reference, rounding.

`FORMATS` has those with tiles of their own for experts' kernels, `DENSE_FORMATS` the quantised ones that GEMMs and
experts' kernels read by a common layout, `MATRIX_FORMATS` all. They know matrices and tiles, and neither files nor
operations: layouts of files stand in `lowlat.checkpoint.formats`. A further format is a file here with a `DenseFormat`
and an entry below.
"""

from collections.abc import Container, Mapping

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.formats.base import CodedFormat, DenseFormat, MatrixFormat, Parts, Specs, WeightFormat, tiles_of
from lowlat.kernels.formats.bf16 import BF16
from lowlat.kernels.formats.fp8 import FP8, FP8_BLOCK, FP8_FORMATS
from lowlat.kernels.formats.int4 import INT4_FORMATS
from lowlat.kernels.formats.mxfp4 import MXFP4
from lowlat.kernels.formats.nvfp4 import NVFP4
from lowlat.kernels.gemm.tiles import TileFormat

__all__ = [
    "BF16", "CODED_FORMATS", "DENSE_FORMATS", "FORMATS", "FP8", "FP8_BLOCK", "MATRIX_FORMATS", "MXFP4", "NVFP4",
    "ROUNDED_FORMATS", "DenseFormat", "MatrixFormat", "Parts", "Specs", "WeightFormat", "dequantised", "format_of",
    "matrix_format", "matrix_name", "matrix_parts", "matrix_shape", "numbers_an_entry", "representative_layouts",
    "tiles_of",
]  # fmt: skip

FORMATS: Mapping[str, WeightFormat] = {each.name: each for each in (BF16, MXFP4)}
DENSE_FORMATS: Mapping[str, DenseFormat] = {each.name: each for each in (*FP8_FORMATS, *INT4_FORMATS, NVFP4)}
MATRIX_FORMATS: Mapping[str, MatrixFormat] = {**FORMATS, **DENSE_FORMATS}
# one format of each kind of codes, by `TileFormat.name`: kernels decode by codes and layout
CODED_FORMATS: Mapping[str, CodedFormat] = {each.codes: each for each in (BF16, *DENSE_FORMATS.values())}
# what plain weights are rounded to, by the option's name: formats of one kind differ in the numbers that share a scale
ROUNDED_FORMATS: Mapping[str, tuple[DenseFormat, ...]] = {
    "fp8": (FP8,),
    "int4": tuple(each for each in INT4_FORMATS if each.narrow),
}
NUMBERS = {part: count for each in MATRIX_FORMATS.values() for part, count in each.parts.items()}
# the sets of parts by which a dense matrix that is not plain may be held, those with more parts first
QUANTISED = sorted(
    dict.fromkeys(tuple(each.parts) for name, each in MATRIX_FORMATS.items() if name not in FORMATS), key=len
)[::-1]
PLAIN = ".weight"


def representative_layouts() -> tuple[TileFormat, ...]:
    """Layouts that stand for all quantised ones: of each kind of codes the first format's, and the last one's with
    float32 scales."""
    by_codes: dict[str, list[DenseFormat]] = {}
    for each in DENSE_FORMATS.values():
        by_codes.setdefault(each.codes, []).append(each)
    layouts = (
        layout for some in by_codes.values() for layout in (some[0].tiles(wide=False), some[-1].tiles(wide=True))
    )
    return tuple(dict.fromkeys(layouts))


def format_of(parts: Mapping[str, object]) -> WeightFormat:
    """The format of experts whose parts these are, by name. Raises ShapeError for other parts."""
    for each in FORMATS.values():
        if set(parts) == set(each.parts):
            return each
    known = ", or ".join(" and ".join(each.parts) for each in FORMATS.values())
    raise ShapeError(f"a matrix is held by {known}; got {' and '.join(parts) or 'nothing'}")


def matrix_format(parts: Parts) -> MatrixFormat:
    """The format whose parts these are, by name and shape. Raises ShapeError where there is none."""
    for each in MATRIX_FORMATS.values():
        if each.holds(parts):
            return each
    found = ", ".join(f"{name} {list(part.shape)}" for name, part in parts.items())
    raise ShapeError(f"no format holds a matrix by {found or 'nothing'}")


def matrix_parts(name: str, held: Container[str]) -> dict[str, str]:
    """The weights that hold a matrix, by part: itself, or its quantised parts; empty where it is missing.

    name  of the matrix as operations have it, `layers.0.qkv.weight`
    held  names of all weights
    """
    if name in held:
        return {"weight": name}
    owner = name.removesuffix(PLAIN)
    for parts in QUANTISED:
        names = {part: f"{owner}.{part}" for part in parts}
        if all(each in held for each in names.values()):
            return names
    return {}


def matrix_name(weight: str) -> str | None:
    """The matrix, as operations have it, of which a weight is a part; None for what is no part of a quantised one."""
    owner, _, part = weight.rpartition(".")
    return f"{owner}{PLAIN}" if any(part in parts for parts in QUANTISED) else None


def dequantised(name: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A matrix in float32, whatever holds it. Raises KeyError for one that is missing."""
    parts = {part: weights[each] for part, each in (matrix_parts(name, weights) or {"weight": name}).items()}
    return matrix_format(parts).dequantise(parts, torch.float32)


def matrix_shape(name: str, weights: Mapping[str, torch.Tensor]) -> torch.Size:
    """The shape of a matrix in any format, or of any other weight. Raises KeyError for one that is missing."""
    if name in weights:
        return weights[name].shape
    names = matrix_parts(name, weights)
    if not names:
        raise KeyError(name)
    parts = {part: weights[each] for part, each in names.items()}
    return torch.Size(matrix_format(parts).shape(parts))


def numbers_an_entry(part: str) -> int | None:
    """How many of a matrix's numbers an entry of this part holds; None for what is no part of a format."""
    return NUMBERS.get(part)
