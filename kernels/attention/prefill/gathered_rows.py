"""How many positions are gathered for a chunk of prefill, and where they may begin. It knows no kernel."""

__all__ = ["ALIGNMENT", "gathered_rows"]

ALIGNMENT = 128  # positions: no flash attention that torch has takes keys in larger blocks, and theirs divide it


def gathered_rows(size: int, longest: int, window: int | None) -> int:
    """The most positions that a chunk of `size` rows takes which starts below `longest`."""
    whole = longest - 1 + size
    return whole if window is None else min(whole, size + window - 1 + ALIGNMENT - 1)
