"""This module has DSpark's operations after its block: it biases a row's logits by the token that the draft follows.

Shapes: B slots, R rows of a block, W nodes of a level that have children, r the bias' rank.
Source: DSpark, DeepSeek, arXiv 2607.05147.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.row_blocks import map_rows

__all__ = ["bias_rows", "markov_gate", "parent_tokens"]


@operation("""
    read    tokens       int32  [B, R]  the block's: the last known one, and the mask's; -1 where dead
    read    nodes        int32  [W]     node 0 is the last known token
    read    draft_nodes  int32  [B, T]  absent: nodes are 0
    write   parents      int32  [B, W]  -1 where dead
    write   row_live     uint8  [B, W]
""")
def parent_tokens(
    tokens: torch.Tensor,
    nodes: torch.Tensor,
    draft_nodes: torch.Tensor | None = None,
    *,
    parents: torch.Tensor,
    row_live: torch.Tensor,
) -> None:
    """Gather the tokens of a level's nodes, after which drafts are made."""
    chosen = tokens[:, :1].expand(-1, nodes.shape[0])
    if draft_nodes is not None:
        drafted = torch.where(nodes == 0, chosen, draft_nodes[:, nodes.long()])
        chosen = torch.where(chosen >= 0, drafted, -1)
    parents.copy_(chosen)
    row_live.copy_(chosen >= 0)


@operation("""
    read    x           compute  [M, r]      vectors of the parent tokens
    read    token_gate  float32  [M, r]      the gate's projection of these vectors
    read    state_gate  float32  [B * R, r]  and of the states of the block's rows, with the bias
    read    row_live    uint8    [B, W]
    write   out         compute  [M, r]      zero where dead
""")
def markov_gate(
    x: torch.Tensor,
    token_gate: torch.Tensor,
    state_gate: torch.Tensor,
    row_live: torch.Tensor,
    *,
    out: torch.Tensor,
    row: int,
) -> None:
    """Compute x * sigmoid(token_gate + state_gate of row `row` of the slot's block), rounded once."""
    both = token_gate + _rows_of(state_gate, row_live, row)
    packed = torch.stack((x.float(), both), dim=1)
    map_rows(lambda pair: pair[0] * torch.sigmoid(pair[1]), packed, row_live, out)


@operation("""
    read    logits    float32  [B * R, Vd]
    read    bias      float32  [M, Vd]
    read    row_live  uint8    [B, W]
    write   out       float32  [M, Vd]      zero where dead
""")
def bias_rows(logits: torch.Tensor, bias: torch.Tensor, row_live: torch.Tensor, *, out: torch.Tensor, row: int) -> None:
    """Add the logits of row `row` of each slot's block to the bias of each of the slot's W rows."""
    out.copy_(torch.where(row_live.reshape(-1, 1) != 0, bias + _rows_of(logits, row_live, row), 0))


def _rows_of(block: torch.Tensor, row_live: torch.Tensor, row: int) -> torch.Tensor:
    """Repeat row `row` of each slot's block [B * R, N] for the slot's W rows: [B * W, N]."""
    batch, wide = row_live.shape
    return block.reshape(batch, -1, block.shape[1])[:, row].repeat_interleave(wide, dim=0)
