"""Small row-wise operations: embedding, norms, residual sums, activations, concatenation."""

import torch

from lowlat.kernels.reference.row_blocks import map_rows

__all__ = ["add", "cast", "concat_norms", "embed", "qk_norm", "rms_norm", "silu_mul", "split_norms"]


def _normalise(row: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    row = row.float()
    return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) * weight.float()


def embed(tokens: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
    """Gather embedding rows; a dead row (token -1) gives zero.

    tokens  [B, T] or [M]  int32
    weight  [V, N]         any float dtype
    out     [M, N]         out, compute dtype
    """
    flat = tokens.reshape(-1).long()
    out.copy_(torch.where((flat >= 0)[:, None], weight[flat.clamp(min=0)], 0))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor, eps: float
) -> None:
    """x / rms(x) * weight in float32, rounded once.

    x [M, N], weight [N], row_live [M] uint8 or None, out [M, N] out.
    """
    map_rows(lambda row: _normalise(row, weight, eps), x, row_live, out)


def concat_norms(
    embedded: torch.Tensor,
    hidden: torch.Tensor,
    embed_weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    normed_hidden: torch.Tensor,
    eps: float,
) -> None:
    """The head's attention input: normed embedding beside normed hidden state.

    embedded, hidden  [M, N]   compute dtype
    out               [M, 2N]  out
    normed_hidden     [M, N]   out: the right half, the residual of heads with norm_before_residual
    Source: EAGLE-3, arXiv 2503.01840, section 3.
    """
    width = hidden.shape[-1]
    map_rows(lambda row: _normalise(row, embed_weight, eps), embedded, row_live, out[:, :width])
    map_rows(lambda row: _normalise(row, hidden_weight, eps), hidden, row_live, out[:, width:])
    normed_hidden.copy_(out[:, width:])


def split_norms(
    x: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor, eps: float, **weights: torch.Tensor
) -> None:
    """RMS norm of each captured feature on its own: x, out [M, F * Ht], weight0.. [Ht]."""
    width = x.shape[1] // len(weights)
    for index in range(len(weights)):
        part = slice(index * width, (index + 1) * width)
        weight = weights[f"weight{index}"]
        map_rows(lambda row, w=weight: _normalise(row, w, eps), x[:, part], row_live, out[:, part])  # type: ignore[misc]


def qk_norm(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """RMS norm of every query and key head, before RoPE (Qwen3). Either width may be zero heads.

    qkv  [M, (H + 2G) * D]  float32; out the same shape: values pass through
    """
    count = qkv.shape[0]
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    out.copy_(qkv)
    for start, width, weight in ((0, queries, q_weight), (queries, keys, k_weight)):
        if width:
            part = qkv[:, start : start + width].reshape(count, -1, head_dim)
            target = out[:, start : start + width].view(count, -1, head_dim)
            map_rows(lambda row, w=weight: _normalise(row, w, eps), part, row_live, target)  # type: ignore[misc]


def add(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """a + b in float32, rounded once to out's dtype; all [M, N]."""
    out.copy_(a.float() + b.float())


def cast(x: torch.Tensor, *, out: torch.Tensor) -> None:
    """Round a float32 product once to the compute dtype: x [M, N] -> out [M, N] out."""
    out.copy_(x)


def silu_mul(gate_up: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor) -> None:
    """silu(gate) * up of a fused product.

    gate_up  [M, 2I]  float32, gates first
    out      [M, I]   out, compute dtype
    """
    width = out.shape[-1]

    def activate(row: torch.Tensor) -> torch.Tensor:
        gate, up = row[..., :width].contiguous(), row[..., width:]
        return gate * torch.sigmoid(gate) * up

    map_rows(activate, gate_up, row_live, out)
