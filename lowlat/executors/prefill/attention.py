"""Attention of a chunk of prefill by torch's fused attention, in shapes that hold for many starts.

A chunk looks at a *reach*: so many positions from the first on, one of a few numbers, chosen from its start alone.
Where it starts, how many of its rows are live and which blocks it reads are read on the device: the host decides
nothing within a chunk, so a chunk can be captured. It knows no model.
"""

from dataclasses import dataclass

import torch

from lowlat.errors import ConfigError

__all__ = ["Sight", "prefill_attention", "reach_of", "reaches_of", "sight_of", "span_of"]


def reaches_of(chunk: int, longest: int) -> tuple[int, ...]:
    """The reaches of chunks of this size in contexts of at most `longest` positions: the size doubled, the last whole.

    Multiples of the size, ascending; the last is what the last chunk of the longest context looks at.
    """
    whole = -(-longest // chunk) * chunk
    doubled = []
    reach = chunk
    while reach < whole:
        doubled.append(reach)
        reach *= 2
    return (*doubled, whole)


def reach_of(reaches: tuple[int, ...], chunk: int, start: int) -> int:
    """The least reach that holds a chunk's positions. Raises ConfigError for a chunk that starts elsewhere."""
    if start < 0 or start % chunk or start + chunk > reaches[-1]:
        raise ConfigError(
            f"a chunk starts at a multiple of prefill_chunk {chunk} and ends by {reaches[-1]}, the last chunk of "
            f"max_context, got one at {start}"
        )
    return next(reach for reach in reaches if start + chunk <= reach)


def span_of(reach: int, chunk: int, block: int, window: int | None, keep_first: int) -> int:
    """Positions whose keys are taken: the reach, or what all windows of the chunk's rows cover, in whole blocks."""
    if window is None or keep_first:
        return reach
    return min(reach, chunk + -(-(window - 1) // block) * block)


@dataclass(frozen=True)
class Sight:
    """What the rows of a chunk see, of n positions in whole blocks, on the device.

    blocks   [n / block] int64           where they lie
    written  [1, n / block, block, 1]    bool: whether anything was written there that somebody may see
    bias     [c, n]                      0 where row i sees the position, else -inf; the caches' dtype
    zero     []                          stands for what was not written; the caches' dtype
    """

    blocks: torch.Tensor
    written: torch.Tensor
    bias: torch.Tensor
    zero: torch.Tensor


def sight_of(
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    *,
    size: int,
    block: int,
    reach: int,
    first: int = 0,
    window: int | None = None,
    keep_first: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Sight:
    """What a chunk of `size` rows sees; nothing of it depends on what the tensors hold but the result's content.

    block_table  [1, C / block]  int32
    chunk        [2]             int32  start, live rows
    reach        positions it looks at, from 0; a multiple of the block's size, start + size at least
    first, window, keep_first    as `lowlat.kernels.reference.attention.prefill_attention` takes them
    """
    device = chunk.device
    start, end = chunk[0], chunk[0] + chunk[1]
    span = span_of(reach, size, block, window, keep_first)
    at = torch.arange(span, device=device)
    if span < reach:
        at = at + (start + (size - span))  # below 0 where the window reaches past the first position
    mine = torch.arange(size, device=device) + start
    visible = (at[None] <= mine[:, None]) & (at[None] >= first)
    if window is not None:
        visible &= (at[None] > mine[:, None] - window) | (at[None] < first + keep_first)
    visible |= at[None] == mine[:, None]  # a row that sees nothing would be NaN; it is a row that nobody reads
    written = (at < end) & (at >= first)
    places = (at[::block] // block).clamp(0, block_table.shape[1] - 1)  # of what is outside nothing was written
    bias = torch.zeros(size, span, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    zero = torch.zeros((), dtype=dtype, device=device)
    return Sight(block_table[0, places].long(), written.view(1, -1, block, 1), bias, zero)


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
    """What `lowlat.kernels.reference.attention.prefill_attention` means, over the positions of a sight.

    q                 [c, H, D]         bf16
    k_cache, v_cache  [P, G, block, D]  bf16
    sinks             [H]               or None: one more score of each head, of no value
    out               [c, H * D]        out; rows past the live ones are rubbish that nobody reads
    Keys and values are copied once for each of their G heads, 2 * G * n * D elements; a head's queries share them.
    """
    size, heads, dim = q.shape
    groups = k_cache.shape[1]
    shared = heads // groups
    queries = q.view(size, groups, shared, dim).permute(1, 2, 0, 3)
    keys, values = (_gather(cache, sight)[:, None].expand(-1, shared, -1, -1) for cache in (k_cache, v_cache))
    bias = sight.bias.expand(groups, shared, -1, -1)
    attended, logarithms = _fused(queries, keys, values, bias, scale, has_sinks=sinks is not None)
    if sinks is not None:
        excess = logarithms[:, :, :size] - sinks.float().view(groups, shared, 1)
        attended = attended * torch.sigmoid(excess)[..., None]
    out.view(size, groups, shared, dim).copy_(attended.permute(2, 0, 1, 3))


def _gather(cache: torch.Tensor, sight: Sight) -> torch.Tensor:
    """A slot's positions, [G, n, D], zero where nothing was written."""
    rows = cache[sight.blocks].transpose(0, 1)
    out = torch.empty(rows.shape, dtype=cache.dtype, device=cache.device)
    torch.where(sight.written, rows, sight.zero, out=out)
    return out.view(rows.shape[0], -1, rows.shape[3])


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float, *, has_sinks: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, H, c, D], and where sinks want them the logarithms of its sums of weights, [B, H, >= c] float32.

    The operation is named: torch's choice among its own knows one way alone for masks with fewer heads of keys than of
    queries, and where that one refuses a shape it writes all scores to memory. Heads that share keys have stride 0.
    """
    if q.is_cuda:
        parts = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, has_sinks, scale=scale)
    else:
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    return parts[0], parts[1]
