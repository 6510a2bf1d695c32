"""This module lays out the EAGLE3 draft model's rows: accepted rows, the last of them, and the tree's levels.

The draft model's row for the token at index i uses the target's feature at i - 1 and is stored at index i, so that a
cached block depends on its own prefix alone. Index 0 is never used.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.shapes import check_shape, rows_of_slots

__all__ = [
    "assign_drafts",
    "check_nodes",
    "draft_prefill_rows",
    "draft_rows",
    "gather_features",
    "gather_level",
    "join_features",
    "store_boundary",
    "take_last",
    "tree_masks",
]


@operation("""
    read    accepted_tokens  int32  [B, T]
    read    commit_lens      int32  [B]
    read    draft_live       uint8  [B]
    read    dense_lens       int32  [B]     the root's position n - 1, which is the first feature's
    write   tokens           int32  [B, T]  -1 where dead
    write   positions        int32  [B, T]  the feature's position, for RoPE
    write   row_live         uint8  [B, T]
    write   write_lens       int32  [B]     index of row 0, n
    write   live_positions   int32  [B, 1]  the position of the last live row
""")
def draft_rows(
    accepted_tokens: torch.Tensor,
    commit_lens: torch.Tensor,
    draft_live: torch.Tensor,
    dense_lens: torch.Tensor,
    *,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    row_live: torch.Tensor,
    write_lens: torch.Tensor,
    live_positions: torch.Tensor,
) -> None:
    """Lay out the draft model's rows after a commit: row r is the r-th committed token with the feature before it."""
    row = torch.arange(tokens.shape[1], device=tokens.device)
    live = (row[None] < commit_lens[:, None]) & (draft_live[:, None] != 0)
    row_live.copy_(live)
    tokens.copy_(torch.where(live, accepted_tokens, -1))
    positions.copy_(torch.where(live, dense_lens[:, None] + row[None], 0))
    write_lens.copy_(torch.where(draft_live != 0, dense_lens + 1, 0))
    last = dense_lens + commit_lens - 1
    live_positions.copy_(torch.where(draft_live != 0, last, 0)[:, None])


@operation("""
    read    accepted_nodes  int32    [B, T]           -1 pads
    read    source{F}       compute  [B * T, Ht]      captured boundaries, low to high
    write   out             compute  [B * T, F * Ht]  zero for pads
""")
def gather_features(accepted_nodes: torch.Tensor, *, out: torch.Tensor, **sources: torch.Tensor) -> None:
    """Gather the features of the accepted rows in order, the captured residual streams side by side."""
    rows = accepted_nodes.shape[1]
    base = torch.arange(accepted_nodes.shape[0], device=out.device)[:, None] * rows
    at = (base + accepted_nodes.clamp(min=0)).reshape(-1).long()
    features = torch.cat([sources[f"source{k}"][at] for k in range(len(sources))], dim=1)
    out.copy_(torch.where((accepted_nodes.reshape(-1) >= 0)[:, None], features, 0))


@operation("""
    read    source{F}  compute  [c, Ht]
    write   out        compute  [c, F * Ht]
""")
def join_features(*, out: torch.Tensor, **sources: torch.Tensor) -> None:
    """Join a chunk's captured residual streams side by side."""
    out.copy_(torch.cat([sources[f"source{k}"] for k in range(len(sources))], dim=1))


@operation("""
    read    x            compute  [B * T, W]
    read    commit_lens  int32    [B]
    write   out          compute  [B, W]      zero where nothing was committed
""")
def take_last(x: torch.Tensor, commit_lens: torch.Tensor, *, out: torch.Tensor) -> None:
    """Copy row commit_lens - 1 of each slot. Raises ShapeError if there is no slot."""
    batch, rows = commit_lens.shape[0], rows_of_slots(x, commit_lens)
    last = (commit_lens - 1).clamp(min=0).long()
    picked = x.reshape(batch, rows, x.shape[-1])[torch.arange(batch, device=x.device), last]
    out.copy_(torch.where((commit_lens > 0)[:, None], picked, 0))


