"""The rows that the EAGLE3 head runs over: accepted rows, the live one among them, and the tree's levels.

The head's row for the token at index i uses the target's feature at i - 1 and is stored at index i, so that a
cached block depends on its own prefix alone; index 0 is never used.
"""

import torch

__all__ = [
    "assign_drafts",
    "draft_prefill_rows",
    "draft_rows",
    "gather_features",
    "gather_level",
    "join_features",
    "store_boundary",
    "take_last",
    "tree_masks",
]


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
    """Lay out the head's rows after a commit: row r is the r-th committed token with the feature before it.

    accepted_tokens  [B, T]  int32
    commit_lens      [B]     int32
    draft_live       [B]     uint8
    dense_lens       [B]     int32  the root's position n - 1, which is the first feature's
    tokens           [B, T]  int32  out, -1 where dead
    positions        [B, T]  int32  out: the feature's position, for RoPE
    row_live         [B, T]  uint8  out
    write_lens       [B]     int32  out: index of row 0, n
    live_positions   [B, 1]  int32  out: the position of the last live row
    """
    row = torch.arange(tokens.shape[1], device=tokens.device)
    live = (row[None] < commit_lens[:, None]) & (draft_live[:, None] != 0)
    row_live.copy_(live)
    tokens.copy_(torch.where(live, accepted_tokens, -1))
    positions.copy_(torch.where(live, dense_lens[:, None] + row[None], 0))
    write_lens.copy_(torch.where(draft_live != 0, dense_lens + 1, 0))
    last = dense_lens + commit_lens - 1
    live_positions.copy_(torch.where(draft_live != 0, last, 0)[:, None])


def gather_features(accepted_nodes: torch.Tensor, *, out: torch.Tensor, **sources: torch.Tensor) -> None:
    """Features of the accepted rows in order, the captured residual streams side by side.

    accepted_nodes  [B, T]          int32  -1 pads
    source0..       [B * T, Ht]            captured boundaries, low to high
    out             [B * T, F * Ht]        out; zero for pads
    """
    rows = accepted_nodes.shape[1]
    base = torch.arange(accepted_nodes.shape[0], device=out.device)[:, None] * rows
    at = (base + accepted_nodes.clamp(min=0)).reshape(-1).long()
    features = torch.cat([sources[f"source{k}"][at] for k in range(len(sources))], dim=1)
    out.copy_(torch.where((accepted_nodes.reshape(-1) >= 0)[:, None], features, 0))


def join_features(*, out: torch.Tensor, **sources: torch.Tensor) -> None:
    """A chunk's captured residual streams side by side: source0.. [c, Ht] -> out [c, F * Ht] out."""
    out.copy_(torch.cat([sources[f"source{k}"] for k in range(len(sources))], dim=1))


