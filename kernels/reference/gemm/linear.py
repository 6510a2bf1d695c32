"""The linear operation: blocks of rows, or packed rows, through products with float32 accumulation."""

import torch

from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK, linear_block
from lowlat.kernels.reference.gemm.packed import PackedWeight
from lowlat.kernels.reference.schema import operation
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["ROW_BLOCK", "linear", "linear_block"]


@operation("""
    read    x       compute  [M, K]
    weight  weight  float    [N, K]  on a CPU best float32 already, anything else is expanded at every call
    weight  bias    float    [N]     added in float32 after the product
    write   out     float32  [M, N]
""")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    row_block: int = ROW_BLOCK,
) -> None:
    """x @ weight.T + bias in float32.

    weight     packed for blocks of ROW_BLOCK rows alone
    row_block  rows a product: fixed by the program, so that a row's bits do not depend on M; a chunk of
               prefill, whose M is fixed, is one block
    Raises ShapeError on the host for shapes that do not fit.
    """
    check_shape("out", out, x.shape[0], weight.shape[0])
    if isinstance(weight, torch.Tensor) and not x.is_cuda:
        weight = weight.float()
    for start in range(0, x.shape[0], row_block):
        part = slice(start, start + row_block)
        rows = x[part]
        out[part] = weight.product(rows) if isinstance(weight, PackedWeight) else linear_block(rows, weight, row_block)
    if bias is not None:
        check_shape("bias", bias, weight.shape[0])
        out += bias.float()
