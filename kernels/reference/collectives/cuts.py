"""This module partitions an extent, in the same way among ranks and within a rank, and fixes the order of sums."""

from collections.abc import Sequence

import torch

from lowlat.errors import ShapeError

__all__ = ["bounds", "tree_sum"]


def bounds(total: int, parts: int, unit: int = 1) -> tuple[int, ...]:
    """Return the start of each part of an extent, and the last end; parts are halves of halves, the larger first.

    parts  a power of two
    unit   a part has whole units of so many numbers; the last unit may have fewer
    If a part is partitioned again by this rule, its bounds are those of a finer partition of the whole. Raises
    ShapeError for another number of parts.
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
    """Add up arrays, a power of two of them, by neighbouring pairs: ((p0 + p1) + (p2 + p3)) + ..."""
    sums = list(parts)
    while len(sums) > 1:
        sums = [sums[index] + sums[index + 1] for index in range(0, len(sums), 2)]
    return sums[0]
