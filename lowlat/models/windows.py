"""This module names the block tables of layers with a sliding window: the names end with the window's size."""

__all__ = ["window_suffix"]


def window_suffix(window: int) -> str:
    """The suffix of the names of a window's tables; tables of layers with full attention have none."""
    return f".w{window}"
