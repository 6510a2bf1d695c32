"""This module has the gated delta rule: each value head has a state, which decays and is corrected by each row.

S = decay S;  d = beta (v - S^T k);  S = S + k d^T;  o = S^T q. All numbers are float32. Sums over Dk are added by
halves, so that a head's bits depend neither on the number of heads nor on other rows.
Source: Gated Delta Networks, arXiv 2412.06464; Qwen3-Next and Qwen3.5, transformers 5.23.
"""

from typing import NamedTuple

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.recurrent.pending import prefill_rows, ring_places, slot_rows
from lowlat.kernels.reference.row_blocks import sigmoid, without_tail

__all__ = ["delta_rule", "prefill_delta_rule", "sum_by_halves"]

NORM_EPS = 1e-6  # for the l2 norms of queries and keys, in every model


class _Row(NamedTuple):
    """The numbers of a row: k [Hk, Dk], decay [Hv], float32; and q [Hk, Dk], v [Hv, Dv], beta [Hv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor


def sum_by_halves(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over a dimension, padded by zeros to a power of two: add its second half to the first, again and again."""
    size = 1 << (x.shape[dim] - 1).bit_length()
    x = x.movedim(dim, 0)
    if size > x.shape[0]:
        x = torch.cat((x, x.new_zeros(size - x.shape[0], *x.shape[1:])))
    while size > 1:
        size //= 2
        x = x[:size] + x[size:]
    return x[0]


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Divide heads [H, D] by their l2 norms."""
    return x * without_tail(torch.rsqrt, sum_by_halves(x * x, 1) + NORM_EPS)[:, None]


def _row(
    mixed: torch.Tensor, ba: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, extents: tuple[int, ...]
) -> _Row:
    """Compute a row's numbers from mixed [C] in the compute dtype and ba [2 Hv] float32, rounded to that dtype."""
    key_heads, key_dim, heads, value_dim = extents
    keys = key_heads * key_dim
    q, k, v = mixed.float().split((keys, keys, heads * value_dim))
    b, a = ba.to(mixed.dtype).float().chunk(2)
    beta = sigmoid(b).to(mixed.dtype).float()
    x = a + dt_bias.float()
    rest = without_tail(torch.log1p, without_tail(torch.exp, -x.abs()))
    softplus = torch.clamp(x, min=0) + rest
    decay = without_tail(torch.exp, -without_tail(torch.exp, a_log.float()) * softplus)
    query = _unit(q.view(key_heads, key_dim)) * key_dim**-0.5
    return _Row(query, _unit(k.view(key_heads, key_dim)), v.view(heads, value_dim), beta, decay)


