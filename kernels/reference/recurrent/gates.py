"""This module has the row-wise operations after mixers of hybrid layers: a delta net's gated norm, and output gates.

Source: Gated Delta Networks, arXiv 2412.06464; Gated Attention, arXiv 2505.06708; Qwen3.5, transformers 5.23.
"""

import torch

from lowlat.graphs.schema import operation
from lowlat.kernels.reference.recurrent.delta_rule import sum_by_halves
from lowlat.kernels.reference.recurrent.pending import rounded_silu
from lowlat.kernels.reference.row_blocks import map_rows, sigmoid, without_tail

__all__ = ["add_gated", "delta_norm", "output_gate"]


@operation("""
    read    x         compute  [M, Hv * Dv]  the delta rule's output
    read    gates     float32  [M, W]        the GEMM before delta_conv; z is its last Hv * Dv columns
    weight  weight    float    [Dv]
    read    row_live  uint8    flat [M]      absent: all live
    write   out       compute  [M, Hv * Dv]  dead rows zero
""")
def delta_norm(
    x: torch.Tensor,
    gates: torch.Tensor,
    weight: torch.Tensor,
    row_live: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    eps: float,
) -> None:
    """Multiply the RMS norm of each head by silu of its gate z.

    z, the normed head, and the normed head times the weight are each rounded to the compute dtype. The product with
    silu(z), in float32, is rounded once.
    """
    width, dim = x.shape[1], weight.shape[0]
    both = torch.cat((x.float(), gates[:, gates.shape[1] - width :]), 1)

    def gated(row: torch.Tensor) -> torch.Tensor:
        heads, z = row.view(2, -1, dim).unbind()
        mean = sum_by_halves(heads * heads, 1) / dim
        normed = (heads * without_tail(torch.rsqrt, mean + eps)[:, None]).to(out.dtype).float()
        weighted = (normed * weight.float()).to(out.dtype).float()
        return (weighted * rounded_silu(z, out.dtype)).reshape(-1)

    map_rows(gated, both, _live(x, row_live), out)


@operation("""
    read    x         compute  [M, H * D]  attention's output
    read    gate      float32  [M, H * D]  a GEMM's output, rounded to the compute dtype first
    read    row_live  uint8    flat [M]    absent: all live
    write   out       compute  [M, H * D]  dead rows zero
""")
def output_gate(
    x: torch.Tensor, gate: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor
) -> None:
    """Compute x * sigmoid(gate); the sigmoid is rounded to the compute dtype, then the product."""
    both = torch.cat((x.float(), gate.to(out.dtype).float()), 1)

    def gated(row: torch.Tensor) -> torch.Tensor:
        value, chosen = row.chunk(2)
        share = sigmoid(chosen.contiguous()).to(out.dtype)
        return value * share.float()

    map_rows(gated, both, _live(x, row_live), out)


@operation("""
    read    a         float32  [M, N]    experts' output
    read    b         float32  [M, N]    a shared expert's output
    read    gate      float32  [M, 1]    a GEMM's output
    read    row_live  uint8    flat [M]  absent: all live
    write   out       float32  [M, N]    dead rows zero
""")
def add_gated(
    a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, row_live: torch.Tensor | None = None, *, out: torch.Tensor
) -> None:
    """Compute a + b * sigmoid(gate) in float32; product and sum are each rounded."""
    both = torch.cat((a, b, gate), 1)
    width = a.shape[1]

    def added(row: torch.Tensor) -> torch.Tensor:
        return row[:width] + row[width:-1] * sigmoid(row[-1:])

    map_rows(added, both, _live(a, row_live), out)


def _live(x: torch.Tensor, row_live: torch.Tensor | None) -> torch.Tensor:
    """Return row_live, or ones if it is absent, so that `map_rows` applies functions row by row."""
    return torch.ones(x.shape[0], dtype=torch.uint8) if row_live is None else row_live
