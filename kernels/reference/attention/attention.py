"""Attention over the paged cache: for the rows of a step, and for a chunk of prefill.

Keys lie in tiles at fixed absolute positions; each tile's product has one fixed shape, and tiles are added in
order, so a row's bits depend on its own positions alone. Masked keys and values are replaced by zero on load.
"""

import torch

from lowlat.kernels.reference.schema import operation

__all__ = ["attention", "prefill_attention"]

TILE = 256  # keys a tile


def _load(cache: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """Positions [0, count) of a slot as float32 [G, count, D]."""
    block = cache.shape[2]
    blocks = table[: -(-count // block)].long()
    rows = cache[blocks].float().transpose(0, 1)
    return rows.reshape(rows.shape[0], -1, rows.shape[-1])[:, :count]


class _Softmax:
    """Online softmax over tiles, for queries [G, R, D]; everything in float32."""

    def __init__(self, queries: torch.Tensor, scale: float) -> None:
        self.queries, self.scale = queries, scale
        self.peak = queries.new_full((*queries.shape[:2], 1), -torch.inf)
        self.total = torch.zeros_like(self.peak)
        self.out = torch.zeros_like(queries)

    def add(self, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Add one tile: keys and values [G, n, D]; visible [n] or [R, n] bool, None where all are."""
        scores = torch.bmm(self.queries, keys.transpose(1, 2)) * self.scale
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        safe = torch.where(torch.isinf(peak), 0, peak)
        weights = torch.exp(scores - safe)
        decay = torch.exp(self.peak - safe)
        self.total = self.total * decay + weights.sum(-1, keepdim=True)
        self.out = self.out * decay + torch.bmm(weights, values)
        self.peak = peak

    def finish(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """The weighted mean; sinks [G, R, 1] are one more score each, of no value."""
        if sinks is None:
            return self.out / torch.where(self.total == 0, 1, self.total)
        peak = torch.maximum(self.peak, sinks)
        decay = torch.exp(self.peak - peak)
        return self.out * decay / (self.total * decay + torch.exp(sinks - peak))


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(64) if mask >> bit & 1]


@operation("""
    read    q                 compute  [B * R, H, D]
    read    k_cache, v_cache  compute  [P, G, block, D]
    read    block_table       int32    [max_B, blocks]
    read    slots             int32    [B]               -1 pads
    read    dense_lens        int32    [B]               positions [first, dense) are everybody's
    read    row_live          uint8    flat [B * R]
    read    row_masks         int64    [B, R]            bit a: sees node a, stored at dense + a, itself included
    weight  sinks             float    [H]               one more score a head, of no value
    write   out               compute  [B * R, H * D]    dead rows zero
""")
def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    row_live: torch.Tensor,
    row_masks: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    scale: float,
    first: int = 0,
    window: int | None = None,
    keep_first: int = 0,
) -> None:
    """Each row attends to its slot's dense prefix and to its own ancestors in the tree.

    A row stands at position p = dense + bits - 1. With a window it sees positions above p - window, and
    [first, first + keep_first) besides.
    """
    rows = row_masks.shape[1]
    kv_heads, head_dim = k_cache.shape[1], q.shape[-1]
    sink_rows = None if sinks is None else sinks.float().reshape(kv_heads, -1, 1)
    live = row_live.reshape(-1, rows).tolist()
    out.zero_()
    for index, (slot, dense) in enumerate(zip(slots.tolist(), dense_lens.tolist(), strict=True)):
        if slot < 0 or not any(live[index]):
            continue
        masks = [_bits(mask & (2**64 - 1)) for mask in row_masks[index].tolist()]
        stored = dense + max((m[-1] + 1 for m, alive in zip(masks, live[index], strict=True) if alive and m), default=0)
        keys, values = (_load(cache, block_table[slot], stored) for cache in (k_cache, v_cache))
        for row in range(rows):
            if not live[index][row]:
                continue
            place = index * rows + row
            order = masks[row]
            end = dense + len(order)
            k, v = keys, values
            if order and order != list(range(len(order))):
                tail = torch.tensor([dense + a for a in order], device=q.device)
                k, v = (torch.cat((x[:, :dense], x[:, tail]), dim=1) for x in (keys, values))
            low = first if window is None else max(first, end - window)
            state = _Softmax(q[place].float().reshape(kv_heads, -1, head_dim), scale)
            _attend_tiles(state, k, v, first, low, end, keep_first)
            out[place].copy_(state.finish(sink_rows).reshape(-1))


def _attend_tiles(
    state: _Softmax, keys: torch.Tensor, values: torch.Tensor, first: int, low: int, end: int, keep_first: int
) -> None:
    """Add the tiles that hold positions [low, end) and [first, first + keep_first)."""
    for start in range(0, end, TILE):
        stop = start + TILE
        if stop <= low and start >= first + keep_first:
            continue
        if first <= start and low <= start and stop <= end:
            state.add(keys[:, start:stop].contiguous(), values[:, start:stop].contiguous(), None)
            continue
        position = torch.arange(start, stop, device=keys.device)
        visible = ((position >= low) | (position < first + keep_first)) & (position >= first) & (position < end)
        tile = []
        for source in (keys, values):
            padded = source.new_zeros(source.shape[0], TILE, source.shape[2])
            part = source[:, start : min(stop, end)]
            padded[:, : part.shape[1]] = part
            tile.append(torch.where(visible[None, :, None], padded, 0))
        state.add(tile[0], tile[1], visible)


@operation("""
    read    q                 compute  [c, H, D]         row i stands at position start + i
    read    k_cache, v_cache  compute  [P, G, block, D]
    read    block_table       int32    [1, blocks]
    read    chunk             int32    [2]               start, live rows; rows past them give rubbish that nobody reads
    weight  sinks             float    [H]
    write   out               compute  [c, H * D]
""")
def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    scale: float,
    chunk_size: int | None = None,
    first: int = 0,
    window: int | None = None,
) -> None:
    """Causal attention of a chunk, or several, over the positions up to each one's own: its shape depends on where it
    starts alone.

    chunk_size  rows of a chunk; None: all are one. Fewer rows are attended to as the first of so many
    first       the first position that is seen; a row before it gives zero
    """
    start, count = chunk.tolist()
    size = chunk_size or q.shape[0]
    for begin in range(0, q.shape[0], size):
        rows, results = q[begin : begin + size], out[begin : begin + size]
        whole = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, size - len(rows)))
        attended = out.new_empty(size, out.shape[1])
        place = start + begin, count - begin
        _attend_chunk(whole, (k_cache, v_cache), block_table[0], place, (first, window), sinks, attended, scale)
        results.copy_(attended[: len(rows)])


def _attend_chunk(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor,
    place: tuple[int, int],
    span: tuple[int, int | None],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
) -> None:
    (size, heads, head_dim), kv_heads = q.shape, caches[0].shape[1]
    start, count = place
    first, window = span
    end = start + size
    keys, values = (_load(cache, table, end) for cache in caches)
    short = end - keys.shape[1]
    if short > 0:
        keys, values = (torch.nn.functional.pad(x, (0, 0, 0, short)) for x in (keys, values))
    group = heads // kv_heads
    queries = q.float().reshape(size, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    state = _Softmax(queries, scale)
    mine = torch.arange(start, end, device=q.device)
    for tile in range(0, end, 2 * TILE):
        stop = min(tile + 2 * TILE, end)
        if window is not None and stop <= start + 1 - window:
            continue
        at = torch.arange(tile, stop, device=q.device)
        visible = (at[None] <= mine[:, None]) & (at[None] >= first)
        if window is not None:
            visible &= at[None] > mine[:, None] - window
        written = ((at < start + count) & (at >= first))[None, :, None]
        state.add(
            torch.where(written, keys[:, tile:stop], 0),
            torch.where(written, values[:, tile:stop], 0),
            visible.repeat(group, 1),
        )
    sink_rows = None
    if sinks is not None:
        sink_rows = sinks.float().reshape(kv_heads, group, 1).expand(kv_heads, group, size).reshape(kv_heads, -1, 1)
    result = state.finish(sink_rows).reshape(kv_heads, group, size, head_dim)
    out.copy_(result.permute(2, 0, 1, 3).reshape(size, -1))
