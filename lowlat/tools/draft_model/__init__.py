"""This package makes smaller EAGLE3 draft models of published ones, and random draft models for a geometry.

It uses checkpoints and text, and knows nothing of steps.
"""

from lowlat.tools.draft_model.shrink import Shrunk, shrink_draft_model

__all__ = ["Shrunk", "shrink_draft_model"]
