"""This module has the speculator of method "peagle": an EAGLE3 draft model that makes all drafts in one pass.

Source: P-EAGLE (Amazon, 2026), as vllm-project/speculators' `models/peagle` trains it and vLLM runs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, StepScope
from lowlat.speculators.eagle3.config import DraftKind
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.peagle.block import MASK_STATE, BlockDrafter
from lowlat.speculators.peagle.config import PEAGLE
from lowlat.speculators.peagle.geometry import PeagleConfig
from lowlat.speculators.peagle.mask import mask_state

__all__ = ["PeagleSpeculator"]


@dataclass(frozen=True)
class PeagleSpeculator(Eagle3Speculator):
    """Drafts with a P-EAGLE model; prefill, state and steps without drafts are EAGLE3's."""

    method: ClassVar[str] = PeagleConfig.method
    kind: ClassVar[DraftKind] = PEAGLE

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """Load the draft model with its weights, and the state that replaces unknown features. Raises ConfigError."""
        found = super().load(options, target, directory)
        if found.directory is None or not isinstance(found.speculator, cls):
            raise ValueError("a P-EAGLE draft model is read from a directory")
        state = mask_state(found.directory, found.speculator.config, found.weights)
        return replace(found, weights={**found.weights, MASK_STATE: state})

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """EAGLE3's weights, and the state that replaces unknown features."""
        return {**super().weight_plan(dtype), MASK_STATE: ((self.config.hidden_size,), TORCH_DTYPES[dtype])}

    def drafter(self, scope: StepScope) -> BlockDrafter:
        """The drafter, which makes one pass over the accepted rows and those whose tokens are drafted."""
        return BlockDrafter(scope, self._emitter(scope))
