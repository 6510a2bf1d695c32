"""This module checks on the host that an operation's arrays fit each other, and lists the live rows."""

import torch

from lowlat.errors import ShapeError

__all__ = ["check_shape", "live_rows", "rows_of_slots"]


def check_shape(name: str, tensor: torch.Tensor, *expected: int) -> None:
    """Raise ShapeError unless the tensor has exactly this shape."""
    if tuple(tensor.shape) != expected:
        raise ShapeError(f"{name} must have shape {list(expected)}, got {list(tensor.shape)}")


def rows_of_slots(x: torch.Tensor, commit_lens: torch.Tensor) -> int:
    """Return R, the number of rows of each slot.

    x            [B * R, W]
    commit_lens  [B]  int32
    Raises ShapeError if there is no slot, or if B does not divide the number of rows.
    """
    batch, count = commit_lens.shape[0], x.shape[0]
    if not batch:
        raise ShapeError(f"commit_lens must be of one slot or more, got shape {list(commit_lens.shape)}")
    if count % batch:
        raise ShapeError(f"x must have as many rows for each of {batch} slots, got shape {list(x.shape)}")
    return count // batch


def live_rows(row_live: torch.Tensor | None, num_rows: int) -> list[bool]:
    """List for each of M rows whether it is live.

    row_live  [M] or [B, T]  uint8; None: all rows are live
    Raises ShapeError unless there are `num_rows` entries.
    """
    if row_live is None:
        return [True] * num_rows
    if row_live.numel() != num_rows:
        raise ShapeError(f"row_live must have {num_rows} entries, got shape {list(row_live.shape)}")
    return [live != 0 for live in row_live.reshape(-1).tolist()]
