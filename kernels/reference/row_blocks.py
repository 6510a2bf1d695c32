"""This module applies functions row by row, so that a row's bits do not depend on other rows.

Torch's vectorised transcendental functions and reductions treat the tail of a tensor differently from its body, so a
row's bits could depend on the number of rows. Here such functions get one row at a time, always of the same shape.
Plain additions, multiplications and comparisons give the same bits at any shape. A chunk of prefill has one fixed
shape and is processed whole.
"""

from collections.abc import Callable

import torch

__all__ = ["map_rows", "sigmoid", "tanh", "without_tail"]

VECTOR = 32  # the most numbers that a vectorised loop takes at once


def map_rows(
    function: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    row_live: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write function(rows[i]) to out[i] for each live row, and zero for dead rows.

    rows      [M, ...]  input
    row_live  [M]       uint8; None: all rows at once (a chunk of fixed shape)
    out       [M, ...]  out, converted to its dtype
    """
    if row_live is None:
        out.copy_(function(rows))
        return
    for index, live in enumerate(row_live.reshape(-1).tolist()):
        if live:
            out[index].copy_(function(rows[index]))
        else:
            out[index].zero_()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid of rows [..., N]; a number's bits depend neither on its place nor on N.

    Torch's vectorised loop computes its tail by another sigmoid than its body. Here there is no tail.
    """
    return without_tail(torch.sigmoid, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the hyperbolic tangent of rows [..., N], in the way of `sigmoid`."""
    return without_tail(torch.tanh, x)


def without_tail(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to rows [..., N]; a number's bits depend neither on its place nor on N."""
    width = x.shape[-1]
    tail = -width % VECTOR
    return function(torch.nn.functional.pad(x, (0, tail)))[..., :width] if tail else function(x)
