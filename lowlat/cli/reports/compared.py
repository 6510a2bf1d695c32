"""This module decodes the same prompts with and without speculation, for the demo."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowlat.checkpoint.files import read_json
from lowlat.cli.running import Generation, chat_ids, load_runtime, run_request
from lowlat.engine.metrics import SpeculativeDecodingStats
from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError
from lowlat.ipc import Chunk
from lowlat.options.request import SamplingParams
from lowlat.options.speculative import SpeculativeConfig

__all__ = ["Comparison", "Question", "Row", "compare", "read_questions"]

WARM_UP_TOKENS = 4
MAX_PROMPT_FILE = 16 << 20


@dataclass(frozen=True)
class Question:
    """One prompt: its source, its text, and whether it is a user's message or a text to continue."""

    domain: str
    text: str
    is_message: bool = False


@dataclass(frozen=True)
class Row:
    """One prompt's two runs."""

    question: Question
    speculated: Generation
    baseline: Generation

    @property
    def identical(self) -> bool:
        """Whether both runs gave the same tokens and the same end."""
        left, right = self.speculated, self.baseline
        return left.token_ids == right.token_ids and left.finish_reason == right.finish_reason

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens a step with drafts, bonus included; 0.0 without drafts."""
        stats = self.speculated.record.speculation
        return 0.0 if stats is None else stats.mean_acceptance_length

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "domain": self.question.domain,
            "num_tokens": len(self.speculated.token_ids),
            "finish_reason": self.speculated.finish_reason,
            "tokens_per_s": self.speculated.record.tokens_per_s,
            "baseline_tokens_per_s": self.baseline.record.tokens_per_s,
            "mean_acceptance_length": self.mean_acceptance_length,
            "identical": self.identical,
        }


@dataclass
class Comparison:
    """All prompts' runs, and the totals over them."""

    model: str
    device: str
    device_reason: str
    executor: str
    rows: list[Row] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether every prompt gave the same tokens twice."""
        return all(row.identical for row in self.rows)

    @property
    def error(self) -> str | None:
        """The error of a request that failed, if one did."""
        runs = [run for row in self.rows for run in (row.speculated, row.baseline)]
        return next((run.error for run in runs if run.error is not None), None)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of decoding, with speculation."""
        return _rate([row.speculated for row in self.rows])

    @property
    def baseline_tokens_per_s(self) -> float:
        """Tokens a second of decoding, without."""
        return _rate([row.baseline for row in self.rows])

    @property
    def stats(self) -> SpeculativeDecodingStats:
        """Acceptance over all prompts."""
        total = SpeculativeDecodingStats()
        for row in self.rows:
            if row.speculated.record.speculation is not None:
                total.merge(row.speculated.record.speculation)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; `eagle_speculation` is absent when nothing was drafted."""
        stats = self.stats
        return {
            "tokens_per_s": self.tokens_per_s,
            "baseline_tokens_per_s": self.baseline_tokens_per_s,
            "identical": self.identical,
            "device": self.device,
            "device_reason": self.device_reason,
            "executor": self.executor,
            "model": self.model,
            "prompts": [row.to_dict() for row in self.rows],
            **({"eagle_speculation": stats.to_dict()} if stats.num_drafts else {}),
        }


def read_questions(path: Path, domains: Sequence[str]) -> list[Question]:
    """Return the first prompt of each domain of a bundled file. Raises ConfigError for a file of another form."""
    try:
        found = read_json(path, MAX_PROMPT_FILE)
        return [Question(domain, str(found[domain][0])) for domain in domains]
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{path}: expected lists of prompts under {', '.join(domains)}: {error!r:.200}") from error


def compare(
    target: Path,
    speculative: SpeculativeConfig,
    questions: Sequence[Question],
    params: SamplingParams,
    *,
    chat: bool,
    on_prompt: Callable[[Question], None],
    on_text: Callable[[str], None],
) -> Comparison:
    """Run every prompt with speculation and pass its text on, then run every prompt without a draft model.

    chat wraps each prompt as a user's message. Each runtime runs a few tokens before it is timed.
    Raises ConfigError and RequestError.
    """

    def show(chunk: Chunk) -> None:
        on_text(chunk.text)

    questions = [Question(question.domain, question.text, chat) for question in questions]
    with load_runtime(target, speculative, None, max_batch=1) as runtime:
        choice = runtime.device_choice
        comparison = Comparison(target.name, str(choice.device), choice.reason, runtime.executor.name)
        _warm_up(runtime, params)
        speculated = []
        for question in questions:
            on_prompt(question)
            speculated.append(run_request(runtime, _prompt(runtime, question), params, show))
            on_text("\n")
    with load_runtime(target, None, None, max_batch=1) as runtime:
        _warm_up(runtime, params)
        for question, first in zip(questions, speculated, strict=True):
            second = run_request(runtime, _prompt(runtime, question), params)
            comparison.rows.append(Row(question, first, second))
    return comparison


def _prompt(runtime: Runtime, question: Question) -> str | list[int]:
    return chat_ids(runtime.codec, question.text) if question.is_message else question.text


def _warm_up(runtime: Runtime, params: SamplingParams) -> None:
    """Run a few tokens, so that figures do not include the extra time of a process's first steps."""
    run_request(runtime, "The", SamplingParams(max_tokens=min(WARM_UP_TOKENS, params.max_tokens)))


def _rate(runs: Sequence[Generation]) -> float:
    seconds = sum(run.record.decode_s or 0.0 for run in runs)
    return sum(run.record.decoded_tokens for run in runs) / seconds if seconds else 0.0
