"""The geometry of an EAGLE3 draft model. Source: EAGLE-3, arXiv 2503.01840; SpecForge, ModelOpt, speculators."""

from dataclasses import dataclass
from typing import ClassVar

from lowlat.models.geometry import DraftConfig

__all__ = ["Eagle3Config"]


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """An EAGLE3 draft model. Its first layer reads embedding and feature side by side, each other the one before.

    final_hidden          whether the feature is the captured stream after the target's final norm; there is no fc
    norm_before_fc        whether all captured streams are normed together
    fc_norm               whether each captured stream is normed by itself
    norm_output           whether the state that is fed back is the one after the final norm
    norm_before_residual  whether the residual stream begins with the normed feature
    """

    method: ClassVar[str] = "eagle3"
    final_hidden: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
