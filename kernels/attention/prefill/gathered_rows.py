"""This module says how positions are gathered for a chunk of prefill: their number, starts, and the tiles' layout."""

__all__ = ["ALIGNMENT", "HALF", "gathered_rows", "tile_positions", "tiles_shape"]

ALIGNMENT = 128  # positions: no flash attention that torch has takes keys in larger blocks, and theirs divide it
HALF = 64  # columns of a half of a tile
SLIM = 128  # numbers of a head whose tiles have ALIGNMENT positions


def gathered_rows(size: int, longest: int, window: int | None) -> int:
    """The most positions that a chunk of `size` rows takes which starts below `longest`."""
    whole = longest - 1 + size
    return whole if window is None else min(whole, size + window - 1 + ALIGNMENT - 1)


def tile_positions(dim: int) -> int:
    """Positions of a tile: as many as leave a warpgroup registers for its sums, and divide ALIGNMENT."""
    return ALIGNMENT if dim <= SLIM else ALIGNMENT // 2


def tiles_shape(num_rows: int, num_heads: int, dim: int) -> tuple[int, ...]:
    """The shape of keys or values of so many positions, up to a multiple of ALIGNMENT: [G, tiles, D / 64, n, 64].

    n is `tile_positions`.
    """
    tile = tile_positions(dim)
    return (num_heads, -(-num_rows // ALIGNMENT) * (ALIGNMENT // tile), dim // HALF, tile, HALF)
