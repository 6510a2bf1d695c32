"""How the tables of blocks of layers of a sliding window are called: by its size."""

__all__ = ["window_suffix"]


def window_suffix(window: int) -> str:
    """The ending of the names of a window's tables; those of layers that see everything have none."""
    return f".w{window}"
