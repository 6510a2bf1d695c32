"""This module has rotary embedding: it splits a GEMM's output into queries, keys, values, and rotates the first two."""

import torch

from lowlat.graphs.schema import operation

__all__ = ["rope"]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    pairs = cos.shape[-1]
    low, high, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


@operation("""
    read    qkv        float32  [M, (H + K + V) * D]  only those of q, k, v that are written, in this order
    read    positions  int32    flat [M]              below C; dead rows hold 0
    read    cos, sin   float32  [C, R]                R at most D / 2: a head's first 2 R dimensions are rotated
    write   q          compute  [M, H, D]
    write   k          compute  [M, K, D]
    write   v          compute  [M, V, D]
""")
def rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> None:
    """Rotate queries and keys by their positions.

    Dimension i is paired with dimension i + R (Hugging Face's order); values, and dimensions from 2 R on, are copied.
    """
    at = positions.reshape(-1).long()
    parts = [part for part in (q, k, v) if part is not None]
    heads = qkv.reshape(qkv.shape[0], -1, parts[0].shape[2])
    turning = sum(part.shape[1] for part in (q, k) if part is not None)
    turned = _rotate(heads[:, :turning], cos[at][:, None], sin[at][:, None])
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        part.copy_(turned[:, start:stop] if stop <= turning else heads[:, start:stop])
        start = stop