def take_last(x: torch.Tensor, commit_lens: torch.Tensor, *, out: torch.Tensor) -> None:
    """Row commit_lens - 1 of each slot: x [B * T, W] -> out [B, W] out; zero where nothing was committed."""
    batch = commit_lens.shape[0]
    last = (commit_lens - 1).clamp(min=0).long()
    picked = x.reshape(batch, -1, x.shape[-1])[torch.arange(batch, device=x.device), last]
    out.copy_(torch.where((commit_lens > 0)[:, None], picked, 0))


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
    """Keep the feature of each block's last position: a reused prefix has nobody else to give it.

    hidden          [B * T, H]   the head's input for each row
    positions       [B, T]       int32  the features' positions
    row_live        [B, T]       uint8
    block_features  [P, H]       updated
    """
    rows = positions.shape[1]
    ends = (row_live != 0) & ((positions + 1) % block_size == 0)
    owner, row = ends.nonzero(as_tuple=True)
    if owner.numel():
        blocks = block_table[slots[owner].long(), (positions[owner, row] // block_size).long()].long()
        block_features[blocks] = hidden[owner * rows + row]


def draft_prefill_rows(
    hidden: torch.Tensor,
    chunk: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_features: torch.Tensor,
    shifted: torch.Tensor,
    block_size: int,
) -> None:
    """Shift a chunk's features by one row, the first taken from the block before, and keep the new block ends.

    hidden          [c, H]          the head's input made of the chunk's features
    chunk           [2]      int32  start, live target rows
    block_table     [1, ..]  int32
    block_features  [P, H]          updated
    shifted         [c, H]          out: row i holds the feature of position start + i - 1
    """
    start, count = chunk.tolist()
    shifted[1:] = hidden[:-1]
    if start:
        shifted[0] = block_features[int(block_table[0, (start - 1) // block_size])]
    else:
        shifted[0].zero_()
    for end in range(block_size, count + 1, block_size):
        block_features[int(block_table[0, (start + end - 1) // block_size])] = hidden[end - 1]


def assign_drafts(
    top_tokens: torch.Tensor,
    children: torch.Tensor,
    child_rows: torch.Tensor,
    child_ranks: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
) -> None:
    """Give the children of a level their tokens.

    top_tokens   [B * W, k]  int32  the level's likeliest tokens by rank
    children     [n]         int32  node index of each child
    child_rows   [n]         int32  its parent's row in the level
    child_ranks  [n]         int32  its rank among the parent's tokens
    draft_nodes  [B, T]      int32  updated
    """
    batch = draft_nodes.shape[0]
    by_row = top_tokens.reshape(batch, -1, top_tokens.shape[-1])
    draft_nodes[:, children.long()] = by_row[:, child_rows.long(), child_ranks.long()]


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
    """Lay out one deeper level: its nodes' tokens, each with the state fed back by its parent.

    feedback     [B * V, H]  the level above
    draft_nodes  [B, T]      int32
    draft_live   [B]         uint8
    draft_lens    [B]         int32  n'
    nodes        [W]         int32  the level's nodes that have children
    parent_rows  [W]         int32  their parents' rows in the level above
    masks        [W]         int64  drafted ancestors and self, by ordinal
    hidden       [B * W, H]  out
    tokens       [B, W]      int32  out, -1 where dead
    row_live     [B, W]      uint8  out
    positions    [B, W]      int32  out: n' - 2 + depth
    row_masks    [B, W]      int64  out
    """
    batch = draft_nodes.shape[0]
    above = feedback.reshape(batch, -1, feedback.shape[-1])
    hidden.copy_(above[:, parent_rows.long()].reshape(hidden.shape))
    chosen = draft_nodes[:, nodes.long()]
    live = (draft_live[:, None] != 0) & (chosen >= 0)
    tokens.copy_(torch.where(live, chosen, -1))
    row_live.copy_(live)
    positions.copy_(torch.where(live, (draft_lens + (depth - 2))[:, None], 0))
    row_masks.copy_(torch.where(live, masks[None], 0))


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
    """Hand the drafts to the next step: nodes, count, packed masks, paths.

    draft_nodes     [B, T]           int32  node 0 unused; -1 where a draft failed: what follows is dropped
    topology_masks  [T]              int64  ancestors and self
    topology_paths  [P, W]           int32  -1 pads
    drafts          [max B, max T]   int32  updated
    num_drafts      [max B]          int32  updated
    tree_masks      [max B, max T]   int64  updated
    tree_paths      [max B, P', W']  int32  updated; rows and columns past the topology's are -1
    """
    rows = draft_nodes.shape[1]
    for index, (slot, live) in enumerate(zip(slots.tolist(), draft_live.tolist(), strict=True)):
        if slot < 0 or not live:
            continue
        nodes = draft_nodes[index].tolist()
        drafts[slot, :rows] = draft_nodes[index]
        num_drafts[slot] = next((k for k in range(1, rows) if nodes[k] < 0), rows) - 1
        tree_masks[slot, :rows] = topology_masks
        tree_paths[slot].fill_(-1)
        tree_paths[slot, : topology_paths.shape[0], : topology_paths.shape[1]] = topology_paths
