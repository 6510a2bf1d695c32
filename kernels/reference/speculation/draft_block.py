"""This module lays out the rows of draft models that draft all positions in one pass.

P-EAGLE has accepted rows and then mask rows: row r of a slot is its r-th committed token, and the S - 1 rows after the
last of these have the mask's token and state. DFlash has the last known token and then mask rows.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import rows_of_slots

__all__ = ["block_rows", "mask_rows", "take_block"]


@operation("""
    read    tokens              int32    [B, T]      the committed tokens; -1 where dead
    read    hidden              compute  [B * T, H]  their features
    read    commit_lens         int32    [B]         1..R - S + 1 where a slot is live
    read    draft_live          uint8    [B]
    read    dense_lens          int32    [B]         the root's position n - 1, which is the first feature's
    weight  mask_state          compute  [H]
    write   out                 compute  [B * R, H]  zero where dead
    write   block_tokens        int32    [B, R]      -1 where dead
    write   block_live          uint8    [B, R]
    write   block_positions     int32    [B, R]      for RoPE
    write   drafting_live       uint8    [B, S]      of the last committed row and the mask's rows
    write   drafting_positions  int32    [B, S]
""")
def block_rows(
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    commit_lens: torch.Tensor,
    draft_live: torch.Tensor,
    dense_lens: torch.Tensor,
    mask_state: torch.Tensor,
    *,
    out: torch.Tensor,
    block_tokens: torch.Tensor,
    block_live: torch.Tensor,
    block_positions: torch.Tensor,
    drafting_live: torch.Tensor,
    drafting_positions: torch.Tensor,
    mask_token: int,
) -> None:
    """Lay out a draft model's rows after a commit: the committed tokens with their features, then the mask rows."""
    batch, accepted = tokens.shape
    count, drafting = block_live.shape[1], drafting_live.shape[1]
    row = torch.arange(count, device=tokens.device)[None]
    known = row < commit_lens[:, None]
    live = (row < commit_lens[:, None] + drafting - 1) & (draft_live[:, None] != 0)
    source = row.clamp(max=accepted - 1).expand(batch, count)
    chosen = torch.where(known, tokens.gather(1, source), mask_token)
    block_tokens.copy_(torch.where(live, chosen, -1))
    block_live.copy_(live)
    block_positions.copy_(torch.where(live, dense_lens[:, None] + row, 0))
    features = hidden.reshape(batch, accepted, -1).gather(1, source[..., None].expand(-1, -1, hidden.shape[1]))
    states = torch.where(known[..., None], features, mask_state.to(hidden.dtype))
    out.copy_(torch.where(live[..., None], states, 0).reshape(out.shape))
    last = (dense_lens + commit_lens - 1)[:, None] + torch.arange(drafting, device=tokens.device)[None]
    drafting_live.copy_((draft_live[:, None] != 0).expand(batch, drafting))
    drafting_positions.copy_(torch.where(draft_live[:, None] != 0, last, 0))


@operation("""
    read    x            compute  [B * R, W]
    read    commit_lens  int32    [B]         at most R - S + 1
    write   out          compute  [B * S, W]  zero where nothing was committed
""")
def take_block(x: torch.Tensor, commit_lens: torch.Tensor, *, out: torch.Tensor) -> None:
    """Copy rows commit_lens - 1 to commit_lens + S - 2 of each slot. Raises ShapeError if there is no slot."""
    batch, count = commit_lens.shape[0], rows_of_slots(x, commit_lens)
    drafting = rows_of_slots(out, commit_lens)
    row = (commit_lens - 1)[:, None] + torch.arange(drafting, device=x.device)[None]
    at = torch.arange(batch, device=x.device)[:, None] * count + row.clamp(0, count - 1)
    taken = x[at.reshape(-1).long()]
    out.copy_(torch.where((commit_lens > 0).repeat_interleave(drafting)[:, None], taken, 0))


@operation("""
    read    accepted_tokens  int32  [B, T]
    read    commit_lens      int32  [B]
    read    draft_live       uint8  [B]
    read    draft_lens       int32  [B]     n', the committed tokens
    write   tokens           int32  [B, R]  -1 where dead
    write   positions        int32  [B, R]  for RoPE
    write   row_live         uint8  [B, R]
    write   write_lens       int32  [B]     the index of row 0, n' - 1
""")
def mask_rows(
    accepted_tokens: torch.Tensor,
    commit_lens: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_live: torch.Tensor,
    write_lens: torch.Tensor,
    mask_token: int,
) -> None:
    """Lay out a block: the last committed token at its position, then the mask's tokens."""
    row = torch.arange(tokens.shape[1], device=tokens.device)[None]
    going = (draft_live != 0)[:, None]
    last = accepted_tokens.gather(1, (commit_lens - 1).clamp(min=0)[:, None].long())
    row_live.copy_(going.expand_as(row_live))
    tokens.copy_(torch.where(going, torch.where(row == 0, last, mask_token), -1))
    positions.copy_(torch.where(going, (draft_lens - 1)[:, None] + row, 0))
    write_lens.copy_(torch.where(draft_live != 0, draft_lens - 1, 0))
