"""Formats of weights, one file each, and another that decodes one in registers; `FORMATS` is their table.

They know matrices and tiles, and neither files nor operations. A further format is a file here with a `WeightFormat`,
its fragments beside it, an entry below, and its side of files in `lowlat.checkpoint.formats`.
"""

from collections.abc import Mapping

from lowlat.errors import ShapeError
from lowlat.kernels.formats.base import Parts, Specs, WeightFormat, tiles_of
from lowlat.kernels.formats.bf16 import BF16
from lowlat.kernels.formats.mxfp4 import MXFP4

__all__ = [
    "BF16", "FORMATS", "MXFP4", "Parts", "Specs", "WeightFormat", "format_of", "numbers_an_entry", "tiles_of",
]  # fmt: skip

FORMATS: Mapping[str, WeightFormat] = {each.name: each for each in (BF16, MXFP4)}
NUMBERS = {part: count for each in FORMATS.values() for part, count in each.parts.items()}


def format_of(parts: Mapping[str, object]) -> WeightFormat:
    """The format whose parts these are, by name. Raises ShapeError for other parts."""
    for each in FORMATS.values():
        if set(parts) == set(each.parts):
            return each
    known = ", or ".join(" and ".join(each.parts) for each in FORMATS.values())
    raise ShapeError(f"a matrix is held by {known}; got {' and '.join(parts) or 'nothing'}")


def numbers_an_entry(part: str) -> int | None:
    """How many of a matrix's numbers an entry of this part holds; None for what is no part of a format."""
    return NUMBERS.get(part)
