"""This module has the case of a measured step: slots, context, draft length, and its imposed acceptance."""

from dataclasses import dataclass

from lowlat.options.acceptance import acceptance_for

__all__ = ["Case"]

IMPOSED_SHARE = 2 / 3  # the share of accepted drafts: 3.0 tokens a step at S = 3


@dataclass(frozen=True)
class Case:
    """One measured step: `batch` slots, each with `context` committed tokens, S drafts verified and S drafted."""

    batch: int
    context: int
    num_speculative_tokens: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """Parse `BxCxS`, for instance `1x8192x3`. Raises ValueError for another text."""
        batch, context, drafts = map(int, text.split("x"))
        return cls(batch, context, drafts)

    @property
    def name(self) -> str:
        """For instance `1 x 8K, S=3`."""
        context = f"{self.context // 1024}K" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch} x {context}, S={self.num_speculative_tokens}"

    @property
    def rows(self) -> int:
        """T, rows a slot in the target's pass."""
        return self.num_speculative_tokens + 1

    @property
    def accept_length(self) -> float | None:
        """Tokens a step that the benchmark imposes, the bonus included; None at S = 0, where nothing is simulated."""
        depth = self.num_speculative_tokens
        return None if depth == 0 else 1 + IMPOSED_SHARE * depth

    @property
    def acceptance(self) -> float | None:
        """The probability by position that comes to that length; None at S = 0."""
        return None if self.accept_length is None else acceptance_for(self.accept_length, self.num_speculative_tokens)
