"""This module divides (row, expert) pairs into tiles of one expert, for grouped GEMMs."""

__all__ = ["TILE_PAIRS", "TILE_WORDS", "most_tiles", "tile_pairs_of"]

TILE_PAIRS = (16, 32, 64, 96)
TILE_WORDS = 4  # of a tile: its expert, where its pairs begin, how many they are, and nothing
SPARE = 1.5  # pairs of a tile for each that an expert has on average: of unequal ones few take a second tile


def tile_pairs_of(num_pairs: int, num_experts: int) -> int:
    """The pairs of a tile, where so many are spread over so many experts."""
    wanted = SPARE * num_pairs / num_experts
    return next((each for each in TILE_PAIRS if each >= wanted), TILE_PAIRS[-1])


def most_tiles(num_pairs: int, num_experts: int, tile_pairs: int) -> int:
    """The most tiles that there can be: full ones, and one more of each expert."""
    return min(num_pairs, num_pairs // tile_pairs + num_experts)
