"""The linear operation: blocks of rows through products with float32 accumulation."""

from collections.abc import Callable

import torch

from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK, linear_block
from lowlat.kernels.reference.gemm.packed import PackedWeight
from lowlat.kernels.reference.schema import operation
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["ROW_BLOCK", "linear", "linear_block", "packed_linear"]


@operation("""
    read    x       compute  [M, K]
    weight  weight  float    [N, K]  on a CPU best float32 already, anything else is expanded at every call
    weight  bias    float    [N]     added in float32 after the product
    write   out     float32  [M, N]
""")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    row_block: int = ROW_BLOCK,
) -> None:
    """x @ weight.T + bias in float32.

    row_block  rows a product: fixed by the program, so that a row's bits do not depend on M; a chunk of
               prefill, whose M is fixed, is one block
    Raises ShapeError on the host for shapes that do not fit.
    """
    weight = weight if x.is_cuda else weight.float()
    _by_blocks(lambda rows: linear_block(rows, weight, row_block), x, weight.shape[0], bias, out, row_block)


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    row_block: int = ROW_BLOCK,
) -> None:
    """The same as `linear`, of a packed weight; row_block is at most ROW_BLOCK. Raises ShapeError as `linear` does."""
    _by_blocks(weight.product, x, weight.shape[0], bias, out, row_block)


def _by_blocks(
    product: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    width: int,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    row_block: int,
) -> None:
    """The products of blocks of rows, and the bias."""
    check_shape("out", out, x.shape[0], width)
    for start in range(0, x.shape[0], row_block):
        part = slice(start, start + row_block)
        out[part] = product(x[part])
    if bias is not None:
        check_shape("bias", bias, width)
        out += bias.float()
