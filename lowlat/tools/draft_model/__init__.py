"""Tools that make one EAGLE3 draft model of another, or random ones for a geometry.

They know checkpoints and text, and no steps.
"""

from lowlat.tools.draft_model.counts import TokenCounts, count_text, count_token_ids
from lowlat.tools.draft_model.shrink import Shrunk, shrink_draft_model

__all__ = ["Shrunk", "TokenCounts", "count_text", "count_token_ids", "shrink_draft_model"]
