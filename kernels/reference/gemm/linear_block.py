"""This module computes GEMMs with float32 accumulation whose row bits depend on the row and the weight alone.

Matrix libraries choose another kernel, and so another order of accumulation, for another number of rows. For narrow
weights the order even depends on the row's place. Measured with MKL in torch 2.13 on an AVX-512 processor, blocks of 8
rows: a row's bits change with its place for widths 2 to 11 (three matrices in four), never from 12 up. So rows are
multiplied in blocks of one fixed size, padded with zero rows. Columns past the last multiple of 16, and all columns of
a weight with fewer than 64, go through a product of their own that is padded to 64 columns.
"""

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["ROW_BLOCK", "linear_block"]

ROW_BLOCK = 8
WIDTH_STEP = 16
MIN_WIDTH = 64


def _product(block: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if block.is_cuda and block.dtype == weight.dtype and block.dtype != torch.float32:
        return torch.mm(block, weight.t(), out_dtype=torch.float32)
    return block.float() @ weight.float().t()


def linear_block(x: torch.Tensor, weight: torch.Tensor, row_block: int = ROW_BLOCK) -> torch.Tensor:
    """Compute x @ weight.T for at most `row_block` rows, as if there were exactly `row_block`.

    x       [m, K]  any float dtype, m <= row_block
    weight  [N, K]  any float dtype
    Returns [m, N] float32: accumulated in float32; on CUDA equal 16-bit dtypes are multiplied natively.
    Raises ShapeError for more rows than the block has.
    """
    rows, depth = x.shape
    width = weight.shape[0]
    if rows > row_block:
        raise ShapeError(f"linear_block takes at most {row_block} rows (row_block), got {rows}")
    check_shape("weight", weight, width, depth)
    block = x.new_zeros(row_block, depth)
    block[:rows] = x
    even = width - width % WIDTH_STEP if width >= MIN_WIDTH else 0
    if even == width:
        return _product(block, weight)[:rows]
    out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    if even:
        out[:, :even] = _product(block, weight[:even])[:rows]
    tail = weight.new_zeros(MIN_WIDTH, depth)
    tail[: width - even] = weight[even:]
    out[:, even:] = _product(block, tail)[:rows, : width - even]
    return out
