"""Matrix products in float32 whose rows keep their bits in any company.

On a CPU, MKL's product gives a row the same bits at every place of a block of 8 rows (tried over many shapes); it did
not for a weight of 7 x 5, so weights smaller than MIN_SIDE are padded with zeros.
"""

import torch

__all__ = ["linear", "linear_block"]

ROW_BLOCK = 8
MIN_SIDE = 64


def _pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    missing_rows, missing_columns = max(0, rows - x.shape[0]), max(0, columns - x.shape[1])
    if not missing_rows and not missing_columns:
        return x
    return torch.nn.functional.pad(x, (0, missing_columns, 0, missing_rows))


def linear_block(x: torch.Tensor, weight: torch.Tensor, row_block: int = ROW_BLOCK) -> torch.Tensor:
    """x @ weight.T for at most one block of rows: x [m, K], weight [N, K], both converted to float32 -> [m, N]."""
    rows, width = x.shape[0], weight.shape[0]
    weight = _pad(weight.float(), MIN_SIDE, MIN_SIDE)
    x = _pad(x.float(), row_block, weight.shape[1])
    return (x @ weight.T)[:rows, :width]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor, row_block: int
) -> None:
    """x @ weight.T + bias, accumulated in float32, block of rows by block of rows.

    x          [M, K]  any float dtype
    weight     [N, K]  any float dtype
    bias       [N]     or None
    out        [M, N]  float32, out
    row_block  rows of one product: 8 in a step, the whole chunk in prefill
    """
    for start in range(0, x.shape[0], row_block):
        product = linear_block(x[start : start + row_block], weight, row_block)
        out[start : start + row_block] = product if bias is None else product + bias.float()
