"""The speculator of method "mtp": a target's own multi-token prediction layer.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; Qwen3-Next and Qwen3.5, whose checkpoints have one each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lowlat.errors import ConfigError
from lowlat.graphs.program import OWN_NAMES, RangeNames
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator
from lowlat.speculators.draft_files.windows import check_draft_window
from lowlat.speculators.draft_parts import vocabulary_report
from lowlat.speculators.eagle3.emitter import Eagle3Emitter
from lowlat.speculators.eagle3.speculator import Eagle3Speculator
from lowlat.speculators.mtp.config import has_layer, open_files, parse_mtp
from lowlat.speculators.mtp.emitter import MtpEmitter
from lowlat.speculators.mtp.geometry import MtpConfig, mtp_config
from lowlat.speculators.mtp.weights import load_mtp, mtp_weight_plan

__all__ = ["MtpSpeculator"]


@dataclass(frozen=True)
class MtpSpeculator(Eagle3Speculator):
    """Drafts with the target's MTP layer; prefill, state and the chain of drafts are EAGLE3's."""

    method: ClassVar[str] = MtpConfig.method
    emitter: ClassVar[type[Eagle3Emitter]] = MtpEmitter
    config: MtpConfig

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """Read only the geometry, from the target's config and headers. Raises ConfigError."""
        if directory is None:
            config = mtp_config(target, capture_layers=options.capture_layers)
        else:
            config = parse_mtp(target, directory, open_files(directory), options.capture_layers)
        check_draft_window(config, options.draft_window)
        return cls(config, options.draft_window)

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """Load the layer with its weights from the target's files. Raises ConfigError."""
        checkpoint = None if directory is None else open_files(directory)
        if directory is None or checkpoint is None:
            raise ConfigError(f"{directory}: method 'mtp' reads weights of the target's files, and there are none")
        config = parse_mtp(target, directory, checkpoint, options.capture_layers)
        check_draft_window(config, options.draft_window)
        weights = load_mtp(config, checkpoint, TORCH_DTYPES[target.dtype])
        return LoadedSpeculator(cls(config, options.draft_window), weights, directory)

    @classmethod
    def is_in(cls, directory: Path) -> bool:
        """Whether the files have the layer. Raises ConfigError."""
        return has_layer(directory)

    @property
    def range_names(self) -> RangeNames:
        """The stages' plain names."""
        return OWN_NAMES

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The layer's weights; embedding and LM head are the target's, except for the rows of a draft vocabulary."""
        return mtp_weight_plan(self.config, TORCH_DTYPES[dtype])

    def report(self) -> dict[str, Any]:
        """The method, its layers and the sizes of its vocabulary."""
        return {
            "method": self.method,
            "draft_layers": self.config.num_layers,
            **vocabulary_report(self.config),
            "draft_window": self.window,
        }
