"""This module has the geometry of a DSpark draft model. Source: DSpark, DeepSeek, arXiv 2607.05147."""

from dataclasses import dataclass
from typing import ClassVar

from lowlat.speculators.dflash.geometry import DflashConfig

__all__ = ["DsparkConfig"]


@dataclass(frozen=True, kw_only=True)
class DsparkConfig(DflashConfig):
    """DFlash's geometry, with a Markov head and a confidence head after the rows of a block.

    markov_rank        rank of the bias that the previous token adds to a draft's logits; 0: no bias
    markov_gated       whether the row's state gates the previous token's vector
    confidence         whether each draft gets an acceptance probability
    confidence_markov  whether the confidence head reads the previous token's vector, too
    """

    method: ClassVar[str] = "dspark"
    markov_rank: int
    markov_gated: bool
    confidence: bool
    confidence_markov: bool
