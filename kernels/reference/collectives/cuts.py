"""The cut of an extent into parts, which is the same for ranks and for what a rank sums, and the order of sums."""

from collections.abc import Sequence

import torch

from lowlat.errors import ShapeError

__all__ = ["bounds", "tree_sum"]


def bounds(total: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Where each of the parts of an extent begins, and its end: halves of halves, the first of them the larger.

    parts  a power of two
    unit   numbers that stay together; the last may be fewer
    A part that is cut again by this rule has the bounds that a finer cut of the whole has there. Raises ShapeError for
    another number of parts.
    """
    if parts < 1 or parts & (parts - 1):
        raise ShapeError(f"an extent is cut into a power of two of parts, got {parts}")
    sizes = [-(-total // unit)]
    while len(sizes) < parts:
        sizes = [half for size in sizes for half in (size - size // 2, size // 2)]
    found = [0]
    for size in sizes:
        found.append(min(total, found[-1] + size * unit))
    return tuple(found)


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of a power of two of arrays by neighbouring pairs: ((p0 + p1) + (p2 + p3)) + ..."""
    sums = list(parts)
    while len(sums) > 1:
        sums = [sums[index] + sums[index + 1] for index in range(0, len(sums), 2)]
    return sums[0]
