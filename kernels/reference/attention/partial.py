"""This module has SpecPV's operations: summaries of keys by block, choice of blocks, attention over lists of blocks.

A list's block is a part of a block of the paged cache, b positions of its block_size: entry e is part e % parts of
cache block e // parts. Position p of a slot is at place p of a list that holds everything. In other lists it is at
p - shift, from the window on.

Source: SpecPV, arXiv 2512.02337; the score is that of TanZhendong/SpecPV, specpv/kv/kv_cache.py.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.attention.attention import AttendedRows, attend_rows, load_kv
from lowlat.kernels.reference.attention.kv_codes import dequantised_kv

__all__ = ["choose_blocks", "list_lens", "partial_attention", "summarise_blocks"]


@operation("""
    read    k_cache      cache    [P, G, block, D]
    read    block_table  int32    [1, blocks]
    read    span         int32    [2]                   positions [first, end) are new
    read    kv_scales    float32  [2, G]                if the cache holds codes, see `kv_codes`
    update  key_summary  compute  [P, G, parts, 2, D]   largest and smallest key of a part, for each dimension
""")
def summarise_blocks(
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    span: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    *,
    key_summary: torch.Tensor,
) -> None:
    """Compute the summaries of all parts with new positions; an unfinished part is summarised as far as it goes."""
    parts = key_summary.shape[2]
    size = k_cache.shape[2] // parts
    first, end = span.tolist()
    for part in range(first // size, -(-end // size)):
        block, inner = int(block_table[0, part // parts]), part % parts
        keys = k_cache[block, :, inner * size : inner * size + min(size, end - part * size)]
        if kv_scales is not None:
            keys = dequantised_kv(keys, kv_scales[0], key_summary.dtype)
        key_summary[block, :, inner, 0] = keys.amax(1)
        key_summary[block, :, inner, 1] = keys.amin(1)


def block_scores(q: torch.Tensor, largest: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """Compute the scores of blocks for each key-value head, [G, n] float32.

    A query's score is the greater of its products with the largest and with the smallest keys. The mean is taken over
    the queries and the heads of a group.

    q  [R, H, D]; largest, smallest  [G, n, D]
    """
    kv_heads = largest.shape[0]
    queries = q.float().reshape(q.shape[0], kv_heads, -1, q.shape[-1]).transpose(0, 1).flatten(1, 2)
    products = [torch.bmm(queries, keys.float().transpose(1, 2)) for keys in (largest, smallest)]
    return torch.maximum(*products).mean(1)


@operation("""
    read    q            compute  [c, H, D]             rotated queries; row i stands at position start + i
    read    key_summary  compute  [P, G, parts, 2, D]
    read    block_table  int32    [1, blocks]
    read    chunk        int32    [2]                   start, live rows
    read    slot         int32    [1]
    read    shifts       int32    [max_B]               positions that each slot's lists leave out; 0: none
    update  block_lists  int32    [max_B, G, n]         the slot's; 0 after its last block
""")
def choose_blocks(
    q: torch.Tensor,
    key_summary: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    slot: torch.Tensor,
    shifts: torch.Tensor,
    *,
    block_lists: torch.Tensor,
    block: int,
    num_queries: int,
    num_sinks: int,
    num_retrieved: int,
) -> None:
    """List a slot's blocks: all of them, or the sinks, the blocks of the best scores, and the window.

    Scores are those of the last `num_queries` live rows, see `block_scores`.
    The window begins num_sinks + num_retrieved blocks plus the shift from the start. Chosen blocks are in order of
    position. Of blocks with equal scores the first is chosen.

    block  positions of a block
    """
    parts, width = key_summary.shape[2], block_lists.shape[2]
    table = block_table[0].to(block_lists.device)
    entries = (table[:, None] * parts + torch.arange(parts, device=table.device)).reshape(-1)[:width].int()
    lists, left_out = block_lists[int(slot)], int(shifts[int(slot)]) // block
    lists.zero_()
    if left_out == 0:
        lists[:, : len(entries)] = entries
        return
    window = num_sinks + num_retrieved
    candidates = entries[num_sinks : window + left_out].long()
    summary = key_summary[candidates // parts, :, candidates % parts].permute(2, 1, 0, 3)
    count = int(chunk[1])
    scores = block_scores(q[max(0, count - num_queries) : count], summary[0], summary[1])
    chosen = scores.sort(descending=True, stable=True).indices[:, :num_retrieved].sort().values
    lists[:, :num_sinks] = entries[:num_sinks]
    lists[:, num_sinks:window] = candidates[chosen].int()
    lists[:, window : len(entries) - left_out] = entries[window + left_out :]


@operation("""
    read    dense_lens  int32  [B]      positions before a slot's rows
    read    slots       int32  [B]      -1 pads
    read    shifts      int32  [max_B]
    write   out         int32  [B]      positions before them in the slot's list
""")
def list_lens(dense_lens: torch.Tensor, slots: torch.Tensor, shifts: torch.Tensor, *, out: torch.Tensor) -> None:
    """Count the positions of each slot's list before its rows."""
    out.copy_(dense_lens - torch.where(slots >= 0, shifts[slots.clamp(min=0).long()], 0))


@operation("""
    read    q                 compute  [B * R, H, D]
    read    k_cache, v_cache  cache    [P, G, size, D]
    read    block_lists       int32    [max_B, G, n]
    read    slots             int32    [B]               -1 pads
    read    dense_lens        int32    [B]               positions of the list that all rows of the slot see
    read    row_live          uint8    flat [B * R]
    read    row_masks         int64    [B, R]            bit a: sees node a, at dense + a of the list, itself included
    read    kv_scales         float32  [2, G]            as in `attention`
    weight  sinks             float    [H]               one more score a head, without a value
    write   out               compute  [B * R, H * D]    dead rows zero
""")
def partial_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_lists: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    row_live: torch.Tensor,
    row_masks: torch.Tensor,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    scale: float,
    block: int,
    softcap: float | None = None,
) -> None:
    """Attend from each row to its slot's list of blocks and to its own ancestors.

    If the list holds everything, the result has the bits of `attention`.

    block    positions of a block of the list
    softcap  as in `attention`
    """

    def load(slot: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        entries = block_lists[slot, :, : -(-count // block)].long()
        stored = _rows_of(k_cache, entries, count, block), _rows_of(v_cache, entries, count, block)
        return load_kv(stored, count, kv_scales, q.dtype)

    rows = AttendedRows(q, slots, dense_lens, row_live, row_masks, sinks, k_cache.shape[1])
    attend_rows(rows, load, out=out, scale=scale, softcap=softcap)


def _rows_of(cache: torch.Tensor, entries: torch.Tensor, count: int, block: int) -> torch.Tensor:
    """Gather the first `count` positions of lists [G, n] from the cache, in its dtype: [G, count, D]."""
    parts = cache.shape[2] // block
    heads = torch.arange(cache.shape[1], device=cache.device)[:, None]
    blocks: torch.Tensor = cache.unflatten(2, (parts, block))[entries // parts, heads, entries % parts]
    return blocks.flatten(1, 2)[:, :count]
