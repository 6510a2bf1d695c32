"""This module lays out the rows of a draft model that reads only tokens; a row is at the index of its token."""

import torch

from lowlat.graphs.schema import operation

__all__ = ["token_rows"]


@operation("""
    read    given       int32  [B, N]  tokens, -1 pads
    read    live        uint8  [B]
    read    lens        int32  [B]
    read    counts      int32  [B]     tokens that are taken; absent: all R
    write   tokens      int32  [B, R]  -1 where dead
    write   positions   int32  [B, R]  for RoPE; 0 where dead
    write   row_live    uint8  [B, R]
    write   write_lens  int32  [B]     the index of row 0; 0 where the slot is dead
""")
def token_rows(
    given: torch.Tensor,
    live: torch.Tensor,
    lens: torch.Tensor,
    counts: torch.Tensor | None = None,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_live: torch.Tensor,
    write_lens: torch.Tensor,
    column: int,
    ahead: int,
) -> None:
    """Lay out a draft model's rows: row r is token `column` + r of its slot, at index `lens` + `ahead` + r."""
    row = torch.arange(tokens.shape[1], device=tokens.device)[None]
    taken = given[:, column : column + tokens.shape[1]]
    going = live != 0
    alive = going[:, None] & (taken >= 0) & (row < (tokens.shape[1] if counts is None else counts[:, None]))
    first = torch.where(going, lens + ahead, 0)
    tokens.copy_(torch.where(alive, taken, -1))
    positions.copy_(torch.where(alive, first[:, None] + row, 0))
    row_live.copy_(alive)
    write_lens.copy_(first)
