"""How sure a draft model is of the draft that it proposes: the kind of its probability."""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import check_shape, live_rows

__all__ = ["EDGES", "NUM_KINDS", "check_kinds", "draft_confidence"]

EDGES = (0.25, 0.5, 0.75, 0.92)  # probabilities from which on a draft is of the next kind
NUM_KINDS = 1 + len(EDGES)


@operation("""
    read    logits       float32  [R, Vd]
    read    row_live     uint8    flat [R]
    update  draft_kinds  int32    [R, E]    of the drafts behind which drafting may end
""")
def draft_confidence(
    logits: torch.Tensor, row_live: torch.Tensor | None = None, *, draft_kinds: torch.Tensor, end: int
) -> None:
    """Write the kind of each row's largest probability: how many of EDGES it reaches; 0 in rows that are not finite.

    end  the column that is written
    Source: the chosen token's probability under the draft model, as DSpark, arXiv 2607.05147, cuts its blocks by.
    Captured: yes. Raises ShapeError for shapes that do not fit.
    """
    check_kinds(logits, draft_kinds, end)
    draft_kinds[:, end] = 0
    for index, alive in enumerate(live_rows(row_live, logits.shape[0])):
        row = logits[index]
        if alive and bool(row.isfinite().all()):
            inverse = (row - row.max()).exp().sum()
            draft_kinds[index, end] = sum(bool(inverse * edge <= 1.0) for edge in EDGES)


def check_kinds(logits: torch.Tensor, draft_kinds: torch.Tensor, end: int) -> None:
    """Raise ShapeError for shapes that `draft_confidence` does not take."""
    (rows, _), ends = logits.shape, draft_kinds.shape[1]
    check_shape("draft_kinds", draft_kinds, rows, ends)
    if not 0 <= end < ends:
        raise ShapeError(f"end must be one of the {ends} that draft_kinds has, got {end}")
