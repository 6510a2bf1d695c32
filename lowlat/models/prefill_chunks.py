"""This module says how many chunks of a prompt are worth reading at once, by what the target is.

Rows that run together read the weights once. Of a dense layer 2,048 rows are enough. An expert gets a share of the
rows, and until it has some 256 of them decoding its weights takes longer than multiplying by them
(bench/notes/prompts.md). A draft model reads the rows that its target does and has few layers: the target decides.
"""

from lowlat.models.geometry import ModelConfig
from lowlat.options.runtime import MAX_PREFILL_CHUNKS

__all__ = ["most_prefill_chunks", "prefill_positions"]

POSITIONS = (2048, 4096, 8192)
PAIRS = 256  # of an expert and a row


def prefill_positions(config: ModelConfig) -> int:
    """Positions of a prompt that are worth reading at once: the fewest of POSITIONS of which each expert gets PAIRS on
    average, or the most; the fewest of a target without experts."""
    experts = {layer.experts for layer in config.layers if layer.experts is not None}
    shares = [each.num_experts_per_token / each.num_experts for each in experts]
    enough = (positions for positions in POSITIONS if positions * min(shares, default=1.0) >= PAIRS)
    return next(enough, POSITIONS[-1])


def most_prefill_chunks(config: ModelConfig, prefill_chunk: int, asked: int | None) -> int:
    """Chunks of `prefill_chunk` positions that run at once, at most, where no context has fewer.

    config  the whole target, not a rank's part of it
    asked   `RuntimeConfig.max_prefill_chunks`; None: as many as have the positions that the target is worth
    """
    if asked is not None:
        return asked
    return min(max(prefill_positions(config) // prefill_chunk, 1), MAX_PREFILL_CHUNKS)
