"""This module has the collectives among ranks: every rank gathers all parts, then adds or concatenates them.

Only `gather_ranks` reads other ranks' data. Each rank computes everything else by itself, so all have the same bits.
"""

import itertools
from collections.abc import Sequence

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.collectives.cuts import bounds, tree_sum
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["all_gather", "all_reduce_parts", "gather_ranks", "sum_ranks"]


@operation("""
    read    x    float32  [M, N]     this rank's part
    write   out  float32  [R, M, W]  every rank's, by rank; W is the widest one's N, and columns past a rank's own zero
""")
def gather_ranks(x: torch.Tensor, *, out: torch.Tensor, rank: int) -> None:
    """Store this rank's part in the gathered array; it is complete when all ranks have stored theirs.

    rank  this rank's number, from 0
    This function stores one rank's part only; `all_reduce_parts` stores those of all. Raises ShapeError for a part that
    is wider than the array.
    """
    check_shape("out", out, out.shape[0], x.shape[0], max(out.shape[2], x.shape[1]))
    out[rank].zero_()
    out[rank, :, : x.shape[1]] = x


def all_reduce_parts(parts: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Run `gather_ranks` for all ranks.

    parts  of each rank [M, N]     float32
    outs   of each rank [R, M, W]  float32  out: the same everywhere
    """
    for out in outs:
        for rank, part in enumerate(parts):
            gather_ranks(part, out=out, rank=rank)


@operation("""
    read    parts  float32  [R, M, N]
    write   out    float32  [M, N]
""")
def sum_ranks(parts: torch.Tensor, *, out: torch.Tensor) -> None:
    """Add up the ranks' parts in float32 by neighbouring pairs: ((p0 + p1) + (p2 + p3)) + ...; R is a power of two."""
    out.copy_(tree_sum(list(parts)))


@operation("""
    read    parts  float32  [R, M, N]  columns past a rank's own are not read
    write   out    float32  [M, V]
""")
def all_gather(parts: torch.Tensor, *, out: torch.Tensor, unit: int) -> None:
    """The columns of all ranks side by side; V is cut into R parts of whole units as `cuts.bounds` has it."""
    ends = bounds(out.shape[1], parts.shape[0], unit)
    for rank, (start, stop) in enumerate(itertools.pairwise(ends)):
        out[:, start:stop] = parts[rank, :, : stop - start]
