"""This module has the metrics of decoding and speculation: counters, their summaries, and the book that keeps them.

Names are those of EAGLE and the serving engines; accepted totals exclude the bonus token.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from lowlat.errors import RequestError
from lowlat.options.speculative import MAX_SPECULATIVE_TOKENS

__all__ = ["MetricsBook", "RequestMetrics", "RuntimeMetrics", "SpeculativeDecodingStats"]

MAX_ENDED = 1000
SOURCE_COUNTS = ("steps", "draft_tokens", "accepted_tokens")
REPORTED = (
    *("num_drafts", "total_draft_tokens", "total_accepted_tokens", "mean_acceptance_rate", "mean_acceptance_length"),
    *("fraction_accepted_ge2", "num_rewound_tokens", "rewind_steps", "accepted_length_histogram"),
    *("acceptance_by_position", "drafted_by_position", "accepted_by_position"),
)
NUM_LENGTHS = MAX_SPECULATIVE_TOKENS + 1  # 0 to 6, and 7 or more


@dataclass
class SpeculativeDecodingStats:
    """SpeculativeDecodingStats counts how often the target agreed with the drafts; add with `record`, read at any time.

    num_drafts                 steps in which at least one draft token was verified
    total_draft_tokens         draft tokens verified in them
    total_accepted_tokens      of those, accepted; the bonus token is not counted
    num_accepted_ge2           drafts of which at least two tokens were accepted
    num_rewound_tokens         draft tokens verified and rejected
    rewind_steps               drafts of which at least one token was rejected
    accepted_length_histogram  drafts by accepted tokens: 0 to 6, and 7 or more
    drafted_by_position        drafts that verified a token at depth 1, 2, ... (index 0 is depth 1)
    accepted_by_position       of those, drafts that accepted it
    by_source                  drafts, draft tokens and accepted tokens, by the name of their source: a method, the text
                               (suffix) beside a draft model, or the grammar that forced them
    simulated                  whether acceptance was simulated for a benchmark; the text means nothing then

    Every ratio is 0.0 while there is nothing to divide by.
    """

    num_drafts: int = 0
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0
    num_accepted_ge2: int = 0
    num_rewound_tokens: int = 0
    rewind_steps: int = 0
    accepted_length_histogram: list[int] = field(default_factory=lambda: [0] * NUM_LENGTHS)
    drafted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_SPECULATIVE_TOKENS)
    accepted_by_position: list[int] = field(default_factory=lambda: [0] * MAX_SPECULATIVE_TOKENS)
    by_source: dict[str, list[int]] = field(default_factory=dict)
    simulated: bool = False

    def record(
        self, drafted: int, accepted: int, *, drafted_depth: int | None = None, source: str | None = None
    ) -> None:
        """Add one slot's step; a step without verified drafts changes nothing.

        drafted        draft tokens verified, the root excluded; for a tree all nodes
        accepted       tokens of the accepted path, root and bonus excluded
        drafted_depth  depth of the tree's deepest verified node; None: a chain, whose depth is `drafted`
        source         the drafts' source; None: it is not counted by source
        Raises ValueError for counts that no step can have; nothing is added then.
        """
        depth = drafted if drafted_depth is None else drafted_depth
        if not 0 <= accepted <= depth <= drafted or (drafted > 0 and depth == 0):
            raise ValueError(
                f"a step cannot accept {accepted} of {drafted} draft tokens of depth {depth}: "
                "0 <= accepted <= depth <= drafted must hold"
            )
        if drafted == 0:
            return
        self.num_drafts += 1
        self.total_draft_tokens += drafted
        self.total_accepted_tokens += accepted
        self.num_accepted_ge2 += accepted >= 2
        self.num_rewound_tokens += drafted - accepted
        self.rewind_steps += accepted < drafted
        self.accepted_length_histogram[min(accepted, NUM_LENGTHS - 1)] += 1
        if source is not None:
            self._add(source, (1, drafted, accepted))
        for position in range(min(depth, MAX_SPECULATIVE_TOKENS)):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted

    def _add(self, source: str, counts: Sequence[int]) -> None:
        known = self.by_source.get(source, [0] * len(SOURCE_COUNTS))
        self.by_source[source] = [a + b for a, b in zip(known, counts, strict=True)]

    def merge(self, other: "SpeculativeDecodingStats") -> None:
        """Add another object's counts, for totals over requests."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, list):
                setattr(self, item.name, [a + b for a, b in zip(mine, theirs, strict=True)])
            elif not isinstance(mine, dict):
                setattr(self, item.name, mine | theirs if isinstance(mine, bool) else mine + theirs)
        for source, counts in other.by_source.items():
            self._add(source, counts)

    def snapshot(self) -> "SpeculativeDecodingStats":
        """Return a copy that later records do not change."""
        return deepcopy(self)

    @property
    def mean_acceptance_rate(self) -> float:
        """Accepted draft tokens over verified ones."""
        return _ratio(self.total_accepted_tokens, self.total_draft_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a drafted step, bonus included: 1 + accepted / drafts; 0.0 without drafts."""
        return 1.0 + self.total_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def fraction_accepted_ge2(self) -> float:
        """Share of drafts of which at least two tokens were accepted."""
        return _ratio(self.num_accepted_ge2, self.num_drafts)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Of the drafts that verified a token at depth 1, 2, ..., the share that accepted it."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [_ratio(accepted, drafted) for accepted, drafted in pairs]

    def to_dict(self, num_steps: int | None = None) -> dict[str, Any]:
        """Return counts and ratios as JSON values: the block `eagle_speculation`.

        num_steps  all steps: those without drafts are reported as source `none`; None: they are not reported
        """
        sources = {name: dict(zip(SOURCE_COUNTS, counts, strict=True)) for name, counts in self.by_source.items()}
        if num_steps is not None and num_steps > self.num_drafts:
            sources["none"] = dict.fromkeys(SOURCE_COUNTS, 0) | {SOURCE_COUNTS[0]: num_steps - self.num_drafts}
        found = {name: getattr(self, name) for name in REPORTED}
        lists = {name: list(value) for name, value in found.items() if isinstance(value, list)}
        return {**found, **lists, "by_source": sources, "simulated": self.simulated}


@dataclass(frozen=True)
class RequestMetrics:
    """One request's metrics at the time of the call; times not reached yet are None.

    prompt_tokens          tokens of the prompt
    completion_tokens      tokens generated
    reasoning_tokens       of these, tokens of reasoning and its markers, if the answer is parsed
    cached_prompt_tokens   of the prompt, tokens whose KV was reused from an earlier request
    queued_s               from submission to a slot
    prefill_s              from the slot to the first token, which comes out of prefill
    time_to_first_token_s  from submission to the first token
    decode_s               from the first token to the last so far
    tokens_per_s           tokens after the first over decode_s; 0.0 before there is any
    num_steps              decode steps in which the request was active
    finish_reason          None while it runs
    seed                   the seed that reproduces it
    speculation            None when no draft token was verified
    num_partial_steps      of the steps, those that attended to a part of the KV cache (SpecPV): their tokens are lossy
    failed_checks          failed checks of its steps, by kind, if checks are made
    """

    request_id: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_prompt_tokens: int = 0
    queued_s: float | None = None
    prefill_s: float | None = None
    time_to_first_token_s: float | None = None
    decode_s: float | None = None
    num_steps: int = 0
    finish_reason: str | None = None
    seed: int | None = None
    speculation: SpeculativeDecodingStats | None = None
    num_partial_steps: int = 0
    failed_checks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "completion_tokens", "cached_prompt_tokens", "num_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("queued_s", "prefill_s", "time_to_first_token_s", "decode_s"):
            value = getattr(self, name)
            if value is not None and not value >= 0.0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if self.cached_prompt_tokens > self.prompt_tokens:
            raise ValueError(
                f"cached_prompt_tokens {self.cached_prompt_tokens} exceed prompt_tokens {self.prompt_tokens}"
            )
        stats = self.speculation
        # a copy, since the caller goes on recording into its own
        object.__setattr__(self, "speculation", stats.snapshot() if stats and stats.num_drafts else None)

    @property
    def decoded_tokens(self) -> int:
        """Tokens generated by decode steps: all but the first."""
        return max(self.completion_tokens - 1, 0)

    @property
    def tokens_per_s(self) -> float:
        """Tokens generated for each second of decoding."""
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values.

        `eagle_speculation` is absent if speculation did not run, `specpv` if all steps were exact, and `failed_checks`
        if there were none.
        """
        blocks = ("speculation", "num_partial_steps", "failed_checks")
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in blocks}
        values["tokens_per_s"] = self.tokens_per_s
        if self.num_partial_steps:
            values["specpv"] = {"lossy": True, "partial_steps": self.num_partial_steps}
        if self.failed_checks:
            values["failed_checks"] = dict(self.failed_checks)
        return values | _speculation_block(self.speculation, self.num_steps)


