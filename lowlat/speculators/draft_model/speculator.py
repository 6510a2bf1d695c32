"""The speculator of method "draft_model": a whole, smaller model of the target's vocabulary drafts a chain.

Source: speculative decoding, arXiv 2211.17192 and 2302.01318.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lowlat.graphs import BufferSpec
from lowlat.models.geometry import ModelConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.sequence.paged_kv import decoder_cache_specs
from lowlat.speculators.base import LoadedSpeculator, PrefillScope, StateSizes, StepScope, draft_model_of
from lowlat.speculators.draft_model.config import parse_whole
from lowlat.speculators.draft_model.drafter import WholeDrafter
from lowlat.speculators.draft_model.geometry import OWNER, WholeDraftConfig
from lowlat.speculators.draft_model.weights import load_whole, whole_weight_plan
from lowlat.speculators.draft_parts import vocabulary_report
from lowlat.speculators.with_model import ModelSpeculator

__all__ = ["DraftModelSpeculator"]


@dataclass(frozen=True)
class DraftModelSpeculator(ModelSpeculator[WholeDraftConfig]):
    """Drafts with a whole model, whose geometry is `config`."""

    method: ClassVar[str] = WholeDraftConfig.method

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """Read only the geometry, from the model's config and headers. Raises ConfigError."""
        return cls(parse_whole(Path(draft_model_of(options)), target, directory))

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """Load the whole model with its weights. Raises ConfigError."""
        own = Path(draft_model_of(options))
        config = parse_whole(own, target, directory)
        return LoadedSpeculator(cls(config), load_whole(own, config, target), own)

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The windows of its layers."""
        return self.config.windows

    @property
    def waiting_boundaries(self) -> tuple[int, ...]:
        """(): its rows need only tokens."""
        return ()

    @property
    def runs_over_rows(self) -> bool:
        """True: each accepted token has keys and values."""
        return True

    def state_specs(self, sizes: StateSizes) -> list[BufferSpec]:
        """KV caches of the draft model's layers."""
        pools = (sizes.num_blocks, sizes.windows)
        return decoder_cache_specs(self.config, sizes.block_size, sizes.kv_dtype, pools, OWNER)

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The draft model's weights, embedding and LM head included."""
        return whole_weight_plan(self.config)

    @property
    def shared_weights(self) -> Mapping[str, str]:
        """The LM head, if it is the embedding."""
        shares = self.config.shares_head and self.config.quantiser is None
        return {f"{OWNER}lm_head.weight": f"{OWNER}embed.weight"} if shares else {}

    def report(self) -> dict[str, Any]:
        """The method, the model's family and layers, and the size of its vocabulary."""
        return {
            "method": self.method,
            "draft_family": self.config.family,
            "draft_layers": self.config.num_layers,
            **vocabulary_report(self.config),
        }

    def emit_prefill(self, scope: PrefillScope) -> None:
        """Emit the draft model's keys and values for a prompt's positions."""
        WholeDrafter(scope, self.config).emit_prefill(scope)

    def emit_extend(self, scope: StepScope) -> tuple[str, ...]:
        """Emit the accepted rows; returns the residual stream after the last layer."""
        return (WholeDrafter(scope, self.config).emit_extend(scope),)

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """Emit the chain, one row for each draft."""
        return WholeDrafter(scope, self.config).emit_draft(scope, *extended)