def _decayed(state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    return state * decay[:, None, None]


def _corrected(decayed: torch.Tensor, k: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return decayed + _by_value_head(k, d)[:, :, None] * d[:, None]


def _by_value_head(x: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Repeat key heads [Hk, Dk] for value heads [Hv, Dk]; consecutive value heads share a key head."""
    return x.repeat_interleave(d.shape[0] // x.shape[0], 0)


def _step(state: torch.Tensor, row: _Row) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the state after a row, the row's correction d [Hv, Dv], and its output [Hv, Dv]."""
    decayed = _decayed(state, row.decay)
    seen = sum_by_halves(decayed * _by_value_head(row.k, row.v)[:, :, None], 1)
    d = (row.v - seen) * row.beta[:, None]
    state = _corrected(decayed, row.k, d)
    return state, d, sum_by_halves(state * _by_value_head(row.q, row.v)[:, :, None], 1)


@operation("""
    read    mixed       compute  [M, 2 * Hk * Dk + Hv * Dv]  the convolution's output: q, k, v
    read    ba          float32  [M, 2 * Hv]                 a GEMM's output: b, then a
    weight  a_log       float    [Hv]
    weight  dt_bias     float    [Hv]
    read    slots       int32    [B]                         -1 pads
    read    dense_lens  int32    [B]                         the root's position
    read    state_lens  int32    [max_B]
    read    row_live    uint8    flat [M]
    update  state       float32  [R, Hv, Dv, Dk]             S transposed
    update  pending_k   float32  [max_B, P, Hk, Dk]          and below: rings, position p's row is at p mod P
    update  pending_d   float32  [max_B, P, Hv, Dv]
    update  pending_g   float32  [max_B, P, Hv]              the decay
    write   out         compute  [M, Hv * Dv]                dead rows zero
""")
def delta_rule(
    mixed: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    slots: torch.Tensor,
    dense_lens: torch.Tensor,
    state_lens: torch.Tensor,
    row_live: torch.Tensor,
    *,
    state: torch.Tensor,
    pending_k: torch.Tensor,
    pending_d: torch.Tensor,
    pending_g: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Apply the gated delta rule to a step's rows; see `pending`.

    Each head of q and k is divided by its l2 norm, q also by sqrt(Dk). b and a are first rounded to the compute dtype;
    beta = sigmoid(b) is rounded to it, too; decay = exp(-exp(a_log) softplus(a + dt_bias)). Hv / Hk consecutive value
    heads share a key head. The output is rounded once. P is twice the most rows a slot.
    """
    extents = (*pending_k.shape[2:], *pending_d.shape[2:])
    out.zero_()
    size = pending_k.shape[1]
    for slot, rows, start, pending in slot_rows(slots, dense_lens, state_lens, row_live, size // 2):
        current = state[slot].mT
        for place in ring_places(start - pending, pending, size):
            decayed = _decayed(current, pending_g[slot, place])
            current = _corrected(decayed, pending_k[slot, place], pending_d[slot, place])
        state[slot] = current.mT
        for place, index in zip(ring_places(start, len(rows), size), rows, strict=True):
            row = _row(mixed[index], ba[index], a_log, dt_bias, extents)
            current, d, o = _step(current, row)
            pending_k[slot, place], pending_d[slot, place], pending_g[slot, place] = row.k, d, row.decay
            out[index] = o.reshape(-1)


@operation("""
    read    mixed    compute  [c, 2 * Hk * Dk + Hv * Dv]  as in `delta_rule`
    read    ba       float32  [c, 2 * Hv]
    weight  a_log    float    [Hv]
    weight  dt_bias  float    [Hv]
    read    slot       int32    [1]
    read    chunk      int32    [2]                         start, live rows
    read    snapshots  int32    [1, K]                      see `pending`; absent: there are none
    update  state      float32  [R, Hv, Dv, Dk]             S transposed
    write   out        compute  [c, Hv * Dv]                dead rows zero
""")
def prefill_delta_rule(
    mixed: torch.Tensor,
    ba: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    slot: torch.Tensor,
    chunk: torch.Tensor,
    snapshots: torch.Tensor | None = None,
    *,
    state: torch.Tensor,
    out: torch.Tensor,
    chunk_size: int | None = None,
) -> None:
    """Apply the gated delta rule to a chunk of one slot; it leaves no pending rows.

    A chunk at position 0 begins with a zero state and reads none. Others begin with the slot's state, or with a
    snapshot. chunk_size: chunks start, and snapshots are taken, at multiples of so many positions; None: of 32.
    Here each row is computed by itself, so chunk_size changes no bit. A kernel may compute the rows between two such
    multiples together.
    """
    start, count = chunk.tolist()
    begin, left = prefill_rows(slot, chunk, snapshots)
    heads, value_dim, key_dim = state.shape[1:]
    extents = ((mixed.shape[1] - heads * value_dim) // (2 * key_dim), key_dim, heads, value_dim)
    current = state[begin].mT if start else torch.zeros_like(state[begin].mT)
    out.zero_()
    for index in range(count):
        current, _, o = _step(current, _row(mixed[index], ba[index], a_log, dt_bias, extents))
        out[index] = o.reshape(-1)
        for row, after in left:
            if after == index + 1:
                state[row] = current.mT
