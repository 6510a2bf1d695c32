"""The paged KV cache: write rows, and move a tree's accepted rows to the dense tail.

Position p of a slot lies in block table[p // block], at offset p % block. Block 0 is the null block.
"""

import torch

__all__ = ["kv_compact", "kv_write", "prefill_kv_write"]


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    row_live: torch.Tensor,
    write_lens: torch.Tensor,
    offsets: torch.Tensor,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Store the keys and values of live rows at position write_lens[slot] + offsets[row].

    k, v              [B * R, G, D]        compute dtype
    block_table       [max B, C / block]   int32
    slots             [B]                  int32; -1 pads
    row_live          [B * R]              uint8
    write_lens        [B]                  int32  first position
    offsets           [R]                  int32
    k_cache, v_cache  [P, G, block, D]     updated
    """
    block = k_cache.shape[2]
    rows = offsets.shape[0]
    live = row_live.reshape(-1, rows) != 0
    owner, row = live.nonzero(as_tuple=True)
    if owner.numel() == 0:
        return
    position = (write_lens[owner] + offsets[row]).long()
    blocks = block_table[slots[owner].long(), position // block].long()
    k_cache[blocks, :, position % block] = k[owner * rows + row]
    v_cache[blocks, :, position % block] = v[owner * rows + row]


def prefill_kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    row_live: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Store a chunk's live rows at positions start + row.

    k, v              [c, G, D]         compute dtype
    row_live          [c]               uint8
    block_table       [1, C / block]    int32
    chunk             [2]               int32  start, live target rows
    k_cache, v_cache  [P, G, block, D]  updated
    """
    block = k_cache.shape[2]
    row = row_live.nonzero().reshape(-1).to(k.device)
    position = row + int(chunk[0])
    blocks = block_table.to(k.device)[0, position // block].long()
    k_cache[blocks, :, position % block] = k[row]
    v_cache[blocks, :, position % block] = v[row]


def kv_compact(
    accepted_nodes: torch.Tensor,
    commit_lens: torch.Tensor,
    dense_lens: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Move the accepted nodes' rows, node i of the path to position dense_lens + i.

    accepted_nodes    [B, T]            int32  path from the root; nodes ascend, so no source is overwritten
    commit_lens       [B]               int32  rows to keep
    dense_lens        [B]               int32  position of the root
    k_cache, v_cache  [P, G, block, D]  updated
    """
    block = k_cache.shape[2]
    for index, (slot, count, base) in enumerate(
        zip(slots.tolist(), commit_lens.tolist(), dense_lens.tolist(), strict=True)
    ):
        for place, node in enumerate(accepted_nodes[index].tolist()[:count] if slot >= 0 else ()):
            if node == place:
                continue
            table = block_table[slot]
            source, target = base + node, base + place
            for cache in (k_cache, v_cache):
                cache[table[target // block], :, target % block] = cache[table[source // block], :, source % block]