@operation("""
    read    hidden          compute  [B * T, H]       the draft model's input for each row
    read    positions       int32    [B, T]           the features' positions
    read    row_live        uint8    [B, T]
    read    block_table     int32    [max_B, blocks]
    read    slots           int32    [B]
    update  block_features  compute  [P, H]
""")
def store_boundary(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    row_live: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    *,
    block_features: torch.Tensor,
    block_size: int,
) -> None:
    """Store the feature of each block's last position; a reused prefix has no other source of it."""
    rows = positions.shape[1]
    ends = (row_live != 0) & ((positions + 1) % block_size == 0)
    owner, row = ends.nonzero(as_tuple=True)
    if owner.numel():
        blocks = block_table[slots[owner].long(), (positions[owner, row] // block_size).long()].long()
        block_features[blocks] = hidden[owner * rows + row]


@operation("""
    read    hidden          compute  [c, H]       the draft model's input made of the chunk's features
    read    chunk           int32    [2]          start, live target rows
    read    block_table     int32    [1, blocks]
    update  block_features  compute  [P, H]
    write   shifted         compute  [c, H]       row i holds the feature of position start + i - 1
""")
def draft_prefill_rows(
    hidden: torch.Tensor,
    chunk: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_features: torch.Tensor,
    shifted: torch.Tensor,
    block_size: int,
) -> None:
    """Shift a chunk's features by one row, with the first from the previous block, and store those of block ends."""
    start, count = chunk.tolist()
    shifted[1:] = hidden[:-1]
    if start:
        shifted[0] = block_features[int(block_table[0, (start - 1) // block_size])]
    else:
        shifted[0].zero_()
    for end in range(block_size, count + 1, block_size):
        block_features[int(block_table[0, (start + end - 1) // block_size])] = hidden[end - 1]


@operation("""
    read    top_tokens   int32  [B * W, k]  the level's likeliest tokens by rank
    read    children     int32  [n]         node index of each child
    read    child_rows   int32  [n]         its parent's row in the level
    read    child_ranks  int32  [n]         its rank among the parent's tokens
    update  draft_nodes  int32  [B, T]
""")
def assign_drafts(
    top_tokens: torch.Tensor,
    children: torch.Tensor,
    child_rows: torch.Tensor,
    child_ranks: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
) -> None:
    """Store the drafted tokens of a level's children."""
    batch = draft_nodes.shape[0]
    by_row = top_tokens.reshape(batch, -1, top_tokens.shape[-1])
    draft_nodes[:, children.long()] = by_row[:, child_rows.long(), child_ranks.long()]


@operation("""
    read    feedback     compute  [B * V, H]  the level above
    read    draft_nodes  int32    [B, T]
    read    draft_live   uint8    [B]
    read    draft_lens   int32    [B]         n'
    read    nodes        int32    [W]         the level's nodes that have children
    read    parent_rows  int32    [W]         their parents' rows in the level above
    read    masks        int64    [W]         drafted ancestors and self, by ordinal
    write   hidden       compute  [B * W, H]
    write   tokens       int32    [B, W]      -1 where dead
    write   row_live     uint8    [B, W]
    write   positions    int32    [B, W]      n' - 2 + depth
    write   row_masks    int64    [B, W]
""")
def gather_level(
    feedback: torch.Tensor,
    draft_nodes: torch.Tensor,
    draft_live: torch.Tensor,
    draft_lens: torch.Tensor,
    nodes: torch.Tensor,
    parent_rows: torch.Tensor,
    masks: torch.Tensor,
    *,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    row_live: torch.Tensor,
    positions: torch.Tensor,
    row_masks: torch.Tensor,
    depth: int,
) -> None:
    """Lay out the next level: its nodes' tokens, each with the hidden state that its parent's row feeds back."""
    batch = draft_nodes.shape[0]
    above = feedback.reshape(batch, -1, feedback.shape[-1])
    hidden.copy_(above[:, parent_rows.long()].reshape(hidden.shape))
    chosen = draft_nodes[:, nodes.long()]
    live = (draft_live[:, None] != 0) & (chosen >= 0)
    tokens.copy_(torch.where(live, chosen, -1))
    row_live.copy_(live)
    positions.copy_(torch.where(live, (draft_lens + (depth - 2))[:, None], 0))
    row_masks.copy_(torch.where(live, masks[None], 0))


@operation("""
    read    draft_nodes     int32  [B, N]                 node 0 unused; -1 for a failed draft, which ends the drafts
    read    draft_live      uint8  [B]
    read    slots           int32  [B]
    read    topology_masks  int64  [T]                    ancestors and self
    read    topology_paths  int32  [P, W]                 -1 pads
    update  drafts          int32  [max_B, max_T]
    update  num_drafts      int32  [max_B]
    update  tree_masks      int64  [max_B, max_T]
    update  tree_paths      int32  [max_B, max_P, max_W]  rows and columns past the topology's are -1
""")
def tree_masks(
    draft_nodes: torch.Tensor,
    draft_live: torch.Tensor,
    slots: torch.Tensor,
    topology_masks: torch.Tensor,
    topology_paths: torch.Tensor,
    *,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    tree_masks: torch.Tensor,
    tree_paths: torch.Tensor,
) -> None:
    """Store the drafts for the step that verifies them: nodes, count, packed masks, paths.

    If there are more nodes than the topology has, the first are taken. Raises ShapeError for fewer.
    """
    rows = topology_masks.shape[0]
    check_nodes(draft_nodes, slots.shape[0], rows)
    for index, (slot, live) in enumerate(zip(slots.tolist(), draft_live.tolist(), strict=True)):
        if slot < 0 or not live:
            continue
        nodes = draft_nodes[index, :rows].tolist()
        drafts[slot, :rows] = draft_nodes[index, :rows]
        num_drafts[slot] = next((k for k in range(1, rows) if nodes[k] < 0), rows) - 1
        tree_masks[slot, :rows] = topology_masks
        tree_paths[slot].fill_(-1)
        tree_paths[slot, : topology_paths.shape[0], : topology_paths.shape[1]] = topology_paths


def check_nodes(draft_nodes: torch.Tensor, batch: int, rows: int) -> int:
    """Return the number of a slot's drafted nodes. Raises ShapeError if they are fewer than the topology's rows."""
    nodes = draft_nodes.shape[-1]
    check_shape("draft_nodes", draft_nodes, batch, max(nodes, rows))
    return nodes
