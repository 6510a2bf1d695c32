"""Host-side checks that the arrays handed to an operation fit each other, and the rows that are live."""

import torch

from lowlat.errors import ShapeError

__all__ = ["check_shape", "live_rows"]


def check_shape(name: str, tensor: torch.Tensor, *expected: int) -> None:
    """Raise ShapeError unless the tensor has exactly this shape."""
    if tuple(tensor.shape) != expected:
        raise ShapeError(f"{name} must have shape {list(expected)}, got {list(tensor.shape)}")


def live_rows(row_live: torch.Tensor | None, num_rows: int) -> list[bool]:
    """Whether each of M rows is live; None: all are.

    row_live  [M] or [B, T]  uint8
    Raises ShapeError unless there are `num_rows` entries.
    """
    if row_live is None:
        return [True] * num_rows
    if row_live.numel() != num_rows:
        raise ShapeError(f"row_live must have {num_rows} entries, got shape {list(row_live.shape)}")
    return [live != 0 for live in row_live.reshape(-1).tolist()]
