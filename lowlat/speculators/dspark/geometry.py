"""The geometry of a DSpark draft model. Source: DSpark, DeepSeek, arXiv 2607.05147."""

from dataclasses import dataclass
from typing import ClassVar

from lowlat.speculators.dflash.geometry import DflashConfig

__all__ = ["DsparkConfig"]


@dataclass(frozen=True, kw_only=True)
class DsparkConfig(DflashConfig):
    """DFlash's, with a Markov head and a confidence head after the rows of a block.

    markov_rank        of the bias that a draft's logits get by the token before it; 0: no bias
    markov_gated       whether the row's state gates that token's vector
    confidence         whether each draft gets a probability of being accepted
    confidence_markov  whether that reads the token's vector, too
    """

    method: ClassVar[str] = "dspark"
    markov_rank: int
    markov_gated: bool
    confidence: bool
    confidence_markov: bool
