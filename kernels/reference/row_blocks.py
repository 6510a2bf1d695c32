"""How the reference keeps a row's bits independent of its company.

Torch's vectorised transcendental functions and reductions treat the tail of a tensor differently from its body,
so a row's bits could depend on how many rows surround it. Here such functions see one row at a time, always of
the same shape; plain additions, multiplications and comparisons are exact at any shape. A chunk of prefill has
one fixed shape and is processed whole.
"""

from collections.abc import Callable

import torch

__all__ = ["map_rows", "sigmoid", "tanh", "without_tail"]

VECTOR = 32  # numbers that a vectorised loop takes at once, at most


def map_rows(
    function: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    row_live: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write function(rows[i]) to out[i] for each live row, zero to the dead.

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
    """The sigmoid of rows [..., N], a number's bits the same at any place and in any N.

    The tail of a vectorised loop takes another sigmoid than its body: here there is none.
    """
    return without_tail(torch.sigmoid, x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """The hyperbolic tangent of rows [..., N], as `sigmoid`."""
    return without_tail(torch.tanh, x)


def without_tail(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An elementwise function of rows [..., N], a number's bits the same at any place and in any N."""
    width = x.shape[-1]
    tail = -width % VECTOR
    return function(torch.nn.functional.pad(x, (0, tail)))[..., :width] if tail else function(x)
