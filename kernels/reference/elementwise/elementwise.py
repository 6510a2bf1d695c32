"""Small row-wise operations: embedding, norms, residual sums, activations, concatenation."""

import math

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.row_blocks import map_rows, sigmoid, tanh

__all__ = [
    "add",
    "cast",
    "concat_norms",
    "embed",
    "identity",
    "qk_norm",
    "rms_norm",
    "silu_mul",
    "split_norms",
    "take_columns",
]


def _normalise(row: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    row = row.float()
    return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps) * weight.float()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}


@operation("""
    read    x    any  [*shape]
    write   out  any  [*shape]
""")
def identity(x: torch.Tensor, *, out: torch.Tensor) -> None:
    """A copy: out = x, of any shape and dtype."""
    out.copy_(x)


@operation("""
    read    x    float32  [M, W]
    write   out  float32  [M, N]
""")
def take_columns(x: torch.Tensor, *, out: torch.Tensor, first: int) -> None:
    """Columns `first` to `first` + N - 1 of each row."""
    out.copy_(x[:, first : first + out.shape[1]])


@operation("""
    read    tokens  int32    flat [M]
    weight  weight  float    [V, N]
    write   out     compute  [M, N]
""")
def embed(tokens: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, scale: float | None = None) -> None:
    """Gather embedding rows; a dead row (token -1) gives zero.

    scale  multiplies the rows in float32, rounded once; None: they are taken as they are
    """
    flat = tokens.reshape(-1).long()
    rows = weight[flat.clamp(min=0)]
    out.copy_(torch.where((flat >= 0)[:, None], rows if scale is None else rows.float() * scale, 0))


@operation("""
    read    x         compute  [M, N]
    weight  weight    float    [N]
    read    row_live  uint8    flat [M]  absent: all rows at once, a chunk of prefill
    write   out       compute  [M, N]
""")
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor, eps: float
) -> None:
    """x / rms(x) * weight in float32, rounded once."""
    map_rows(lambda row: _normalise(row, weight, eps), x, row_live, out)


@operation("""
    read    embedded, hidden  compute  [M, N]
    weight  embed_weight      float    [N]
    weight  hidden_weight     float    [N]
    read    row_live          uint8    flat [M]
    write   out               compute  [M, 2 * N]
    write   normed_hidden     compute  [M, N]      the right half, a residual where norm_before_residual is set
""")
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
    """The draft model's attention input: normed embedding next to normed hidden state.

    Source: EAGLE-3, arXiv 2503.01840, section 3.
    """
    width = hidden.shape[-1]
    map_rows(lambda row: _normalise(row, embed_weight, eps), embedded, row_live, out[:, :width])
    map_rows(lambda row: _normalise(row, hidden_weight, eps), hidden, row_live, out[:, width:])
    normed_hidden.copy_(out[:, width:])


@operation("""
    read    x          compute  [M, F * Ht]
    weight  weight{F}  float    [Ht]
    read    row_live   uint8    flat [M]
    write   out        compute  [M, F * Ht]
""")
def split_norms(
    x: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor, eps: float, **weights: torch.Tensor
) -> None:
    """RMS norm of each captured feature on its own."""
    width = x.shape[1] // len(weights)
    for index in range(len(weights)):
        part = slice(index * width, (index + 1) * width)
        weight = weights[f"weight{index}"]
        map_rows(lambda row, w=weight: _normalise(row, w, eps), x[:, part], row_live, out[:, part])  # type: ignore[misc]


@operation("""
    read    qkv       float32  [M, (num_heads + 2 * num_kv_heads) * head_dim]
    weight  q_weight  float    [head_dim]
    weight  k_weight  float    [head_dim]
    read    row_live  uint8    flat [M]
    write   out       float32  [M, (num_heads + 2 * num_kv_heads) * head_dim]  values pass through
""")
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
    """RMS norm of every query and key head, before RoPE (Qwen3). Either width may be zero heads."""
    count = qkv.shape[0]
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    out.copy_(qkv)
    for start, width, weight in ((0, queries, q_weight), (queries, keys, k_weight)):
        if width:
            part = qkv[:, start : start + width].reshape(count, -1, head_dim)
            target = out[:, start : start + width].view(count, -1, head_dim)
            map_rows(lambda row, w=weight: _normalise(row, w, eps), part, row_live, target)  # type: ignore[misc]


@operation("""
    read    a    compute  [M, N]
    read    b    float    [M, N]
    write   out  compute  [M, N]
""")
def add(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """a + b in float32, rounded once to out's dtype."""
    out.copy_(a.float() + b.float())


@operation("""
    read    x    float32  [M, N]
    write   out  compute  [M, N]
""")
def cast(x: torch.Tensor, *, out: torch.Tensor) -> None:
    """Round a float32 product once to the compute dtype."""
    out.copy_(x)


@operation("""
    read    gate_up   float32  [M, 2 * I]  gates first
    read    row_live  uint8    flat [M]
    write   out       compute  [M, I]
""")
def silu_mul(
    gate_up: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor, activation: str = "silu"
) -> None:
    """silu(gate) * up of a fused product, or another activation's.

    activation  "silu", or "gelu_tanh": GELU by its tanh formula. Raises ValueError for another name
    """
    width, function = out.shape[-1], ACTIVATIONS.get(activation)
    if function is None:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")

    def activate(row: torch.Tensor) -> torch.Tensor:
        gate, up = row[..., :width].contiguous(), row[..., width:]
        return function(gate) * up

    map_rows(activate, gate_up, row_live, out)
