"""The check of losslessness on a user's own pair: every answer next to the same request decoded alone without drafts.

A plain runtime (one slot, no speculation, no shared prefixes) answers each request first. Then a runtime that
speculates answers the same requests at every draft length, next to neighbours, after a shared prefix and at chosen
draft lengths. Answers must be equal token for token: losslessness is of bits, so a sampled request with its seed counts
as a greedy one does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from lowlat.engine.runtime import Runtime
from lowlat.errors import ConfigError, LowlatError
from lowlat.options.config import SpeculativeConfig
from lowlat.options.request import SamplingParams

__all__ = ["SETTINGS", "Difference", "Exactness", "Request", "Sweep", "measure_exactness"]

BATCH = 4  # slots of the runtime that speculates
PREFIX_TOKENS = 8  # of an answer after a shared prefix
SEPARATOR = ": "  # between a sweep and a request in the name that a runtime knows it by
Load = Callable[..., Runtime]

# how requests choose their tokens; each prompt is asked in all of these ways
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 17},
    "cut": {"temperature": 1.1, "top_p": 0.9, "top_k": 40, "seed": 5},
    "penalised": {"temperature": 0.6, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 3},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"json_object": True},
    "regex": {"regex": r"[A-Za-z ,]{5,60}\.", "temperature": 0.7, "seed": 11},
}


@dataclass(frozen=True)
class Request:
    """A prompt and how its tokens are chosen.

    prompt  token ids
    """

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Difference:
    """The first token at which an answer differs from the plain one; None: an answer that ended there."""

    request: str
    position: int
    expected: int | None
    found: int | None


@dataclass
class Sweep:
    """The answers of one way of decoding, counted and compared.

    name           for instance `draft length 3`
    requests       answers that were compared
    tokens         tokens of them
    drafted        draft tokens that were verified, of all requests
    accepted       of those, accepted
    cached_tokens  tokens of prompts whose keys and values were shared
    different      answers that were not the plain ones
    first          the first of these
    skipped        why it was not run; None where it was
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

    def compare(self, runtime: Runtime, answers: dict[str, tuple[int, ...]], plain: dict[str, tuple[int, ...]]) -> None:
        """Add answers, each by its request's name."""
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
        """One sentence."""
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


def measure_exactness(
    target: Path,
    speculative: SpeculativeConfig,
    prompts: Sequence[Sequence[int] | str],
    *,
    max_tokens: int,
    load: Load,
    report: Callable[[Sweep], None] | None = None,
    **options: Any,
) -> Exactness:
    """Decode the prompts plainly and in every other way, and compare.

    speculative  with the longest draft length that is tried, `num_speculative_tokens`; shorter ones are, too
    prompts      texts, or lists of token ids
    max_tokens   of an answer
    load         makes a runtime: (target, speculative, max_context, **options)
    report       is told of each sweep as it ends
    options      of the runtimes, for instance device
    Raises ConfigError for a pair that cannot be loaded, LowlatError for a request that fails.
    """
    with load(target, None, None, max_batch=1, prefix_reuse=False, **options) as runtime:
        requests = list(_requests(runtime, prompts, max_tokens))
        prefixes = list(_prefixes(runtime, [token for request in requests for token in request.prompt]))
        plain = {request.name: _alone(runtime, request) for request in (*requests, *prefixes)}
    groups = [requests[place : place + BATCH] for place in range(0, len(requests), BATCH)]

    def add(sweep: Sweep) -> None:
        found.sweeps.append(sweep)
        if report is not None:
            report(sweep)

    depth = speculative.num_speculative_tokens
    fixed = replace(speculative, strict=True)
    with load(target, fixed, None, max_batch=BATCH, **options) as runtime:
        found = Exactness(str(runtime.device_choice.device), runtime.device_choice.executor, runtime.numerics)
        for length in range(depth + 1):
            runtime.speculate(length)
            add(_run(runtime, f"draft length {length}", [[request] for request in requests], plain))
        add(_run(runtime, "with neighbours", groups, plain))
        add(_run(runtime, "with neighbours that are cancelled", groups, plain, cancels=True))
        add(_run(runtime, "after a shared prefix", [[request] for request in prefixes], plain))
    try:
        with load(target, replace(fixed, adaptive_width=True), None, max_batch=BATCH, **options) as runtime:
            add(_run(runtime, "with chosen draft lengths", groups, plain))
    except ConfigError as error:
        add(Sweep("with chosen draft lengths", skipped=str(error)))
    return found


