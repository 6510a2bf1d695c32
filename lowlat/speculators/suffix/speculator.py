"""The speculator of method "suffix": drafts continue the text's last tokens as they most often went on before.

It reads the committed tokens that the step keeps anyway, so it has no state, no weights and nothing to do in prefill.
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

# of a wide step's proposals: a copy's ending is long, and one that breaks is found again by a short one
WIDE_DEPTH, WIDE_FACTOR = MAX_DEPTH, 4.0


@dataclass(frozen=True)
class SuffixSpeculator(Speculator):
    """Drafts by endings of up to max_depth tokens, max_spec_factor drafts a token of the ending, to min_token_prob.

    most_rows    rows of a slot in wide steps, at most; 0: there are none
    text_tokens  tokens of texts that a request may name
    """

    method: ClassVar[str] = "suffix"
    max_depth: int
    max_spec_factor: float
    min_token_prob: float
    most_rows: int = 0
    text_tokens: int = 0

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """The speculator of these options; it fits every target."""
        return cls(
            options.suffix_cache_max_depth,
            float(options.max_spec_factor),
            float(options.min_token_prob),
            options.wide_rows,
            options.draft_text_tokens,
        )

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """The same: there is nothing to read."""
        return LoadedSpeculator(cls.plan(options, target, directory), {})

    @property
    def waiting_boundaries(self) -> tuple[int, ...]:
        """None are read."""
        return ()

    @property
    def wide_rows(self) -> tuple[int, ...]:
        """Those of the option."""
        return tuple(rows for rows in WIDE_ROWS if rows <= self.most_rows)

    @property
    def num_text_tokens(self) -> int:
        """Those of the option."""
        return self.text_tokens

    def report(self) -> dict[str, Any]:
        """The method and its options."""
        options = {"max_spec_factor": self.max_spec_factor, "min_token_prob": self.min_token_prob}
        wide = {"wide_rows": list(self.wide_rows)} if self.wide_rows else {}
        texts = {"draft_text_tokens": self.text_tokens} if self.text_tokens else {}
        return {"method": self.method, "suffix_cache_max_depth": self.max_depth, **options, **wide, **texts}

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """One operation over the committed tokens; see `suffix_draft` of the references."""
        return self.emit_search(scope, scope.draft_nodes(), Stage.DRAFT)[0]

    def emit_proposals(self, scope: StepScope) -> str:
        """The same operations, with more drafts a token of the ending, by longer endings."""
        wide = replace(self, max_depth=WIDE_DEPTH, max_spec_factor=max(self.max_spec_factor, WIDE_FACTOR))
        return wide.emit_search(scope, scope.draft_nodes(), Stage.ACTIVE_SLOTS)[0]

    def emit_search(self, scope: StepScope, nodes: str, stage: Stage) -> tuple[str, str, str]:
        """Append the search into a buffer of nodes [B, T]; returns it, the drafts' shares and the endings' lengths."""
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
