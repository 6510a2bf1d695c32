"""This module writes rows to the paged KV cache, and moves a tree's accepted rows to the dense tail.

Position p of a slot is in block table[p // block], at offset p % block. Block 0 is the null block. If scales are given,
the caches hold codes, see `kv_codes`.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.attention.kv_codes import quantised_kv

__all__ = ["kv_compact", "kv_write", "place_table", "prefill_kv_write"]


@operation("""
    read    k, v              compute  [B * R, G, D]
    read    block_table       int32    [max_B, blocks]
    read    slots             int32    [B]               -1 pads
    read    row_live          uint8    flat [B * R]
    read    write_lens        int32    [B]               first position
    read    offsets           int32    [R]
    read    kv_scales         float32  [2, G]            of keys and of values, if the caches hold codes
    update  k_cache, v_cache  cache    [P, G, block, D]
""")
def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    row_live: torch.Tensor,
    write_lens: torch.Tensor,
    offsets: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Store the keys and values of live rows at position write_lens[slot] + offsets[row]."""
    lives, firsts, steps, owners = (x.reshape(-1).tolist() for x in (row_live, write_lens, offsets, slots))
    rows = [row for row, live in enumerate(lives) if live]
    if not rows:
        return
    count, block = len(steps), k_cache.shape[2]
    places = [firsts[row // count] + steps[row % count] for row in rows]
    lists = (rows, [owners[row // count] for row in rows], [p // block for p in places], [p % block for p in places])
    row, slot, index, place = torch.tensor(lists, device=k.device).unbind()
    blocks = block_table[slot, index].long()
    k_cache[blocks, :, place] = _stored(k[row], kv_scales, 0)
    v_cache[blocks, :, place] = _stored(v[row], kv_scales, 1)


def _stored(rows: torch.Tensor, kv_scales: torch.Tensor | None, part: int) -> torch.Tensor:
    """Convert rows of keys (part 0) or values (1) to the caches' dtype, as codes if scales are given."""
    return rows if kv_scales is None else quantised_kv(rows, kv_scales[part])


@operation("""
    read    k, v              compute  [c, G, D]
    read    row_live          uint8    [c]
    read    block_table       int32    [1, blocks]
    read    chunk             int32    [2]               start, live target rows
    read    kv_scales         float32  [2, G]            as in `kv_write`
    update  k_cache, v_cache  cache    [P, G, block, D]
""")
def prefill_kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    row_live: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    *,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> None:
    """Store the keys and values of a chunk's live rows at positions start + row."""
    block = k_cache.shape[2]
    row = row_live.nonzero().reshape(-1).to(k.device)
    position = row + int(chunk[0])
    blocks = block_table.to(k.device)[0, position // block].long()
    k_cache[blocks, :, position % block] = _stored(k[row], kv_scales, 0)
    v_cache[blocks, :, position % block] = _stored(v[row], kv_scales, 1)


@operation("""
    read    accepted_nodes    int32    [B, T]            path from the root; nodes ascend, so no source is overwritten
    read    commit_lens       int32    [B]               rows to keep
    read    dense_lens        int32    [B]               position of the root
    read    block_table       int32    [max_B, blocks]
    read    slots             int32    [B]
    update  k_cache, v_cache  cache    [P, G, block, D]
""")
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
    """Move the rows of accepted nodes: node i of the path goes to position dense_lens + i."""
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


@operation("""
    read    table        int32  [1, blocks]
    read    slot         int32  [1]
    update  block_table  int32  [max_B, blocks]
""")
def place_table(table: torch.Tensor, slot: torch.Tensor, *, block_table: torch.Tensor) -> None:
    """Store the block table of a prefilled prompt as its slot's, for the slot's steps."""
    block_table[slot.long()] = table.to(block_table.device)