def _requests(runtime: Runtime, prompts: Sequence[Sequence[int] | str], max_tokens: int) -> Iterator[Request]:
    """Each prompt in each setting; the first ones under grammars, where there is an engine of them."""
    for place, prompt in enumerate(prompts):
        ids = _ids(runtime, prompt)
        for name, setting in SETTINGS.items():
            yield Request(f"prompt {place}, {name}", ids, SamplingParams(max_tokens=max_tokens, **setting))
    if runtime.codec is None or not runtime.checks.has_masks or find_spec("llguidance") is None:
        return
    for name, setting in GRAMMARS.items():
        params = SamplingParams(max_tokens=max_tokens, **setting)
        yield Request(f"prompt 0, {name}", _ids(runtime, prompts[0]), params)


def _ids(runtime: Runtime, prompt: Sequence[int] | str) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        return tuple(prompt)
    if runtime.codec is None:
        raise ConfigError("prompts are texts, and the target has no tokenizer.json: give a .json file of token ids")
    return tuple(runtime.codec.encode(prompt))


def _prefixes(runtime: Runtime, ids: Sequence[int]) -> Iterator[Request]:
    """Beginnings of two long prompts, of every length modulo a block of the KV cache past the last whole chunk.

    The prompts differ in their first chunk alone, so that chunks of equal text follow unequal ones.
    """
    config = runtime.config
    room = runtime.geometry.max_context - PREFIX_TOKENS
    chunks = min(2, (room - config.block_size) // config.prefill_chunk)
    if chunks < 1:
        return
    longest = chunks * config.prefill_chunk + config.block_size
    drawn = [Random(seed).choices(ids, k=longest) for seed in range(2)]
    drawn[1][config.prefill_chunk :] = drawn[0][config.prefill_chunk :]
    for length in range(longest, longest - config.block_size, -1):
        prompt = tuple(drawn[length % 2][:length])
        params = SamplingParams(max_tokens=PREFIX_TOKENS, ignore_eos=True, temperature=1.0, seed=length)
        yield Request(f"{length} tokens of a prompt", prompt, params)


def _alone(runtime: Runtime, request: Request) -> tuple[int, ...]:
    (answer,) = _decode(runtime, "plain", [request], cancels=False).values()
    return answer


def _run(
    runtime: Runtime,
    name: str,
    groups: Iterable[Sequence[Request]],
    plain: dict[str, tuple[int, ...]],
    *,
    cancels: bool = False,
) -> Sweep:
    sweep = Sweep(name)
    for group in groups:
        sweep.compare(runtime, _decode(runtime, name, group, cancels=cancels), plain)
    return sweep


def _decode(runtime: Runtime, sweep: str, group: Sequence[Request], *, cancels: bool) -> dict[str, tuple[int, ...]]:
    """The answers of requests that decode together, by name; with `cancels` every other one is cancelled, and left out.

    Raises LowlatError where one fails.
    """
    tokens = dict[str, list[int]]()
    for request in group:
        name = runtime.submit(request.prompt, request.params, request_id=f"{sweep}{SEPARATOR}{request.name}")
        tokens[name] = []
    cancelled = set(list(tokens)[1::2]) if cancels else set[str]()
    waiting = set(cancelled)
    while runtime.busy:
        for output in runtime.step():
            if output.error is not None:
                raise LowlatError(f"{output.request_id} failed: {output.error}")
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                waiting.discard(output.request_id)
        for name in [name for name in waiting if len(tokens[name]) >= 2]:
            waiting.discard(name)
            runtime.cancel(name)
    return {name: tuple(found) for name, found in tokens.items() if name not in cancelled}


def _difference(name: str, expected: Sequence[int], found: Sequence[int]) -> Difference:
    """Where two answers part."""
    pairs: list[tuple[int | None, int | None]] = list(zip(expected, found, strict=False))
    place = next((place for place, (left, right) in enumerate(pairs) if left != right), len(pairs))
    return Difference(
        name,
        place,
        expected[place] if place < len(expected) else None,
        found[place] if place < len(found) else None,
    )