@dataclass(frozen=True)
class RuntimeMetrics:
    """RuntimeMetrics has a Runtime's totals over all requests, ended and live.

    num_requests           requests ended, for any reason
    num_live               requests queued or running
    finish_reasons         finish reason -> requests that ended with it
    prompt_tokens, completion_tokens, cached_prompt_tokens, num_steps, decode_s
                           sums over requests ended and live
    decoded_tokens         of the completions, the tokens after each one's first
    speculation            None when no draft token was verified
    """

    num_requests: int = 0
    num_live: int = 0
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    decoded_tokens: int = 0
    num_steps: int = 0
    decode_s: float = 0.0
    speculation: SpeculativeDecodingStats | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of a request's decoding, on average; several requests may share a second."""
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; `eagle_speculation` is absent when speculation did not run."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "speculation"}
        values["finish_reasons"] = dict(self.finish_reasons)
        values["tokens_per_s"] = self.tokens_per_s
        return values | _speculation_block(self.speculation, self.num_steps)


class _Sums:
    """Running totals over requests."""

    names = ("prompt_tokens", "completion_tokens", "cached_prompt_tokens", "decoded_tokens", "num_steps")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(self.names, 0)
        self.decode_s = 0.0
        self.speculation = SpeculativeDecodingStats()

    def add(self, metrics: RequestMetrics) -> None:
        for name in self.names:
            self.counts[name] += getattr(metrics, name)
        self.decode_s += metrics.decode_s or 0.0
        if metrics.speculation is not None:
            self.speculation.merge(metrics.speculation)


