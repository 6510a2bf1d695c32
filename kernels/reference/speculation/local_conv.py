"""This module has DFlash2's operations on a block: a convolution along its rows, and the choice of a chain of drafts.

Shapes: B slots, R rows of a block, M = B * R, K taps, k candidates of a row, r the selector's rank.
Source: DFlash 2, z-lab.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["local_conv", "walk_candidates"]


@operation("""
    read    x             float    [M, N]       a sublayer's input, or its output
    read    coefficients  float32  [M, W]       what a row adds to the weights, by side, tap and group
    read    row_live      uint8    [B, R]
    weight  weight        float    [2, K, N]    of the input's side and the output's
    write   out           float    [M, N]       zero where dead
""")
def local_conv(
    x: torch.Tensor,
    coefficients: torch.Tensor,
    row_live: torch.Tensor,
    weight: torch.Tensor,
    *,
    out: torch.Tensor,
    side: int,
    group: int,
) -> None:
    """Add up each row and the rows before it in its block, weighted by column: over taps t, (w + c) x of row i - t.

    group  columns that share a coefficient c
    The sum is float32, rounded once. Raises ShapeError for shapes that do not fit.
    """
    (batch, rows), taps, width = row_live.shape, weight.shape[1], x.shape[1]
    check_shape("coefficients", coefficients, batch * rows, 2 * taps * (width // group))
    own = coefficients.view(batch, rows, 2, taps, width // group)[:, :, side]
    values, total = x.view(batch, rows, width).float(), torch.zeros(batch, rows, width, device=x.device)
    for tap in range(min(taps, rows)):
        kernel = weight[side, tap].float() + own[:, :, tap].repeat_interleave(group, dim=-1)
        total[:, tap:] += kernel[:, tap:] * values[:, : rows - tap]
    live = (row_live.reshape(-1) != 0)[:, None]
    out.copy_(torch.where(live, total.reshape(x.shape), 0))


@operation("""
    read    candidates    int32    [M, k]   the likeliest tokens of each row, by rank; -1 in a dead row
    read    scores        float32  [M, k]   their logits, or anything that differs from these by the row alone
    read    hidden        float32  [M, r]   a projection of the rows' states
    read    tokens        int32    [B, R]   the block's; row 0 is the last known one
    weight  predecessors  float    [V, r]
    weight  successors    float    [V, r]
    update  draft_nodes   int32    [B, N]   nodes 1 to S of a chain
""")
def walk_candidates(
    candidates: torch.Tensor,
    scores: torch.Tensor,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    predecessors: torch.Tensor,
    successors: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
    first_row: int,
) -> None:
    """Draft a chain, token by token.

    Token p is followed by the next row's candidate c with the largest score + (vector(p) * h) . vector(c), in float32;
    of equal ones by the first candidate.

    first_row  the first row of the block that drafts
    A row without candidates ends the chain: -1 from there on.
    """
    batch, rows = tokens.shape
    by_row = candidates.view(batch, rows, -1)
    for slot in range(batch):
        before = int(tokens[slot, 0])
        for node in range(1, rows - first_row + 1):
            at = first_row + node - 1
            mine = by_row[slot, at]
            if before >= 0 and int(mine[0]) >= 0:
                known = mine.clamp(min=0).long()
                edge = predecessors[before].float() * hidden[slot * rows + at]
                found = scores[slot * rows + at] + (edge * successors[known].float()).sum(dim=-1)
                found = torch.where(mine >= 0, found, -torch.inf)
                before = int(mine[int(found.argmax())])
            else:
                before = -1
            draft_nodes[slot, node] = before
