"""This module has the speculator of method "suffix": it drafts the most frequent continuation of the last tokens.

It searches the committed tokens, which the step keeps anyway. So it has no state and no weights, and does nothing in
prefill.
Source: SuffixDecoding, G. Oliaro and others, arXiv 2411.04975; here on the device, over a request's own text.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lowlat.graphs.program import Stage, named
from lowlat.kernels.reference.speculation.suffix_draft import MAX_DEPTH
from lowlat.models.geometry import ModelConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.options.speculative_checks import WIDE_ROWS
from lowlat.speculators.base import LoadedSpeculator, Speculator, StepScope

__all__ = ["SuffixSpeculator"]

# for a wide step's proposals: inside a copy the matching ending is long, and short ones find a broken copy again
WIDE_DEPTH, WIDE_FACTOR = MAX_DEPTH, 4.0


@dataclass(frozen=True)
class SuffixSpeculator(Speculator):
    """Drafts continuations of matching endings of up to max_depth tokens.

    max_spec_factor  the most drafts for each token of the ending
    min_token_prob   the least share of the ending's places that must have all drafts up to the last one
    most_rows        the most rows of a slot in wide steps; 0: there are no wide steps
    text_tokens      the most tokens of texts that a request may name
    """

    method: ClassVar[str] = "suffix"
    max_depth: int
    max_spec_factor: float
    min_token_prob: float
    most_rows: int = 0
    text_tokens: int = 0

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """Make the speculator of these options; it fits every target."""
        return cls(
            options.suffix_cache_max_depth,
            float(options.max_spec_factor),
            float(options.min_token_prob),
            options.wide_rows,
            options.draft_text_tokens,
        )

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """Make the same speculator as `plan`: there are no weights to read."""
        return LoadedSpeculator(cls.plan(options, target, directory), {})

    @property
    def waiting_boundaries(self) -> tuple[int, ...]:
        """(): it reads no boundaries."""
        return ()

    @property
    def wide_rows(self) -> tuple[int, ...]:
        """The rows of wide steps, up to the option's."""
        return tuple(rows for rows in WIDE_ROWS if rows <= self.most_rows)

    @property
    def num_text_tokens(self) -> int:
        """The number of the option."""
        return self.text_tokens

    def report(self) -> dict[str, Any]:
        """The method and its options."""
        options = {"max_spec_factor": self.max_spec_factor, "min_token_prob": self.min_token_prob}
        wide = {"wide_rows": list(self.wide_rows)} if self.wide_rows else {}
        texts = {"draft_text_tokens": self.text_tokens} if self.text_tokens else {}
        return {"method": self.method, "suffix_cache_max_depth": self.max_depth, **options, **wide, **texts}

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """Emit the search over the committed tokens; see `suffix_draft` of the references."""
        return self.emit_search(scope, scope.draft_nodes(), Stage.DRAFT)[0]

    def emit_proposals(self, scope: StepScope) -> str:
        """Emit the same operations with longer endings, and more drafts for each token of the ending."""
        wide = replace(self, max_depth=WIDE_DEPTH, max_spec_factor=max(self.max_spec_factor, WIDE_FACTOR))
        return wide.emit_search(scope, scope.draft_nodes(), Stage.ACTIVE_SLOTS)[0]

    def emit_search(self, scope: StepScope, nodes: str, stage: Stage) -> tuple[str, str, str]:
        """Emit the search into a buffer of nodes [B, T]; returns it, the drafts' shares and the endings' lengths."""
        shape = scope.builder.spec(nodes).shape
        shares = scope.builder.scratch("draft_shares", shape, torch.int32)
        lengths = scope.builder.scratch("match_lens", shape[:1], torch.int32)
        reads = scope.reads("tokens", "slots", "draft_live", "draft_lens")
        writes = named(draft_nodes=nodes, draft_shares=shares, match_lens=lengths)
        by: dict[str, Any] = {"max_depth": self.max_depth, "max_spec_factor": self.max_spec_factor}
        scope.builder.emit("suffix_draft", stage, reads=reads, writes=writes, **by, min_token_prob=self.min_token_prob)
        if self.text_tokens:
            reads |= named("draft_texts", "draft_text_lens")
            scope.builder.emit("draft_from_texts", stage, reads=reads, writes=writes, **by)
        return nodes, shares, lengths
