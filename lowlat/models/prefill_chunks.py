"""This module decides how many chunks of a prompt should run at once, depending on the target.

Rows that run together read the weights once. For a dense layer 2,048 rows are enough. An expert gets a share of the
rows. Below some 256 rows, decoding its weights takes longer than multiplying by them (bench/notes/prompts.md). A draft
model runs the same rows as its target and has few layers, so the target decides.
"""

from lowlat.models.geometry import ModelConfig
from lowlat.options.runtime import MAX_PREFILL_CHUNKS

__all__ = ["most_prefill_chunks", "prefill_positions"]

POSITIONS = (2048, 4096, 8192)
PAIRS = 256  # rows that an expert should get


def prefill_positions(config: ModelConfig) -> int:
    """The number of a prompt's positions that should run at once.

    It is the first of POSITIONS with which each expert gets PAIRS rows on average, else the last; for a target without
    experts it is the first.
    """
    experts = {layer.experts for layer in config.layers if layer.experts is not None}
    shares = [each.num_experts_per_token / each.num_experts for each in experts]
    enough = (positions for positions in POSITIONS if positions * min(shares, default=1.0) >= PAIRS)
    return next(enough, POSITIONS[-1])


def most_prefill_chunks(config: ModelConfig, prefill_chunk: int, asked: int | None) -> int:
    """The most chunks of `prefill_chunk` positions that run at once; a short context may have fewer.

    config  the whole target, not a rank's part of it
    asked   `RuntimeConfig.max_prefill_chunks`; None: as many as `prefill_positions` has
    """
    if asked is not None:
        return asked
    return min(max(prefill_positions(config) // prefill_chunk, 1), MAX_PREFILL_CHUNKS)
