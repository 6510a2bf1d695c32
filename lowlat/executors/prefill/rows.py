"""Where a chunk's rows go: keys and values to the cache, and the head's shifted features, all told on the device.

These are prefill's operations of `lowlat.kernels.reference` without a look at what the host has written: dead rows
write back what lies in the null block, so the number of live rows changes no shape.
"""

from dataclasses import dataclass

import torch

__all__ = ["Places", "head_prefill_rows", "places_of", "prefill_kv_write"]


@dataclass(frozen=True)
class Places:
    """Where each row of a chunk is stored.

    blocks, offsets  [c]        int64  of dead rows: the null block
    live             [c, 1, 1]  bool
    """

    blocks: torch.Tensor
    offsets: torch.Tensor
    live: torch.Tensor


def places_of(row_live: torch.Tensor, block_table: torch.Tensor, chunk: torch.Tensor, block: int) -> Places:
    """Row i is stored at position start + i: row_live [c] uint8, block_table [1, C / block] int32, chunk [2] int32."""
    position = torch.arange(row_live.shape[0], device=row_live.device) + chunk[0]
    live = row_live != 0
    known = block_table[0, (position // block).clamp(max=block_table.shape[1] - 1)].long()
    return Places(known.masked_fill_(~live, 0), position % block, live[:, None, None])


def prefill_kv_write(
    k: torch.Tensor, v: torch.Tensor, places: Places, *, k_cache: torch.Tensor, v_cache: torch.Tensor
) -> None:
    """Store a chunk's live rows.

    k, v              [c, G, D]         the caches' dtype
    k_cache, v_cache  [P, G, block, D]  updated
    """
    for rows, cache in ((k, k_cache), (v, v_cache)):
        # dead rows of one place all write what it holds: in whatever order, nothing changes
        kept = cache[places.blocks, :, places.offsets]
        cache[places.blocks, :, places.offsets] = torch.where(places.live, rows, kept)


def head_prefill_rows(
    hidden: torch.Tensor,
    chunk: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_features: torch.Tensor,
    shifted: torch.Tensor,
    block_size: int,
) -> None:
    """What `lowlat.kernels.reference.head_rows.head_prefill_rows` means; shapes as there, all on the device."""
    start, count = chunk[:1], chunk[1:]  # of one element: an index of no dimension would be read by the host
    width = block_table.shape[1]
    before = block_table[0, ((start - 1) // block_size).clamp(0, width - 1)].long()
    shifted[1:] = hidden[:-1]
    shifted[:1] = block_features[before].masked_fill_(start[:, None] == 0, 0)
    ends = torch.arange(1, hidden.shape[0] // block_size + 1, device=hidden.device)
    complete = ends * block_size <= count
    known = block_table[0, (start // block_size + ends - 1).clamp(max=width - 1)].long()
    blocks = known.masked_fill_(~complete, 0)
    kept = block_features[blocks]
    block_features[blocks] = torch.where(complete[:, None], hidden[block_size - 1 :: block_size], kept)
