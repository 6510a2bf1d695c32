"""This module grows a dynamic tree: it chooses the drafts that each level expands, and the drafts to verify.

A tree has an entry for every candidate draft: the K likeliest tokens after the root, and at each deeper level the K
likeliest tokens after each of the K drafts that the previous level kept. An entry's score is the sum of the logprobs on
its path, so it never grows along a path. Entries are ordered by score, then by number: by level, row of the level, and
rank. So a parent comes before its children, and the first entries in this order, however many, are a tree.

Source: EAGLE-2, arXiv 2406.16858, section 4.
"""

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation

__all__ = ["LOWEST", "MAX_ENTRIES", "choose_nodes", "first_entry", "grow_block_tree", "grow_tree"]

LOWEST = -3.0e38  # the lowest score of a draft; a missing draft has minus infinity
MAX_ENTRIES = 1024 + 64


def first_entry(depth: int, top_k: int) -> int:
    """Return the first entry of the drafts of a depth, from 1 on; it is the number of entries before them."""
    return 0 if depth == 1 else top_k + (depth - 2) * top_k * top_k


@operation("""
    read    top_tokens    int32    [B * W, K]  the level's likeliest tokens by rank; -1 where there is none
    read    top_logprobs  float32  [B * W, K]
    read    row_scores    float32  [B, W]      of each row's path
    read    row_entries   int32    [B, W]      each row's entry; -1 the root
    read    row_masks     int64    [B, W]      drafted ancestors and self, by ordinal
    read    feedback      compute  [B * W, H]
    read    draft_lens    int32    [B]         n'
    update  tree_tokens   int32    [B, N]
    update  tree_scores   float32  [B, N]      minus infinity where there is no token
    update  tree_parents  int32    [B, N]      entries; -1 the root
    write   hidden        compute  [B * K, H]  fed back by the parents
    write   tokens        int32    [B, K]      -1 where dead
    write   row_live      uint8    [B, K]
    write   positions     int32    [B, K]      n' - 2 + depth
    write   next_scores   float32  [B, K]
    write   next_entries  int32    [B, K]
    write   next_masks    int64    [B, K]
""")
def grow_tree(
    top_tokens: torch.Tensor,
    top_logprobs: torch.Tensor,
    row_scores: torch.Tensor,
    row_entries: torch.Tensor,
    row_masks: torch.Tensor,
    feedback: torch.Tensor,
    draft_lens: torch.Tensor,
    *,
    tree_tokens: torch.Tensor,
    tree_scores: torch.Tensor,
    tree_parents: torch.Tensor,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    row_live: torch.Tensor,
    positions: torch.Tensor,
    next_scores: torch.Tensor,
    next_entries: torch.Tensor,
    next_masks: torch.Tensor,
    depth: int,
) -> None:
    """Add the drafts of a level, at this depth, as entries, and lay out the K best as the rows of the next level.

    A row's ordinal is (depth - 1) * K + its place; it is the number of rows below the root's level before it.
    """
    (batch, width), top_k = row_scores.shape, top_tokens.shape[1]
    tree = (tree_tokens, tree_scores, tree_parents)
    start = first_entry(depth, top_k)
    end = _enter(top_tokens, top_logprobs, row_scores, row_entries, tree, start)
    best = _order(tree_scores[:, start:end])[:, :top_k]
    chosen = tree_tokens[:, start:end].gather(1, best)
    live = chosen >= 0
    own = 1 << torch.arange((depth - 1) * top_k, depth * top_k, device=best.device)
    rows = best // top_k
    above = feedback.reshape(batch, width, -1)
    hidden.copy_(above.gather(1, rows[..., None].expand(-1, -1, above.shape[-1])).reshape(hidden.shape))
    tokens.copy_(chosen)
    row_live.copy_(live)
    positions.copy_(torch.where(live, (draft_lens + (depth - 2))[:, None], 0))
    next_scores.copy_(tree_scores[:, start:end].gather(1, best))
    next_entries.copy_(start + best)
    next_masks.copy_(torch.where(live, row_masks.gather(1, rows) | own, 0))


@operation("""
    read    top_tokens     int32    [B * W, K]  the last level's likeliest tokens by rank; -1 where there is none
    read    top_logprobs   float32  [B * W, K]
    read    row_scores     float32  [B, W]      of each row's path
    read    row_entries    int32    [B, W]      each row's entry; -1 the root
    update  tree_tokens    int32    [B, N]
    update  tree_scores    float32  [B, N]      minus infinity where there is no token
    update  tree_parents   int32    [B, N]      entries; -1 the root
    write   draft_nodes    int32    [B, T]      in order of scores; node 0 and missing nodes -1
    write   draft_parents  int32    [B, T]      each node's parent; of node 0 and of missing nodes -1
""")
def choose_nodes(
    top_tokens: torch.Tensor,
    top_logprobs: torch.Tensor,
    row_scores: torch.Tensor,
    row_entries: torch.Tensor,
    *,
    tree_tokens: torch.Tensor,
    tree_scores: torch.Tensor,
    tree_parents: torch.Tensor,
    draft_nodes: torch.Tensor,
    draft_parents: torch.Tensor,
) -> None:
    """Add the last level's drafts as entries, and take the T - 1 best of all, best first, as the nodes to verify."""
    tree = (tree_tokens, tree_scores, tree_parents)
    _enter(top_tokens, top_logprobs, row_scores, row_entries, tree, tree_tokens.shape[1] - _children(top_tokens, tree))
    _choose(tree, draft_nodes, draft_parents)


