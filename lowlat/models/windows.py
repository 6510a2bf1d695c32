"""Layers of a sliding window have tables of blocks whose names have its size; this module names them."""

__all__ = ["window_suffix"]


def window_suffix(window: int) -> str:
    """The ending of the names of a window's tables; those of layers that see everything have none."""
    return f".w{window}"
