"""Attention of a chunk of prefill by torch on a CPU: over the whole context, or all windows of the rows, with a mask.

Where the chunk starts, how many of its rows are live and which blocks it reads are read from tensors: no shape depends
on what they hold. It knows no model.
"""

from dataclasses import dataclass

import torch

__all__ = ["Sight", "prefill_attention", "sight_of"]


@dataclass(frozen=True)
class Sight:
    """What the rows of a chunk see, of n positions in whole blocks.

    blocks   [n / block] int64           where they lie
    written  [1, n / block, block, 1]    bool: whether anything was written there that somebody may see
    bias     [c, n]                      0 where row i sees the position, else -inf; the caches' dtype
    """

    blocks: torch.Tensor
    written: torch.Tensor
    bias: torch.Tensor


def sight_of(
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    *,
    size: int,
    block: int,
    whole: int,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Sight:
    """What a chunk of `size` rows sees; nothing of it depends on what the tensors hold but the result's content.

    block_table  [1, C / block]  int32
    chunk        [2]             int32  start, live rows
    whole        positions that any chunk may see, in whole blocks
    window       positions that a row sees, its own included; None: all
    """
    start, end = chunk[0], chunk[0] + chunk[1]
    span = whole
    if window is not None:
        span = min(whole, size + -(-(window - 1) // block) * block)
    at = torch.arange(span)
    if span < whole:
        at = at + (start + (size - span))  # below 0 where the window reaches past the first position
    mine = torch.arange(size) + start
    visible = (at[None] <= mine[:, None]) & (at[None] >= 0)
    if window is not None:
        visible &= at[None] > mine[:, None] - window
    written = (at < end) & (at >= 0)
    places = (at[::block] // block).clamp(0, block_table.shape[1] - 1)  # of what is outside nothing was written
    bias = torch.zeros(size, span, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return Sight(block_table[0, places].long(), written.view(1, -1, block, 1), bias)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sight: Sight,
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor,
    scale: float,
) -> None:
    """What `lowlat.kernels.reference.attention.attention.prefill_attention` means, over the positions of a sight.

    q                 [c, H, D]         bf16
    k_cache, v_cache  [P, G, block, D]  bf16
    sinks             [H]               or None: one more score of each head, of no value
    out               [c, H * D]        out; rows past the live ones are rubbish that nobody reads
    """
    size, heads, dim = q.shape
    groups = k_cache.shape[1]
    shared = heads // groups
    queries = q.view(size, groups, shared, dim).permute(1, 2, 0, 3)
    keys, values = (_gather(cache, sight)[:, None].expand(-1, shared, -1, -1) for cache in (k_cache, v_cache))
    bias = sight.bias.expand(groups, shared, -1, -1)
    # named, as torch's own choice gives no logarithms of the sums of weights, which sinks want
    attended, logarithms = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=bias, scale=scale
    )
    if sinks is not None:
        attended = attended * torch.sigmoid(logarithms - sinks.float().view(groups, shared, 1))[..., None]
    out.view(size, groups, shared, dim).copy_(attended.permute(2, 0, 1, 3))


def _gather(cache: torch.Tensor, sight: Sight) -> torch.Tensor:
    """A slot's positions, [G, n, D], zero where nothing was written."""
    rows = cache[sight.blocks].transpose(0, 1).masked_fill(~sight.written, 0)
    return rows.reshape(rows.shape[0], -1, rows.shape[3])
