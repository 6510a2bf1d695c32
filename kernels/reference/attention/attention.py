"""This module computes attention over the paged cache, for the rows of a step and for a chunk of prefill.

Tiles of keys are at fixed absolute positions. Each tile's product has one fixed shape, and tiles are added in order, so
a row's bits depend on its own positions alone. Masked keys and values are replaced by zero on load. If scales are
given, the caches hold codes, see `kv_codes`.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.attention.kv_codes import dequantised_kv

__all__ = [
    "AttendedRows",
    "attend_rows",
    "attention",
    "load_kv",
    "prefill_attention",
    "refresh_attention",
    "whole_tiles",
]

TILE = 256  # keys a tile


def _rows_of(cache: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """Gather positions [0, count) of a slot from the cache, in its dtype: [G, count, D]."""
    blocks = cache[table[: -(-count // cache.shape[2])].long()].transpose(0, 1)
    return blocks.reshape(blocks.shape[0], -1, blocks.shape[-1])[:, :count]


def load_kv(
    rows: tuple[torch.Tensor, torch.Tensor], count: int, kv_scales: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Load keys and values [G, n, D] of `count` positions from the caches, as `whole_tiles` returns them.

    dtype  the compute dtype; the numbers of codes are rounded to it
    """
    if kv_scales is not None:
        rows = dequantised_kv(rows[0], kv_scales[0], dtype), dequantised_kv(rows[1], kv_scales[1], dtype)
    return whole_tiles(rows[0], count), whole_tiles(rows[1], count)


