"""This module stores a dynamic tree for the next step, with masks and paths made from parents."""

import torch

from lowlat.graphs.schema import operation

__all__ = ["hand_over_tree"]


@operation("""
    read    draft_nodes    int32  [B, T]           node 0 unused; -1 from the first missing node on
    read    draft_parents  int32  [B, T]           each node's parent, which comes before it
    read    draft_live     uint8  [B]
    read    slots          int32  [B]
    update  drafts         int32  [max_B, max_T]
    update  num_drafts     int32  [max_B]
    update  tree_masks     int64  [max_B, max_T]   ancestors and self; 0 for missing nodes
    update  tree_paths     int32  [max_B, P, W]    root to leaf, in order of leaves; -1 pads
""")
def hand_over_tree(
    draft_nodes: torch.Tensor,
    draft_parents: torch.Tensor,
    draft_live: torch.Tensor,
    slots: torch.Tensor,
    *,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    tree_masks: torch.Tensor,
    tree_paths: torch.Tensor,
) -> None:
    """Store this step's tree for the next step: nodes, count, packed masks, paths.

    A tree has at most P leaves, and at most W nodes from its root to a leaf.
    """
    rows = draft_nodes.shape[1]
    for index, (slot, live) in enumerate(zip(slots.tolist(), draft_live.tolist(), strict=True)):
        if slot < 0 or not live:
            continue
        nodes, parents = draft_nodes[index].tolist(), draft_parents[index].tolist()
        count = next((node for node in range(1, rows) if nodes[node] < 0), rows)
        lines = [[0]]
        for node in range(1, count):
            lines.append([*lines[parents[node]], node])
        leaves = [node for node in range(count) if node not in parents[1:count]]
        words = [sum(1 << bit for bit in line) for line in lines]
        drafts[slot, :rows] = draft_nodes[index]
        num_drafts[slot] = count - 1
        tree_masks[slot, :rows] = torch.tensor([*words, *[0] * (rows - count)], dtype=torch.int64)
        tree_paths[slot].fill_(-1)
        for path, leaf in zip(tree_paths[slot], leaves, strict=False):
            path[: len(lines[leaf])] = torch.tensor(lines[leaf], dtype=torch.int32)
