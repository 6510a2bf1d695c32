"""This module has the report of a check of exactness: sweeps, the first difference of each, and a verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lowlat.engine.runtime import Runtime

__all__ = ["SEPARATOR", "Difference", "Exactness", "Sweep"]

SEPARATOR = ": "  # between sweep and request in a runtime's request ids


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer differs from the plain one; None: that answer ended there."""

    request: str
    position: int
    expected: int | None
    found: int | None


@dataclass
class Sweep:
    """The answers of one way of decoding, counted and compared.

    name           for instance `draft length 3`
    requests       answers that were compared
    tokens         their tokens
    drafted        draft tokens that were verified, of all requests
    accepted       draft tokens that were accepted
    cached_tokens  tokens of prompts whose keys and values were shared
    different      answers that differ from the plain ones
    first          the first of these differences
    skipped        why it was not run; None if it was
    """

    name: str
    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    different: int = 0
    first: Difference | None = None
    skipped: str | None = None

    def compare(
        self, runtime: Runtime, answers: Mapping[str, tuple[int, ...]], plain: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Compare answers, by request names, and count them."""
        for name, tokens in answers.items():
            self.requests += 1
            self.tokens += len(tokens)
            metrics = runtime.metrics(name)
            self.cached_tokens += metrics.cached_prompt_tokens
            if metrics.speculation is not None:
                self.drafted += metrics.speculation.total_draft_tokens
                self.accepted += metrics.speculation.total_accepted_tokens
            expected = plain[name.rpartition(SEPARATOR)[2]]
            if tokens != expected:
                self.different += 1
                self.first = self.first or _difference(name, expected, tokens)


@dataclass
class Exactness:
    """The report of `lowlat doctor --exactness`."""

    device: str
    executor: str
    numerics: str
    sweeps: list[Sweep] = field(default_factory=list)

    @property
    def compared(self) -> int:
        """Answers that were compared."""
        return sum(sweep.requests for sweep in self.sweeps)

    @property
    def exact(self) -> bool:
        """Whether something was compared, drafts were verified in it, and no answer differed."""
        return any(sweep.drafted for sweep in self.sweeps) and not any(sweep.different for sweep in self.sweeps)

    @property
    def verdict(self) -> str:
        """The verdict, in one sentence."""
        different = [sweep for sweep in self.sweeps if sweep.different]
        if different:
            count, first = sum(sweep.different for sweep in different), different[0].first
            at = "" if first is None else f"; the first, {first.request}, at token {first.position}"
            return f"not exact: {count} of {self.compared} answers differ from plain decoding{at}"
        if not any(sweep.drafted for sweep in self.sweeps):
            return "no draft was verified: nothing can be said; take more prompts or tokens"
        return f"exact: all {self.compared} answers are those of plain decoding, token for token"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {**asdict(self), "compared": self.compared, "exact": self.exact, "verdict": self.verdict}


def _difference(name: str, expected: Sequence[int], found: Sequence[int]) -> Difference:
    """Return the first difference of two answers."""
    pairs: list[tuple[int | None, int | None]] = list(zip(expected, found, strict=False))
    place = next((place for place, (left, right) in enumerate(pairs) if left != right), len(pairs))
    return Difference(
        name,
        place,
        expected[place] if place < len(expected) else None,
        found[place] if place < len(found) else None,
    )