class MetricsBook:
    """MetricsBook keeps the latest metrics of live requests and of the last `max_ended` ended, and totals over all.

    Not safe to call from several threads at once.
    """

    def __init__(self, max_ended: int = MAX_ENDED) -> None:
        if max_ended < 0:
            raise ValueError(f"max_ended must not be negative, got {max_ended}")
        self._max_ended = max_ended
        self._live: dict[str, RequestMetrics] = {}
        self._ended: OrderedDict[str, RequestMetrics] = OrderedDict()
        self._finish_reasons: dict[str, int] = {}
        self._num_requests = 0
        self._sums = _Sums()

    def update(self, metrics: RequestMetrics) -> None:
        """Record a live request's newest metrics; a finish reason ends it.

        Raises ValueError for a request that has ended already.
        """
        request_id = metrics.request_id
        if request_id in self._ended:
            raise ValueError(f"request {request_id!r} has ended already")
        if metrics.finish_reason is None:
            self._live[request_id] = metrics
            return
        self._live.pop(request_id, None)
        self._ended[request_id] = metrics
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        self._num_requests += 1
        reason = metrics.finish_reason
        self._finish_reasons[reason] = self._finish_reasons.get(reason, 0) + 1
        self._sums.add(metrics)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._ended

    def get(self, request_id: str) -> RequestMetrics:
        """Return a request's metrics. Raises RequestError for one that is unknown or ended too long ago."""
        found = self._live.get(request_id) or self._ended.get(request_id)
        if found is None:
            raise RequestError(
                f"no metrics of request {request_id!r:.80}: it is unknown, "
                f"or more than {self._max_ended} requests ended after it"
            )
        return found

    def totals(self) -> RuntimeMetrics:
        """Return the totals over all requests ended, kept or not, and the live ones as last updated."""
        sums = deepcopy(self._sums)
        for metrics in self._live.values():
            sums.add(metrics)
        return RuntimeMetrics(
            num_requests=self._num_requests,
            num_live=len(self._live),
            finish_reasons=dict(self._finish_reasons),
            decode_s=sums.decode_s,
            speculation=sums.speculation if sums.speculation.num_drafts else None,
            **sums.counts,
        )


def _speculation_block(stats: SpeculativeDecodingStats | None, num_steps: int) -> dict[str, Any]:
    return {"eagle_speculation": stats.to_dict(num_steps)} if stats is not None and stats.num_drafts else {}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
