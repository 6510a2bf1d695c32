"""Tools that make one EAGLE3 head of another. They know checkpoints and text, and neither devices nor steps."""

from lowlat.heads.counts import TokenCounts, count_text, count_token_ids
from lowlat.heads.shrink import Shrunk, shrink_head

__all__ = ["Shrunk", "TokenCounts", "count_text", "count_token_ids", "shrink_head"]
