"""The speculator of method "ngram" drafts what followed an earlier occurrence of the text's last tokens.

It reads the committed tokens, which the step keeps anyway. So it has no state, no weights and no operations in prefill.
Source: prompt lookup decoding (A. Saxena, 2023), here on the device.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from lowlat.graphs.program import Stage
from lowlat.models.geometry import ModelConfig
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators.base import LoadedSpeculator, Speculator, StepScope

__all__ = ["NgramSpeculator"]


@dataclass(frozen=True)
class NgramSpeculator(Speculator):
    """Drafts by the longest suffix of the text, of min_match to max_match tokens, that also occurs earlier in it."""

    method: ClassVar[str] = "ngram"
    min_match: int
    max_match: int

    @classmethod
    def plan(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> Self:
        """The speculator of these options; it fits every target."""
        return cls(options.prompt_lookup_min, options.prompt_lookup_max)

    @classmethod
    def load(cls, options: SpeculativeConfig, target: ModelConfig, directory: Path | None = None) -> LoadedSpeculator:
        """The same, since there are no weights to read."""
        return LoadedSpeculator(cls.plan(options, target, directory), {})

    @property
    def waiting_boundaries(self) -> tuple[int, ...]:
        """(): it can draft at the start of a step, and reads no boundary."""
        return ()

    def report(self) -> dict[str, Any]:
        """The method and the lengths that it looks for."""
        return {"method": self.method, "prompt_lookup_min": self.min_match, "prompt_lookup_max": self.max_match}

    def emit_draft(self, scope: StepScope, extended: tuple[str, ...]) -> str:
        """Append one operation over the committed tokens; see the reference `ngram_draft`."""
        nodes = scope.draft_nodes()
        scope.builder.emit(
            "ngram_draft",
            Stage.DRAFT,
            reads=scope.reads("tokens", "slots", "draft_live", "draft_lens"),
            writes={"draft_nodes": nodes},
            min_match=self.min_match,
            max_match=self.max_match,
        )
        return nodes