def whole_tiles(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Convert rows [G, n, D] to float32, and pad them with zeros to whole tiles of `count` positions."""
    shape = (rows.shape[0], -(-count // TILE) * TILE, rows.shape[2])
    loaded = torch.zeros(shape, dtype=torch.float32, device=rows.device)
    loaded[:, : rows.shape[1]] = rows
    return loaded


class _Softmax:
    """Online softmax over tiles, for queries [G, R, D]; everything in float32."""

    def __init__(self, queries: torch.Tensor, scale: float, softcap: float | None) -> None:
        self.queries, self.scale, self.softcap = queries, scale, softcap
        self.peak: torch.Tensor | None = None
        self.total = self.out = queries

    def add(self, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """Add one tile: keys and values [G, n, D]; hidden [n] or [R, n] bool, None if all are visible."""
        scores = torch.bmm(self.queries, keys.transpose(1, 2)).mul_(self.scale)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        peak = scores.amax(-1, keepdim=True)
        if self.peak is not None:
            peak = torch.maximum(self.peak, peak)
        safe = torch.where(torch.isinf(peak), 0, peak)
        weights = scores.sub_(safe).exp_()
        total, out = weights.sum(-1, keepdim=True), torch.bmm(weights, values)
        if self.peak is not None:
            decay = torch.exp(self.peak - safe)
            total, out = self.total * decay + total, self.out * decay + out
        self.peak, self.total, self.out = peak, total, out

    def finish(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """Return the weighted mean of values, zero without tiles; sinks [G, R, 1] are scores without a value."""
        if self.peak is None:
            return torch.zeros_like(self.queries)
        if sinks is None:
            return self.out / torch.where(self.total == 0, 1, self.total)
        peak = torch.maximum(self.peak, sinks)
        decay = torch.exp(self.peak - peak)
        return self.out * decay / (self.total * decay + torch.exp(sinks - peak))


def _bits(mask: int) -> list[int]:
    return [bit for bit in range(mask.bit_length()) if mask >> bit & 1]


@operation("""
    read    q                 compute  [B * R, H, D]
    read    k_cache, v_cache  cache    [P, G, block, D]
    read    block_table       int32    [max_B, blocks]
    read    slots             int32    [B]               -1 pads
    read    dense_lens        int32    [B]               all rows of the slot see positions [first, dense)
    read    row_live          uint8    flat [B * R]
    read    row_masks         int64    [B, R]            bit a: the row sees node a, at dense + a, itself included
    read    kv_scales         float32  [2, G]            of keys and of values, if the caches hold codes
    weight  sinks             float    [H]               one more score a head, without a value
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
    kv_scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    scale: float,
    first: int = 0,
    window: int | None = None,
    keep_first: int = 0,
    group: int | None = None,
    softcap: float | None = None,
) -> None:
    """Attend from each row to its slot's dense prefix and to its own ancestors in the tree.

    A row is at position p = dense + bits - 1, where bits counts its mask's ones. With a window it sees only positions
    above p - window, and [first, first + keep_first).

    group    all query heads of a key-value head, if q has only some of them; in kernels no bit depends on it
    softcap  c: scaled scores s become c tanh(s / c); None: they stay
    """
    rows = AttendedRows(q, slots, dense_lens, row_live, row_masks, sinks, k_cache.shape[1], group)

    def load(slot: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        stored = _rows_of(k_cache, block_table[slot], count), _rows_of(v_cache, block_table[slot], count)
        return load_kv(stored, count, kv_scales, q.dtype)

    attend_rows(rows, load, out=out, scale=scale, span=(first, window, keep_first), softcap=softcap)


class AttendedRows(NamedTuple):
    """The rows of a step, by the arguments of `attention`, and the number of key-value heads.

    group  products are made as if each key-value head had so many query heads; None: as many as it has
    """

    q: torch.Tensor
    slots: torch.Tensor
    dense_lens: torch.Tensor
    row_live: torch.Tensor
    row_masks: torch.Tensor
    sinks: torch.Tensor | None
    kv_heads: int
    group: int | None = None


def attend_rows(
    step: AttendedRows,
    load: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    *,
    out: torch.Tensor,
    scale: float,
    span: tuple[int, int | None, int] = (0, None, 0),
    softcap: float | None = None,
) -> None:
    """Compute the attention of a step's rows. `load` returns a slot's first keys and values, see `whole_tiles`.

    span  first, window and keep_first of `attention`
    """
    rows, kv_heads, head_dim = step.row_masks.shape[1], step.kv_heads, step.q.shape[-1]
    first, window, keep_first = span
    own = step.q.shape[1] // kv_heads
    missing = (0, 0, 0, max(0, (step.group or own) - own))  # products of up to three rows have other bits than larger
    sink_rows = None if step.sinks is None else pad(step.sinks.float().reshape(kv_heads, -1, 1), missing)
    live = step.row_live.reshape(-1, rows).tolist()
    out.zero_()
    for index, (slot, dense) in enumerate(zip(step.slots.tolist(), step.dense_lens.tolist(), strict=True)):
        if slot < 0 or not any(live[index]):
            continue
        masks = [_bits(mask & (2**64 - 1)) for mask in step.row_masks[index].tolist()]
        stored = dense + max((m[-1] + 1 for m, alive in zip(masks, live[index], strict=True) if alive and m), default=0)
        keys, values = load(slot, stored)
        for row in range(rows):
            if not live[index][row]:
                continue
            place = index * rows + row
            order = masks[row]
            end = dense + len(order)
            k, v = keys, values
            if order and order != list(range(len(order))):
                tail = torch.tensor([dense + a for a in order], device=step.q.device)
                k, v = keys.clone(), values.clone()
                k[:, dense:end], v[:, dense:end] = keys[:, tail], values[:, tail]
            low = first if window is None else max(first, end - window)
            state = _Softmax(pad(step.q[place].float().reshape(kv_heads, -1, head_dim), missing), scale, softcap)
            for start in range(0, end, TILE):
                if start + TILE > low or start < first + keep_first:
                    tile_k, tile_v = (x[:, start : start + TILE].contiguous() for x in (k, v))
                    _add_tile(state, tile_k, tile_v, _View(start, first, low, end, keep_first), end == stored)
            out[place].copy_(state.finish(sink_rows)[:, :own].reshape(-1))


class _View(NamedTuple):
    """The positions of the tile at `start` to which a row attends: [low, end) and [first, first + keep_first)."""

    start: int
    first: int
    low: int
    end: int
    keep_first: int


def _add_tile(state: _Softmax, keys: torch.Tensor, values: torch.Tensor, view: _View, zero_from_end: bool) -> None:
    """Add the tile at view.start. zero_from_end: keys and values are already zero from view.end on."""
    from_start = max(view.first, view.low) <= view.start
    if from_start and view.start + TILE <= view.end:
        state.add(keys, values, None)
        return
    hidden = _hidden(view, keys.device)
    if not (from_start and zero_from_end):
        keys, values = (x.masked_fill(hidden[:, None], 0) for x in (keys, values))
    state.add(keys, values, hidden)


@lru_cache(maxsize=64)  # all layers of a step need the same few
def _hidden(view: _View, device: torch.device) -> torch.Tensor:
    """Return which positions of a tile are masked, [TILE] bool."""
    position = torch.arange(view.start, view.start + TILE, device=device)
    visible = (position >= view.low) | (position < view.first + view.keep_first)
    return ~(visible & (position >= view.first) & (position < view.end))


@operation("""
    read    q                 compute  [c, H, D]         row i stands at position start + i
    read    k_cache, v_cache  cache    [P, G, block, D]
    read    block_table       int32    [1, blocks]
    read    chunk             int32    [2]               start, live rows; rows past them give rubbish that nobody reads
    read    kv_scales         float32  [2, G]            as in `attention`
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
    kv_scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    scale: float,
    chunk_size: int | None = None,
    first: int = 0,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Compute the causal attention of one chunk or several, each over the positions up to its own.

    The shape of a chunk's products depends only on where it starts.

    chunk_size  rows of a chunk; None: all rows are one chunk. Fewer rows are computed as the first rows of a chunk
    first       the first visible position; a row before it gives zero
    softcap     as in `attention`
    """
    start, count = chunk.tolist()
    size = chunk_size or q.shape[0]
    for begin in range(0, q.shape[0], size):
        rows, results = q[begin : begin + size], out[begin : begin + size]
        whole = pad(rows, (0, 0, 0, 0, 0, size - len(rows)))
        attended = out.new_empty(size, out.shape[1])
        place = start + begin, count - begin
        _attend_chunk(
            whole,
            (k_cache, v_cache, kv_scales),
            block_table[0],
            place,
            (first, window),
            sinks,
            attended,
            (scale, softcap),
        )
        results.copy_(attended[: len(rows)])


@operation("""
    read    q                 compute  [c, H, D]         row i stands at position start + i
    read    k_cache, v_cache  cache    [P, G, block, D]
    read    block_table       int32    [1, blocks]
    read    chunk             int32    [2]               start, live rows; rows past them give rubbish that nobody reads
    read    kv_scales         float32  [2, G]            as in `attention`
    weight  sinks             float    [H]
    write   out               compute  [c, H * D]
""")
def refresh_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    chunk: torch.Tensor,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    scale: float,
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> None:
    """Compute `prefill_attention` of few rows far after a text's start.

    An executor may split the positions before them and add the splits, so its rounding may differ from a prompt's rows.
    """
    prefill_attention(
        q,
        k_cache,
        v_cache,
        block_table,
        chunk,
        sinks,
        kv_scales,
        out=out,
        scale=scale,
        chunk_size=chunk_size,
        softcap=softcap,
    )


def _attend_chunk(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    table: torch.Tensor,
    place: tuple[int, int],
    span: tuple[int, int | None],
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    scores: tuple[float, float | None],
) -> None:
    (size, heads, head_dim), kv_heads = q.shape, caches[0].shape[1]
    start, count = place
    first, window = span
    end = start + size
    stored = _rows_of(caches[0], table, end), _rows_of(caches[1], table, end)
    keys, values = load_kv(stored, end, caches[2], q.dtype)
    group = heads // kv_heads
    queries = q.float().reshape(size, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    state = _Softmax(queries, *scores)
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
            ~visible.repeat(group, 1),
        )
    sink_rows = None
    if sinks is not None:
        sink_rows = sinks.float().reshape(kv_heads, group, 1).expand(kv_heads, group, size).reshape(kv_heads, -1, 1)
    result = state.finish(sink_rows).reshape(kv_heads, group, size, head_dim)
    out.copy_(result.permute(2, 0, 1, 3).reshape(size, -1))
