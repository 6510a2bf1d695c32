"""The speculator of method "suffix": drafts continue the text's last tokens as they most often went on before.

It reads the committed tokens that the step keeps anyway, so it has no state, no weights and nothing to do in prefill.
Source: SuffixDecoding, G. Oliaro and others, arXiv 2411.04975; here on the device, over a request's own text.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lowlat.graphs.program import Stage
from lowlat.models.geometry import ModelConfig
from lowlat.options.config import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, Speculator, StepScope

__all__ = ["SuffixSpeculator"]


@dataclass(frozen=True)
class SuffixSpeculator(Speculator):
    """Drafts by endings of up to max_depth tokens, max_spec_factor drafts a token of the ending, to min_token_prob."""

    method: ClassVar[str] = "suffix"
    max_depth: int
    max_spec_factor: float
    min_token_prob: float

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """The speculator of these options; it fits every target."""
        return cls(options.suffix_cache_max_depth, float(options.max_spec_factor), float(options.min_token_prob))

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """The same: there is nothing to read."""
        return LoadedSpeculator(cls.plan(options, target, directory), {})

    @property
    def waiting_boundaries(self) -> tuple[int, ...]:
        """None are read."""
        return ()

    def report(self) -> dict[str, Any]:
        """The method and its options."""
        options = {"max_spec_factor": self.max_spec_factor, "min_token_prob": self.min_token_prob}
        return {"method": self.method, "suffix_cache_max_depth": self.max_depth, **options}

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """One operation over the committed tokens; see `suffix_draft` of the references."""
        return self.emit_search(scope, scope.draft_nodes(), Stage.DRAFT)[0]

    def emit_search(self, scope: StepScope, nodes: str, stage: Stage) -> tuple[str, str, str]:
        """Append the search into a buffer of nodes [B, T]; returns it, the drafts' shares and the endings' lengths."""
        shape = scope.builder.spec(nodes).shape
        shares = scope.builder.scratch("draft_shares", shape, torch.int32)
        lengths = scope.builder.scratch("match_lens", shape[:1], torch.int32)
        scope.builder.emit(
            "suffix_draft",
            stage,
            reads=scope.reads("tokens", "slots", "draft_live", "draft_lens"),
            writes={"draft_nodes": nodes, "draft_shares": shares, "match_lens": lengths},
            max_depth=self.max_depth,
            max_spec_factor=self.max_spec_factor,
            min_token_prob=self.min_token_prob,
        )
        return nodes, shares, lengths
