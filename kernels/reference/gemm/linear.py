"""The linear operation: blocks of rows through GEMMs with float32 accumulation."""

import itertools

import torch

from lowlat.errors import ShapeError
from lowlat.graphs.schema import operation
from lowlat.kernels.reference.collectives.cuts import bounds, tree_sum
from lowlat.kernels.reference.gemm.coded_rows import code_rows
from lowlat.kernels.reference.gemm.linear_block import ROW_BLOCK, linear_block
from lowlat.kernels.reference.gemm.packed import PackedWeight
from lowlat.kernels.reference.row_blocks import tanh
from lowlat.kernels.reference.shapes import check_shape

__all__ = ["ROW_BLOCK", "linear", "linear_block", "narrow_linear", "packed_linear"]


@operation("""
    read    x       compute  [M, K]
    weight  weight  float    [N, K]  on a CPU preferably float32: other dtypes are converted at every call
    weight  bias    float    [N]     added in float32 after the GEMM
    write   out     float32  [M, N]
""")
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    row_block: int = ROW_BLOCK,
    num_parts: int = 1,
    unit: int = 1,
    softcap: float | None = None,
    activations: str | None = None,
) -> None:
    """Compute x @ weight.T + bias in float32.

    row_block  rows a GEMM. The program fixes it, so that a row's bits do not depend on M; a chunk of prefill, whose M
               is fixed, is one block
    num_parts  parts of K, cut in whole units by `collectives.cuts.bounds`. Each is summed by itself, the bias is added
               to the first, and `collectives.cuts.tree_sum` adds them. If it is given, even as 1, kernels sum in that
               order, too, so that a part has the same bits on any rank
    softcap    c: results r become c tanh(r / c); None: they stay
    activations  "fp8": rows are rounded to e4m3 codes, and sums of codes are multiplied by the row's scale, see
               `code_rows`; K then has one part. None: rows are not rounded
    Raises ShapeError on the host for shapes that do not fit, another kind of activations, or parts of coded rows.
    """
    weight = weight if x.is_cuda else weight.float()
    check_shape("out", out, x.shape[0], weight.shape[0])
    if activations is not None:
        if activations != "fp8" or num_parts != 1:
            raise ShapeError(f"activations are 'fp8' or None, in one part of K; got {activations!r} in {num_parts}")
        codes, scales = code_rows(x)
        _multiply(codes, weight.float(), out, row_block)
        out *= scales
        _finish(bias, softcap, out)
        return
    if num_parts == 1:
        _multiply(x, weight, out, row_block)
        _finish(bias, softcap, out)
        return
    ends = bounds(x.shape[1], num_parts, unit)
    sums = []
    for start, stop in itertools.pairwise(ends):
        sums.append(torch.empty_like(out))
        _multiply(x[:, start:stop], weight[:, start:stop].contiguous(), sums[-1], row_block)
    _finish(bias, None, sums[0])
    out.copy_(tree_sum(sums))
    _finish(None, softcap, out)


@operation("""
    read    x       compute  [M, K]
    weight  weight  float    [N, K]
    write   out     float32  [M, N]
""")
def narrow_linear(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, row_block: int = ROW_BLOCK) -> None:
    """Compute `linear` of a weight with few rows; a step runs it in the launch of the norm before it.

    Raises ShapeError as `linear` does.
    """
    linear(x, weight, out=out, row_block=row_block)


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, row_block: int) -> None:
    for start in range(0, x.shape[0], row_block):
        part = slice(start, start + row_block)
        out[part] = linear_block(x[part], weight, row_block)


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    row_block: int = ROW_BLOCK,
    softcap: float | None = None,
) -> None:
    """Compute `linear` of a packed weight, in blocks of ROW_BLOCK rows. Raises ShapeError as `linear` does."""
    check_shape("out", out, x.shape[0], weight.shape[0])
    weight.multiply(x, out)
    _finish(bias, softcap, out)


def _finish(bias: torch.Tensor | None, softcap: float | None, out: torch.Tensor) -> None:
    if bias is not None:
        check_shape("bias", bias, out.shape[1])
        out += bias.float()
    if softcap is not None:
        out.copy_(tanh(out / softcap) * softcap)
