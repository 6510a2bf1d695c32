"""This module says how positions are gathered for a chunk of prefill: their number, starts, and the tiles' layout."""

__all__ = ["ALIGNMENT", "HALF", "gathered_rows", "tile_positions", "tiles_shape"]

ALIGNMENT = 128  # positions: torch's flash attentions take keys in blocks of at most so many, which divide it
HALF = 64  # columns of a half of a tile
SLIM = 128  # numbers of a head whose tiles have ALIGNMENT positions


def gathered_rows(size: int, longest: int, window: int | None) -> int:
    """Return the most positions that a chunk of `size` rows reads if it starts below `longest`."""
    whole = longest - 1 + size
    return whole if window is None else min(whole, size + window - 1 + ALIGNMENT - 1)


def tile_positions(dim: int) -> int:
    """Return the positions of a tile; they divide ALIGNMENT, and leave a warpgroup registers for its sums."""
    return ALIGNMENT if dim <= SLIM else ALIGNMENT // 2


def tiles_shape(num_rows: int, num_heads: int, dim: int) -> tuple[int, ...]:
    """Return the shape of keys or values, [G, tiles, D / 64, n, 64], for `num_rows` positions.

    Positions are rounded up to a multiple of ALIGNMENT.
    n is `tile_positions`.
    """
    tile = tile_positions(dim)
    return (num_heads, -(-num_rows // ALIGNMENT) * (ALIGNMENT // tile), dim // HALF, tile, HALF)
