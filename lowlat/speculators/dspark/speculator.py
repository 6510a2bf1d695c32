"""This module has the speculator of method "dspark": one pass fills a block, and its drafts are chosen in sequence.

Source: DSpark, DeepSeek, arXiv 2607.05147; deepseek-ai/DeepSpec and vllm-project/speculators, `models/dspark`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lowlat.speculators.base import Scope
from lowlat.speculators.dflash.speculator import DflashSpeculator
from lowlat.speculators.dspark.config import parse_dspark
from lowlat.speculators.dspark.emitter import DsparkEmitter
from lowlat.speculators.dspark.geometry import DsparkConfig
from lowlat.speculators.dspark.weights import dspark_weight_plan, load_dspark

__all__ = ["DsparkSpeculator"]


@dataclass(frozen=True)
class DsparkSpeculator(DflashSpeculator):
    """Drafts with a DSpark model; prefill, context and block are DFlash's."""

    method: ClassVar[str] = DsparkConfig.method
    parse_files = staticmethod(parse_dspark)
    load_files = staticmethod(load_dspark)
    config: DsparkConfig

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """DFlash's weights, and those of the Markov head."""
        return dspark_weight_plan(self.config, dtype)

    def report(self) -> dict[str, Any]:
        """DFlash's report, the rank and kind of the Markov head, and whether there is a confidence head."""
        kind = "gated" if self.config.markov_gated else "vanilla"
        return {
            **super().report(),
            "markov_rank": self.config.markov_rank,
            "markov_head": kind if self.config.markov_rank else None,
            "confidence_head": self.config.confidence,
        }

    def emitter(self, scope: Scope) -> DsparkEmitter:
        """The emitter of the draft model's operations."""
        return DsparkEmitter(scope, self.config, scope.tables)