@operation("""
    read    top_tokens     int32    [B * R, K]  by row, the likeliest tokens by rank; -1 where there is none
    read    top_logprobs   float32  [B * R, K]
    write   draft_nodes    int32    [B, T]      in order of scores; node 0 and missing nodes -1
    write   draft_parents  int32    [B, T]      each node's parent; of node 0 and of missing nodes -1
""")
def grow_block_tree(
    top_tokens: torch.Tensor,
    top_logprobs: torch.Tensor,
    *,
    draft_nodes: torch.Tensor,
    draft_parents: torch.Tensor,
    first_row: int,
) -> None:
    """Grow a tree from a block that drafts all positions at once, and take the T - 1 best drafts.

    first_row  the row with the root's children; the rows after it have those of deeper levels
    A draft's probability is that of its token at its depth, whatever tokens come before it.
    """
    batch, top_k = draft_nodes.shape[0], top_tokens.shape[1]
    lists, logprobs = (each.reshape(batch, -1, top_k)[:, first_row:] for each in (top_tokens, top_logprobs))
    depth = lists.shape[1]
    device, count = top_tokens.device, first_entry(depth + 1, top_k)
    tree = (
        torch.empty(batch, count, dtype=torch.int32, device=device),
        torch.empty(batch, count, device=device),
        torch.empty(batch, count, dtype=torch.int32, device=device),
    )
    scores, entries = torch.zeros(batch, 1, device=device), torch.full((batch, 1), -1, device=device)
    for level in range(depth):
        width, start = scores.shape[1], first_entry(level + 1, top_k)
        tokens, probabilities = (part[:, level : level + 1].expand(-1, width, -1) for part in (lists, logprobs))
        end = _enter(tokens.reshape(-1, top_k), probabilities.reshape(-1, top_k), scores, entries, tree, start)
        best = _order(tree[1][:, start:end])[:, :top_k]
        scores, entries = tree[1][:, start:end].gather(1, best), start + best
    _choose(tree, draft_nodes, draft_parents)


def _enter(
    top_tokens: torch.Tensor,
    top_logprobs: torch.Tensor,
    row_scores: torch.Tensor,
    row_entries: torch.Tensor,
    tree: tuple[torch.Tensor, ...],
    start: int,
) -> int:
    """Store the children of a level's rows as entries from `start` on. Returns the entry after them."""
    (batch, width), top_k = row_scores.shape, top_tokens.shape[1]
    end = start + width * top_k
    if not 0 <= start <= end <= min(tree[0].shape[1], MAX_ENTRIES):
        raise ShapeError(f"entries {start} to {end} do not fit a tree of {tree[0].shape[1]}, at most {MAX_ENTRIES}")
    known = (row_scores >= LOWEST).repeat_interleave(top_k, dim=1)  # a missing draft has no children
    tokens = torch.where(known, top_tokens.reshape(batch, -1), -1)
    scores = (row_scores[..., None] + top_logprobs.reshape(batch, width, top_k)).reshape(batch, -1).clamp(min=LOWEST)
    tree[0][:, start:end] = tokens
    tree[1][:, start:end] = torch.where(tokens >= 0, scores, -torch.inf)
    tree[2][:, start:end] = row_entries.repeat_interleave(top_k, dim=1)
    return end


def _children(top_tokens: torch.Tensor, tree: tuple[torch.Tensor, ...]) -> int:
    return top_tokens.numel() // tree[0].shape[0]


def _order(scores: torch.Tensor) -> torch.Tensor:
    """Sort places by score, largest first, of equal ones the first place first."""
    return torch.argsort(scores, dim=1, descending=True, stable=True)


def _choose(tree: tuple[torch.Tensor, ...], draft_nodes: torch.Tensor, draft_parents: torch.Tensor) -> None:
    tokens, scores, parents = tree
    draft_nodes.fill_(-1)
    draft_parents.fill_(-1)
    for index, order in enumerate(_order(scores)[:, : draft_nodes.shape[1] - 1].tolist()):
        nodes = {-1: 0}
        for entry in order:
            if tokens[index, entry] >= 0:
                draft_nodes[index, len(nodes)] = tokens[index, entry]
                draft_parents[index, len(nodes)] = nodes[int(parents[index, entry])]
                nodes[entry] = len(nodes)
