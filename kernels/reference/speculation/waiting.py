"""This module lays out the waiting positions, over which the draft model has not run yet, and keeps their features.

If each step chooses its draft length, drafting comes first in a step. The draft model's rows are the positions
committed since it last ran, at most R. Their features wait in a ring for each slot. Steps without drafts only add to
them.
"""

import torch

from lowlat.graphs.schema import operation

__all__ = ["keep_features", "take_features", "waiting_rows"]


@operation("""
    read    slots           int32  [B]
    read    lengths         int32  [max_B]     committed tokens n
    read    tokens          int32  [max_B, C]  committed tokens
    read    extended        int32  [max_B]     positions whose features the draft model has run over
    write   waiting_tokens  int32  [B, R]      the token after each waiting position; -1 pads
    write   counts          int32  [B]         waiting positions, 0 for a pad
    write   firsts          int32  [B]         the first of them; 0 for a pad
    write   draft_live      uint8  [B]         1 for slots that are active
    write   draft_lens      int32  [B]         their n, else 0
""")
def waiting_rows(
    slots: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    extended: torch.Tensor,
    *,
    waiting_tokens: torch.Tensor,
    counts: torch.Tensor,
    firsts: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
) -> None:
    """Lay out the positions that wait for the draft model, at most the last R."""
    most = waiting_tokens.shape[1]
    waiting_tokens.fill_(-1)
    for out in (counts, firsts, draft_live, draft_lens):
        out.zero_()
    for index, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        length = int(lengths[slot])
        first = max(int(extended[slot]), length - 1 - most, 0)
        count = length - 1 - first
        waiting_tokens[index, :count] = tokens[slot, first + 1 : length]
        counts[index], firsts[index] = count, first
        draft_live[index], draft_lens[index] = 1, length


@operation("""
    read    waiting_features  compute  [max_B, N, W]  by position modulo N
    read    slots             int32    [B]
    read    firsts            int32    [B]            the first waiting position
    read    counts            int32    [B]            R at most
    write   out               compute  [B * R, W]     zero after those that wait
""")
def take_features(
    waiting_features: torch.Tensor,
    slots: torch.Tensor,
    firsts: torch.Tensor,
    counts: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """Gather the features of the waiting positions in order."""
    row = torch.arange(out.shape[0] // slots.shape[0], device=out.device)
    places = (firsts[:, None] + row[None]) % waiting_features.shape[1]
    found = waiting_features[slots.clamp(min=0).long()[:, None], places.long()]
    live = (row[None] < counts[:, None]) & (slots[:, None] >= 0)
    out.copy_(torch.where(live[..., None], found, 0).reshape(out.shape))


@operation("""
    read    accepted_nodes    int32    [B, T]             -1 pads
    read    commit_lens       int32    [B]
    read    dense_lens        int32    [B]                the root's position
    read    slots             int32    [B]
    read    source{F}         compute  [B * T, Ht]        captured boundaries, low to high
    update  waiting_features  compute  [max_B, N, F * Ht]  by position modulo N
""")
def keep_features(
    accepted_nodes: torch.Tensor,
    commit_lens: torch.Tensor,
    dense_lens: torch.Tensor,
    slots: torch.Tensor,
    *,
    waiting_features: torch.Tensor,
    **sources: torch.Tensor,
) -> None:
    """Store the features of the committed positions, the captured residual streams side by side."""
    rows, most = accepted_nodes.shape[1], waiting_features.shape[1]
    for index, (slot, count) in enumerate(zip(slots.tolist(), commit_lens.tolist(), strict=True)):
        if slot < 0 or not count:
            continue
        at = accepted_nodes[index, :count].long() + index * rows
        places = (torch.arange(count, device=at.device) + dense_lens[index]) % most
        kept = torch.cat([sources[f"source{number}"][at] for number in range(len(sources))], dim=1)
        waiting_features[slot, places.long()] = kept
