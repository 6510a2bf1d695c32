"""This module takes a draft model's proposals: the likeliest draft ids of a row, as target ids."""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import check_shape, live_rows

__all__ = ["draft_topk"]


@operation("""
    read    logits           float32  [R, Vd]
    weight  draft_to_target  int32    [Vd]      target id of each draft id
    read    row_live         uint8    flat [R]  absent: all live
    write   out              int32    [R, k]    by rank; -1 in a dead row and in one that holds a NaN
""")
def draft_topk(
    logits: torch.Tensor,
    draft_to_target: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    k: int,
) -> None:
    """Take the k largest logits of each row, of equal ones the lowest draft id first, and return their target ids.

    Time: one sort a row. Captured: yes. Raises ShapeError for k outside 1..Vd or shapes that do not fit.
    Source: EAGLE-3, arXiv 2503.01840, section 3; greedy proposals, so that sample-and-match is exact.
    """
    rows, width = logits.shape
    if not 1 <= k <= width:
        raise ShapeError(f"k must be from 1 to the draft vocabulary {width}, got {k}")
    check_shape("out", out, rows, k)
    check_shape("draft_to_target", draft_to_target, width)
    out.fill_(-1)
    for index, alive in enumerate(live_rows(row_live, rows)):
        row = logits[index]
        if alive and not bool(row.isnan().any()):
            order = torch.argsort(row, descending=True, stable=True)[:k]
            out[index] = draft_to_target[order]
