"""This module reports whether speculation is active for a pair, and if not, the reasons.

Speculation is active if drafts are verified, and accepted more often than guesses: then a step gives several tokens.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from lowlat.cli.reports.shifts import Prompt
from lowlat.cli.running import Generation, chat_ids, load_runtime, run_request
from lowlat.engine.metrics import MetricsBook, SpeculativeDecodingStats
from lowlat.engine.runtime import Runtime
from lowlat.errors import LowlatError
from lowlat.options.request import SamplingParams
from lowlat.options.speculative import SpeculativeConfig

__all__ = ["Activity", "Decoded", "Reason", "guess_rate", "measure_activity"]

ENOUGH_DRAFTS = 10  # verified first drafts; with fewer, acceptance says little
UNIFORM = 0.5  # where guessing is right more often, the texts repeat one token and tell nothing about drafts

Code = Literal[
    "not_asked_for", "refused", "zero_depth", "draft_limit", "simulated", "no_drafts", "few_drafts", "chance"
]


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why speculation is not active: a code for programs, and what to do, for people."""

    code: Code
    text: str


class Decoded(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt and its answer; without a tokenizer the answer is token ids."""

    prompt: Prompt
    answer: str | list[int]


class Activity(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of `lowlat inspect run`.

    num_steps          decode steps; eagle_speculation's num_drafts of them verified drafts
    active             whether steps give several tokens because drafts are accepted
    reasons            why it is not active; empty if it is
    guess_rate         how often a token drawn at random from the texts would be accepted; None without text
    tokens_per_s       speed of decoding, one request at a time, after a short warm-up request
    eagle_speculation  as in the metrics; absent in JSON if no draft was verified
    texts              each prompt with its answer
    """

    model: str
    draft_model: str | None
    device: str
    executor: str
    method: str | None
    num_speculative_tokens: int
    active: bool
    reasons: tuple[Reason, ...]
    num_prompts: int
    completion_tokens: int
    num_steps: int
    tokens_per_s: float
    mean_acceptance_length: float
    acceptance_by_position: tuple[float, ...]
    guess_rate: float | None
    eagle_speculation: dict[str, Any] | None = None
    texts: tuple[Decoded, ...] = ()


def measure_activity(
    model: Path,
    speculative: SpeculativeConfig | None,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    chat: bool,
    **options: Any,
) -> Activity:
    """Decode the prompts one by one and say whether speculation is active.

    options   of `Runtime.load`
    Raises ConfigError, RequestError, and LowlatError where a request fails.
    """
    with load_runtime(model, speculative, max_batch=1, **options) as runtime:
        ready = [chat_ids(runtime.codec, each) if chat and isinstance(each, str) else each for each in prompts]
        run_request(runtime, ready[0], SamplingParams(max_tokens=min(4, params.max_tokens)))  # first steps are slow
        runs = [run_request(runtime, prompt, params) for prompt in ready]
        pairs = zip(prompts, runs, strict=True)
        texts = tuple(
            Decoded(prompt=prompt, answer=run.token_ids if run.text is None else run.text) for prompt, run in pairs
        )
        return msgspec.structs.replace(_report(runtime, model, speculative, params, runs), texts=texts)


def _report(
    runtime: Runtime, model: Path, speculative: SpeculativeConfig | None, params: SamplingParams, runs: list[Generation]
) -> Activity:
    failed = next((run.error for run in runs if run.error is not None), None)
    if failed is not None:
        raise LowlatError(f"a prompt failed: {failed}")
    book = MetricsBook()
    for run in runs:
        book.update(run.record)
    totals = book.totals()
    stats = totals.speculation or SpeculativeDecodingStats()
    chance = guess_rate([run.token_ids for run in runs])
    reason = _why_off(runtime, speculative, params) or _why_idle(runtime, stats, chance, totals.completion_tokens)
    shares = zip(stats.acceptance_by_position, stats.drafted_by_position, strict=True)
    return Activity(
        model=str(model),
        draft_model=None if speculative is None or speculative.model is None else str(speculative.model),
        device=str(runtime.device_choice.device),
        executor=runtime.executor.name,
        method=None if speculative is None else speculative.method,
        num_speculative_tokens=runtime.num_speculative_tokens,
        active=reason is None,
        reasons=() if reason is None else (reason,),
        num_prompts=len(runs),
        completion_tokens=totals.completion_tokens,
        num_steps=totals.num_steps,
        tokens_per_s=totals.tokens_per_s,
        mean_acceptance_length=stats.mean_acceptance_length,
        acceptance_by_position=tuple(share for share, drafted in shares if drafted),
        guess_rate=chance,
        eagle_speculation=stats.to_dict() if stats.num_drafts else None,
    )


def guess_rate(texts: Sequence[Sequence[int]]) -> float | None:
    """Return how often two tokens drawn at random from all texts are the same: the acceptance of random drafts."""
    counts = Counter(token for text in texts for token in text)
    total = counts.total()
    return sum((count / total) ** 2 for count in counts.values()) if total else None


def _why_off(runtime: Runtime, speculative: SpeculativeConfig | None, params: SamplingParams) -> Reason | None:
    """Return why no step can verify drafts, or not truly, from what was loaded and asked for."""
    if speculative is None or not speculative.enabled:
        return Reason(code="not_asked_for", text="no draft model was given: --draft-model MODEL, or --method suffix")
    if runtime.speculation_error is not None:
        return Reason(code="refused", text=f"the draft model was refused: {runtime.speculation_error}")
    if runtime.num_speculative_tokens == 0:
        return Reason(code="zero_depth", text="num_speculative_tokens is 0 (-S): steps verify no drafts")
    if params.max_draft_tokens == 0:
        return Reason(code="draft_limit", text="max_draft_tokens is 0 (--max-draft-tokens): no draft is verified")
    if runtime.simulated:
        text = "acceptance is simulated (simulated_acceptance): it says nothing about the pair"
        return Reason(code="simulated", text=text)
    return None


def _why_idle(
    runtime: Runtime, stats: SpeculativeDecodingStats, chance: float | None, completion_tokens: int
) -> Reason | None:
    """Return why speculation that runs does not help, from its figures."""
    method = None if runtime.speculator is None else runtime.speculator.method
    drafted, accepted = stats.drafted_by_position[0], stats.accepted_by_position[0]
    repeats = {
        "ngram": "the n-gram method drafts only where a text repeats itself (prompt_lookup_min tokens)",
        "suffix": "the suffix method drafts only where a text repeats itself (min_token_prob of the places)",
    }.get(method or "")
    if drafted == 0:
        short = f"the {completion_tokens} tokens left no step that could verify one: raise --max-tokens"
        return Reason(code="no_drafts", text=f"no draft was verified: {repeats or short}")
    rate, chance = accepted / drafted, chance or 0.0
    noise = 2 * (chance * (1 - chance) / drafted) ** 0.5
    if accepted and (rate > chance + noise or chance > UNIFORM):
        return None
    figures = f"{accepted} of {drafted} first drafts were accepted"
    if drafted < ENOUGH_DRAFTS:
        text = f"{figures}, too few to tell: take more prompts (--num-prompts) or tokens (--max-tokens)"
        return Reason(code="few_drafts", text=text)
    remedy = repeats or "is it this target's? `lowlat doctor` checks its capture boundaries"
    return Reason(code="chance", text=f"{figures}, and guessing reaches {chance:.1%}: {remedy}")
