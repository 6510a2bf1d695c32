"""This module has the speculator that joins a model's drafts with drafts from text, and verifies the better ones.

In every step both make drafts for every slot. Those with the higher expected acceptance are verified. The model's
speculator is used only through its interface.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lowlat.errors import ConfigError
from lowlat.graphs import BufferSpec, Role
from lowlat.graphs.program import RangeNames, Stage, named
from lowlat.kernels.reference.speculation.choose_drafts import NUM_BINS, PROPOSAL_WIDTH
from lowlat.kernels.reference.step.slots import FROM_TEXT
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layer_spec import Rotation
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, PrefillScope, Speculator, StateSizes, StepScope
from lowlat.speculators.suffix.speculator import SuffixSpeculator

__all__ = ["TextBeside"]


@dataclass(frozen=True)
class TextBeside(Speculator):
    """Chooses, for each slot and step, a model's drafts or those from the request's own text; only chains."""

    method: ClassVar[str] = "text_beside"
    model: Speculator
    text: SuffixSpeculator

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """Raise ConfigError: no option names this method; `beside` makes it from a planned speculator."""
        raise ConfigError("text_drafts is an option next to a method, and no method of its own")

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """Raise ConfigError, see `plan`."""
        raise ConfigError("text_drafts is an option next to a method, and no method of its own")

    @classmethod
    def beside(cls, model: Speculator, options: SpeculativeConfig, target: ModelConfig) -> Speculator:
        """Add the drafts from text that the options ask for; returns `model` itself if they ask for none."""
        return model if options.text_drafts is None else cls(model, SuffixSpeculator.plan(options, target))

    @property
    def draft_config(self) -> DraftConfig | None:
        """The model's."""
        return self.model.draft_config

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The model's."""
        return self.model.rotations

    @property
    def range_names(self) -> RangeNames:
        """The model's."""
        return self.model.range_names

    def with_config(self, config: DraftConfig) -> Speculator:
        """Return this speculator with another geometry of the model."""
        return replace(self, model=self.model.with_config(config))

    @property
    def draft_sources(self) -> tuple[str, str]:
        """The model's method, and the text's."""
        return self.model.method, self.text.method

    @property
    def most_drafts(self) -> int:
        """The model's number."""
        return self.model.most_drafts

    @property
    def wide_rows(self) -> tuple[int, ...]:
        """The text's."""
        return self.text.wide_rows

    @property
    def wide_source(self) -> int:
        """The number of drafts from text."""
        return FROM_TEXT

    @property
    def num_text_tokens(self) -> int:
        """The text's."""
        return self.text.num_text_tokens

    @property
    def attends_everything(self) -> bool:
        """Whether the model attends to all positions."""
        return self.model.attends_everything

    @property
    def kv_windows(self) -> tuple[int | None, ...]:
        """The model's."""
        return self.model.kv_windows

    @property
    def runs_over_rows(self) -> bool:
        """Whether the model runs over the accepted rows."""
        return self.model.runs_over_rows

    def state_specs(self, sizes: StateSizes) -> list[BufferSpec]:
        """The model's buffers, and each slot's last proposals and acceptance probabilities."""
        batch, ints = sizes.max_batch, torch.int32
        return [
            *self.model.state_specs(sizes),
            BufferSpec("proposals", (batch, PROPOSAL_WIDTH), ints, Role.STATE, by_slot=True),
            BufferSpec("draft_probabilities", (batch, 2, NUM_BINS, 2), ints, Role.STATE, by_slot=True),
        ]

    def weight_plan(self, dtype: str) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """The model's."""
        return self.model.weight_plan(dtype)

    @property
    def shared_weights(self) -> Mapping[str, str]:
        """The model's."""
        return self.model.shared_weights

    def report(self) -> dict[str, Any]:
        """The model's report, with the text's under `text_drafts`."""
        return {**self.model.report(), "text_drafts": self.text.report()}

    def emit_prefill(self, scope: PrefillScope) -> None:
        """Emit the model's prefill."""
        self.model.emit_prefill(scope)

    def emit_extend(self, scope: StepScope) -> tuple[str, ...]:
        """Emit the model's pass over the accepted rows."""
        return self.model.emit_extend(scope)

    def emit_proposals(self, scope: StepScope) -> str:
        """Emit only the text's proposals, without the model's pass."""
        return self.text.emit_proposals(scope)

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """Emit the model's drafts, the text's, and the choice between them."""
        nodes = self.model.emit_draft(scope, extended)
        text_nodes = scope.builder.scratch("text_nodes", scope.builder.spec(nodes).shape, torch.int32)
        _, shares, lengths = self.text.emit_search(scope, text_nodes, Stage.DRAFT)
        reads = scope.reads("tokens", "slots", "draft_live", "draft_lens")
        scope.builder.emit(
            "choose_drafts",
            Stage.DRAFT,
            reads={**reads, **named(text_nodes=text_nodes, draft_shares=shares, match_lens=lengths)},
            writes=named("proposals", "draft_probabilities", "draft_sources", draft_nodes=nodes),
            fresh=scope.is_first_token,
        )
        return nodes
