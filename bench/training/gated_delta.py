"""The gated delta rule over whole rows by chunks, for training.

Inside a chunk the updates are one triangular system; between chunks a state is carried. Equal to the recurrence but for
rounding.

Source: Gated Delta Networks, arXiv 2412.06464, section 3; the WY form, arXiv 2406.06484.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["chunked_delta_rule", "unit_lower_inverse"]

SMALL = 8  # blocks up to so many rows are multiplied element by element


class _UnitLowerInverse(torch.autograd.Function):
    """(I + A)^-1 of strictly lower triangular A [.., C, C], C a power of two."""

    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower).contiguous()
        half = 1
        while half < size:  # of both halves of each block on the diagonal the inverses are there
            source, made = (_diagonal_blocks(each, 2 * half) for each in (lower, inverse))
            first, second = made[..., :half, :half], made[..., half:, half:]
            made[..., half:, :half] = -_product(_product(second, source[..., half:, :half]), first)
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        gradient: Tensor = turned @ gradients[0] @ turned
        return -gradient.tril(-1)


def _diagonal_blocks(matrices: Tensor, size: int) -> Tensor:
    """A view of the blocks on the diagonal, [.., C / size, size, size]."""
    count = matrices.shape[-1] // size
    tiles = matrices.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return torch.diagonal(tiles, dim1=-4, dim2=-2).movedim(-1, -3)


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[-1] > SMALL:
        return left @ right
    return (left[..., :, :, None] * right[..., None, :, :]).sum(-2)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Invert I + A for strictly lower triangular A [.., C, C], float32, C a power of two."""
    result: Tensor = _UnitLowerInverse.apply(lower)  # type: ignore[no-untyped-call]
    return result


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The output that each row reads of its state, [rows, length, H, Dv] float32.

    q, k   [rows, length, H, Dk] float32  normed, queries scaled
    v      [rows, length, H, Dv] float32
    g      [rows, length, H]     float32  logarithms of decays, at most 0
    beta   [rows, length, H]     float32  shares of the update, 0 to 1
    chunk  rows of one triangular system, a power of two
    """
    rows, length, heads = g.shape
    pad = -length % chunk

    def cut(x: Tensor) -> Tensor:
        """[rows * H, chunks, C, ..]"""
        x = functional.pad(x, (*((0, 0) * (x.ndim - 2)), 0, pad)).transpose(1, 2)
        return x.reshape(rows * heads, -1, chunk, *x.shape[3:])

    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g, beta = map(cut, (q, k, v, g, beta))
        decay = g.cumsum(-1)
        upper = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu(1)
        between = (decay[..., :, None] - decay[..., None, :]).masked_fill(upper, float("-inf")).exp()
        keys = k * beta[..., None]
        solved = unit_lower_inverse((keys @ k.transpose(-1, -2) * between).tril(-1))
        since = decay.exp()[..., None]
        updates, read = solved @ (v * beta[..., None]), solved @ (keys * since)
        within = q @ k.transpose(-1, -2) * between
        q, k = q * since, k * (decay[..., -1:] - decay).exp()[..., None]
        whole = decay[..., -1].exp()[..., None, None]
        state = v.new_zeros(rows * heads, k.shape[-1], v.shape[-1])
        outputs = []
        for number in range(k.shape[1]):
            new = torch.baddbmm(updates[:, number], read[:, number], state, alpha=-1)
            outputs.append(torch.baddbmm(q[:, number] @ state, within[:, number], new))
            state = torch.baddbmm(state * whole[:, number], k[:, number].transpose(-1, -2), new)
        out = torch.cat(outputs, dim=1).view(rows, heads, length + pad, -1)
    return out[:, :, :length].transpose(1, 2)
