"""This module has the speculator of method "dflash": its draft model fills a block of masks in one pass.

Source: DFlash, z-lab; vllm-project/speculators, `models/dflash`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lowlat.errors import ConfigError
from lowlat.graphs import BufferSpec
from lowlat.models.geometry import ModelConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, PrefillScope, Scope, StateSizes, StepScope, draft_model_of
from lowlat.speculators.dflash.config import parse_dflash
from lowlat.speculators.dflash.emitter import DflashEmitter, dflash_kv_specs
from lowlat.speculators.dflash.geometry import DflashConfig
from lowlat.speculators.dflash.weights import dflash_weight_plan, load_dflash
from lowlat.speculators.draft_parts import vocabulary_report
from lowlat.speculators.with_model import ModelSpeculator

__all__ = ["DflashSpeculator", "check_depth"]


@dataclass(frozen=True)
class DflashSpeculator(ModelSpeculator[DflashConfig]):
    """Drafts with a DFlash model, whose geometry is `config`.

    parse_files  reads config and headers of its directory
    load_files   reads the weights, too
    longer       drafts of a block while recent drafts were all accepted; 0: always the usual number
    """

    method: ClassVar[str] = DflashConfig.method
    parse_files = staticmethod(parse_dflash)
    load_files = staticmethod(load_dflash)
    longer: int = 0

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """Read only the geometry, from the checkpoint's config and headers. Raises ConfigError."""
        config, _ = cls.parse_files(Path(draft_model_of(options)), target, options.capture_layers)
        check_depth(config, options)
        return cls(config, options.max_block_drafts)

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """Load the draft model with its weights. Raises ConfigError."""
        found = cls.load_files(draft_model_of(options), target, capture_layers=options.capture_layers)
        check_depth(found.config, options)
        made = cls(found.config, options.max_block_drafts)
        return LoadedSpeculator(made, found.weights, found.directory, found.notes)

    @property
    def most_drafts(self) -> int:
        """The drafts of a block, up to the options' limit."""
        return min(super().most_drafts, self.config.max_drafts)

    @property
    def longer_draft_length(self) -> int:
        """The number of the option max_block_drafts."""
        return self.longer

    def state_specs(self, sizes: StateSizes) -> list[BufferSpec]:
        """KV caches of the draft model's layers."""
        return dflash_kv_specs(self.config, sizes.kv_dtype, sizes.num_blocks, sizes.block_size)

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The draft model's weights; embedding and LM head only if it has its own."""
        return dflash_weight_plan(self.config, dtype)

    def report(self) -> dict[str, Any]:
        """The method, the boundaries it reads, its block and the size of its vocabulary."""
        return {
            "method": self.method,
            "capture_boundaries": list(self.config.capture_boundaries),
            **vocabulary_report(self.config),
            "draft_layers": self.config.num_layers,
            "draft_block_size": self.config.block_size,
            **({"max_block_drafts": self.longer} if self.longer else {}),
            **({} if self.config.selector is None else {"selector": asdict(self.config.selector)}),
            **({} if self.config.conv is None else {"convolution": asdict(self.config.conv)}),
        }

    def emit_prefill(self, scope: PrefillScope) -> None:
        """Emit the draft model's keys and values for a prompt's positions."""
        self.emitter(scope).emit_prefill(scope)

    def emit_extend(self, scope: StepScope) -> tuple[str, ...]:
        """Emit keys and values for the accepted rows' positions; for a first token prefill has written them."""
        if not scope.is_first_token:
            self.emitter(scope).emit_extend(scope)
        return ()

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """Emit one pass over the block."""
        return self.emitter(scope).emit_draft(scope)

    def emitter(self, scope: Scope) -> DflashEmitter:
        """The emitter of the draft model's operations."""
        return DflashEmitter(scope, self.config, scope.tables)


def check_depth(config: DflashConfig, options: SpeculativeConfig) -> None:
    """Raise ConfigError for more drafts than a block was trained with."""
    for name in ("num_speculative_tokens", "max_block_drafts"):
        if getattr(options, name) > config.max_drafts:
            raise ConfigError(
                f"{name} {getattr(options, name)} is more than the {config.max_drafts} drafts of this draft model's "
                f"block of {config.block_size} rows"
            )
