"""This module takes a row's likeliest drafts with their logprobs, as target ids."""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import check_shape, live_rows

__all__ = ["draft_topk_logprobs"]


@operation("""
    read    logits           float32  [R, Vd]
    weight  draft_to_target  int32    [Vd]      target id of each draft id
    read    row_live         uint8    flat [R]  absent: all live
    write   top_tokens       int32    [R, k]    by rank; -1 in a dead row and in one that is not finite
    write   top_logprobs     float32  [R, k]    0 in such rows
""")
def draft_topk_logprobs(
    logits: torch.Tensor,
    draft_to_target: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    top_tokens: torch.Tensor,
    top_logprobs: torch.Tensor,
    k: int,
) -> None:
    """Take the k largest logits of each row, of equal ones the lowest draft id first, with their log-softmax.

    A logprob is never above 0. Raises ShapeError for k outside 1..Vd or shapes that do not fit.
    """
    rows, width = logits.shape
    if not 1 <= k <= width:
        raise ShapeError(f"k must be from 1 to the draft vocabulary {width}, got {k}")
    check_shape("top_tokens", top_tokens, rows, k)
    check_shape("top_logprobs", top_logprobs, rows, k)
    check_shape("draft_to_target", draft_to_target, width)
    top_tokens.fill_(-1)
    top_logprobs.zero_()
    for index, alive in enumerate(live_rows(row_live, rows)):
        row = logits[index]
        if alive and bool(row.isfinite().all()):
            order = torch.argsort(row, descending=True, stable=True)[:k]
            below = row - row[order[0]]
            top_tokens[index] = draft_to_target[order]
            top_logprobs[index] = below[order] - below.exp().sum().log()
