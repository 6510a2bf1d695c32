"""The head's shifted features of a chunk of prefill, all told on the device.

It is the operation of `lowlat.kernels.reference` without a look at what the host has written: blocks that are not whole
write back what lies in the null block, so the number of live rows changes no shape.
"""

import torch

__all__ = ["draft_prefill_rows"]


def draft_prefill_rows(
    hidden: torch.Tensor,
    chunk: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_features: torch.Tensor,
    shifted: torch.Tensor,
    block_size: int,
) -> None:
    """What `lowlat.kernels.reference.rows.draft_rows.draft_prefill_rows` means; shapes as there, all on the device."""
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
