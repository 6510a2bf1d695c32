"""This module has small row-wise operations: embedding, norms, residual sums, activations, concatenation."""

import math
from collections.abc import Callable

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.row_blocks import map_rows, sigmoid, tanh
from lowlat.kernels.reference.shapes import check_shape

__all__ = [
    "activation_of",
    "add",
    "cast",
    "concat_norms",
    "embed",
    "identity",
    "per_layer_gate",
    "per_layer_inputs",
    "qk_norm",
    "rms_norm",
    "scale",
    "silu_mul",
    "split_norms",
    "take_columns",
]


def _scaled_to_one(row: torch.Tensor, eps: float) -> torch.Tensor:
    row = row.float()
    return row * torch.rsqrt(row.square().mean(-1, keepdim=True) + eps)


def _normalise(row: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _scaled_to_one(row, eps) * weight.float()


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * sigmoid(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}


def activation_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation of a gate by its name. Raises ValueError for an unknown name."""
    function = ACTIVATIONS.get(name)
    if function is None:
        raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return function


@operation("""
    read    x    any  [*shape]
    write   out  any  [*shape]
""")
def identity(x: torch.Tensor, *, out: torch.Tensor) -> None:
    """Copy x to out; any shape and dtype."""
    out.copy_(x)


@operation("""
    read    x    float32  [M, W]
    write   out  float32  [M, N]
""")
def take_columns(x: torch.Tensor, *, out: torch.Tensor, first: int) -> None:
    """Copy columns `first` to `first` + N - 1 of each row."""
    out.copy_(x[:, first : first + out.shape[1]])


@operation("""
    read    tokens  int32    flat [M]
    weight  weight  float    [V, N]
    write   out     compute  [M, N]
""")
def embed(tokens: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, scale: float | None = None) -> None:
    """Gather embedding rows; a dead row (token -1) gives zero.

    scale  multiplies the rows in float32, rounded once; None: rows are copied
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
    """Compute x / rms(x) * weight in float32, rounded once."""
    map_rows(lambda row: _normalise(row, weight, eps), x, row_live, out)


@operation("""
    read    embedded, hidden  compute  [M, N]
    weight  embed_weight      float    [N]
    weight  hidden_weight     float    [N]
    read    row_live          uint8    flat [M]
    write   out               compute  [M, 2 * N]
    write   normed_hidden     compute  [M, N]      the right half, the residual if norm_before_residual is set
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
    """Compute the draft model's attention input: the normed embedding, then the normed hidden state.

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
    """Compute the RMS norm of each captured feature by itself."""
    width = x.shape[1] // len(weights)
    for index in range(len(weights)):
        part = slice(index * width, (index + 1) * width)
        weight = weights[f"weight{index}"]
        map_rows(lambda row, w=weight: _normalise(row, w, eps), x[:, part], row_live, out[:, part])  # type: ignore[misc]


@operation("""
    read    qkv       float32  [M, W]                                          queries, keys, values if given, by head
    weight  q_weight  float    [head_dim]
    weight  k_weight  float    [head_dim]                                      absent: only queries
    read    row_live  uint8    flat [M]
    write   out       float32  [M, (num_heads + 2 * num_kv_heads) * head_dim]
""")
def qk_norm(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor | None = None,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    v_norm: bool = False,
    keys_as_values: bool = False,
) -> None:
    """Compute the RMS norm of every query and key head, before RoPE (Qwen3). Either may have zero heads.

    v_norm          value heads are normed, too, without a weight (Gemma 4); else they are copied
    keys_as_values  qkv has no values; its keys are used as values
    Raises ShapeError for a width of qkv that does not fit the heads.
    """
    count = qkv.shape[0]
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    check_shape("qkv", qkv, count, queries + (1 if keys_as_values else 2) * keys)
    given = torch.cat((qkv, qkv[:, queries:]), dim=1) if keys_as_values else qkv
    out.copy_(given)
    spans = [(0, queries, q_weight), (queries, keys, k_weight), *([(queries + keys, keys, None)] if v_norm else [])]
    for start, width, weight in spans:

        def normed(row: torch.Tensor, weight: torch.Tensor | None = weight) -> torch.Tensor:
            return _scaled_to_one(row, eps) if weight is None else _normalise(row, weight, eps)

        if width:
            part = given[:, start : start + width].reshape(count, -1, head_dim)
            map_rows(normed, part, row_live, out[:, start : start + width].view(count, -1, head_dim))


@operation("""
    read    a    compute  [M, N]
    read    b    float    [M, N]
    write   out  compute  [M, N]
""")
def add(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """Add a + b in float32, rounded once to out's dtype."""
    out.copy_(a.float() + b.float())


@operation("""
    read    x       compute  [M, N]
    weight  scalar  float    [1]
    write   out     compute  [M, N]
""")
def scale(x: torch.Tensor, scalar: torch.Tensor, *, out: torch.Tensor) -> None:
    """Multiply x by one number in float32, rounded once."""
    out.copy_(x.float() * scalar.float())


@operation("""
    read    projected  float32  [M, W]     a GEMM's output, of L layers side by side
    read    embedded   compute  [M, W]
    weight  weight     float    [P]        W is L * P
    read    row_live   uint8    flat [M]   absent: all rows at once, a chunk of prefill
    write   out        compute  [M, W]
""")
def per_layer_inputs(
    projected: torch.Tensor,
    embedded: torch.Tensor,
    weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    scale: float,
    eps: float,
) -> None:
    """Compute a token's embeddings for each layer: (norm(projected * scale) + embedded) / sqrt 2, by layer.

    `projected`, its product with the scale, the norm, the sum and the result are each rounded to the compute dtype.
    Raises ShapeError if P does not divide W. Source: transformers models/gemma4.
    """
    count, width, size = *projected.shape, weight.shape[0]
    if width % size:
        raise ShapeError(f"rows of {width} numbers are no layers of {size}")
    scaled = (projected.to(out.dtype).float() * scale).to(out.dtype).view(count, -1, size)
    normed = torch.empty_like(scaled)
    map_rows(lambda row: _normalise(row, weight, eps), scaled, row_live, normed)
    summed = (normed.view(count, width).float() + embedded.float()).to(out.dtype)
    halved = (summed.float() * 2**-0.5).to(out.dtype)
    map_rows(lambda row: row, halved, row_live, out)


@operation("""
    read    gate      float32  [M, P]     a GEMM's output
    read    inputs    compute  [M, W]     of L layers side by side
    read    row_live  uint8    flat [M]   absent: all rows at once, a chunk of prefill
    write   out       compute  [M, P]
""")
def per_layer_gate(
    gate: torch.Tensor, inputs: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor, layer: int
) -> None:
    """Compute gelu(gate) * the layer's inputs; the gate is rounded to the compute dtype first, the result once.

    The layer's inputs are columns layer * P to (layer + 1) * P - 1. Raises ShapeError if there are none.
    Source: transformers models/gemma4.
    """
    size = gate.shape[1]
    own = inputs[:, layer * size : (layer + 1) * size]
    check_shape(f"inputs of layer {layer}", own, *gate.shape)
    both = torch.stack((gate.to(out.dtype).float(), own.float()), dim=1)
    map_rows(lambda row: _gelu_tanh(row[..., 0, :]) * row[..., 1, :], both, row_live, out)


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
    """Compute activation(gate) * up, of gates and ups from one GEMM.

    activation  "silu", or "gelu_tanh": GELU by its tanh formula. Raises ValueError for another name
    """
    width, function = out.shape[-1], activation_of(activation)

    def activate(row: torch.Tensor) -> torch.Tensor:
        gate, up = row[..., :width].contiguous(), row[..., width:]
        return function(gate) * up

    map_rows(activate, gate_up, row_live, out)
