"""This package makes one EAGLE3 draft model of another, or random ones for a geometry.

They know checkpoints and text, and no steps.
"""

from lowlat.tools.draft_model.shrink import Shrunk, shrink_draft_model

__all__ = ["Shrunk", "shrink_draft_model"]
