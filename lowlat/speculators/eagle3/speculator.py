"""The speculator of method "eagle3": a draft model over captured residual streams.

Source: EAGLE-3, arXiv 2503.01840.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch

from lowlat.graphs import BufferSpec
from lowlat.graphs.program import RangeNames, Stage
from lowlat.models.geometry import ModelConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, PrefillScope, Scope, StateSizes, StepScope, draft_model_of
from lowlat.speculators.draft_files.windows import check_draft_window, draft_kv_windows
from lowlat.speculators.draft_parts import vocabulary_report
from lowlat.speculators.eagle3.config import EAGLE3, DraftKind, read_draft_config
from lowlat.speculators.eagle3.draft import Drafter
from lowlat.speculators.eagle3.dynamic import DynamicDrafter
from lowlat.speculators.eagle3.emitter import Eagle3Emitter, draft_kv_specs
from lowlat.speculators.eagle3.geometry import Eagle3Config
from lowlat.speculators.eagle3.prefill import emit_draft_prefill
from lowlat.speculators.eagle3.weights import draft_weight_plan, load_draft_model
from lowlat.speculators.tree.dynamic import DynamicTree
from lowlat.speculators.with_model import ModelSpeculator

__all__ = ["Eagle3Speculator"]

# the names that profiles of EAGLE3 look for
RANGE_NAMES: RangeNames = MappingProxyType(
    {
        Stage.VERIFY: "BASE_DECODE_STEP",
        Stage.ACCEPT: "EAGLE_ACCEPT",
        Stage.COMMIT: "EAGLE_TAIL_COMMIT",
        Stage.TREE_MASKS: "EAGLE_TREE_MASKS",
        **{stage: f"EAGLE_{stage}" for stage in Stage if stage.startswith("DRAFT_")},
    }
)


@dataclass(frozen=True)
class Eagle3Speculator(ModelSpeculator[Eagle3Config]):
    """Drafts with an EAGLE3 model.

    kind     how its draft models are recognised and read
    emitter  appends their operations
    config   the draft model's geometry and flags
    window   draft attention reads the first 4 and the last `window` rows, or a layer's own window if that is smaller;
             None: all rows, or a layer's own window
    """

    method: ClassVar[str] = Eagle3Config.method
    kind: ClassVar[DraftKind] = EAGLE3
    emitter: ClassVar[type[Eagle3Emitter]] = Eagle3Emitter
    window: int | None = None

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """Read the geometry from the checkpoint's config and headers. Raises ConfigError."""
        config = read_draft_config(
            draft_model_of(options), target, capture_layers=options.capture_layers, kind=cls.kind
        )
        check_draft_window(config, options.draft_window)
        return cls(config, options.draft_window)

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """Read the draft model whole: if its files are damaged, the runtime can still start without it."""
        found = load_draft_model(draft_model_of(options), target, capture_layers=options.capture_layers, kind=cls.kind)
        check_draft_window(found.config, options.draft_window)
        return LoadedSpeculator(cls(found.config, options.draft_window), found.weights, found.directory, found.notes)

    @property
    def range_names(self) -> RangeNames:
        """The range names that profiles of EAGLE3 look for."""
        return RANGE_NAMES

    @property
    def attends_everything(self) -> bool:
        """Whether there is no draft window, and a layer has no window of its own."""
        return self.window is None and None in self.config.windows

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The windows of its layers, or those that the draft window implies."""
        return draft_kv_windows(self.config, self.window)

    def state_specs(self, sizes: StateSizes) -> list[BufferSpec]:
        """KV caches of the draft model's layers, features at block ends, and the last prefilled prompt's feature."""
        return draft_kv_specs(self.config, sizes, self.kv_windows)

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The draft model's weights; embedding and LM head only if it has its own."""
        return draft_weight_plan(self.config, dtype=dtype)

    def report(self) -> dict[str, Any]:
        """The method, the boundaries it reads and the sizes of its vocabulary."""
        return {
            "method": self.method,
            "capture_boundaries": list(self.config.capture_boundaries),
            **vocabulary_report(self.config),
            "draft_layers": self.config.num_layers,
            "draft_window": self.window,
        }

    def emit_prefill(self, scope: PrefillScope) -> None:
        """Append the pass that writes the draft model's keys and values for a prompt's positions."""
        emit_draft_prefill(scope, self._emitter(scope))

    def emit_extend(self, scope: StepScope) -> tuple[str, ...]:
        """Append the pass over accepted rows; returns the last layer's attention input and residual stream."""
        return self.drafter(scope).extend()

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """Append the drafting of one level of the tree after another."""
        return self.drafter(scope).draft(*extended)

    def drafter(self, scope: StepScope) -> Drafter:
        """The emitter of the draft model's operations after a commit."""
        kind = DynamicDrafter if isinstance(scope.topology, DynamicTree) else Drafter
        return kind(scope, self._emitter(scope))

    def _emitter(self, scope: Scope) -> Eagle3Emitter:
        return self.emitter(scope.config, self.config, scope.tables, self.window)
