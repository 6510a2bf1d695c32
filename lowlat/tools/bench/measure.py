"""This module measures one case on a loaded runtime: it submits requests, times steps, and summarises them in a row.

It runs steps like any caller, by `Runtime.step`.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from lowlat.checkpoint.files import find_text
from lowlat.engine.figures.perf import PerfCounters, steps_by_width
from lowlat.engine.metrics import SpeculativeDecodingStats
from lowlat.engine.runtime import Runtime
from lowlat.errors import LowlatError
from lowlat.options.acceptance import expected_accept_length
from lowlat.options.request import SamplingParams, StepOutput
from lowlat.options.runtime import RuntimeConfig
from lowlat.step.variants import bodies_of, is_choice
from lowlat.tools.bench.prompts import Prompts
from lowlat.tools.bench.results import ActiveSlots, Memory, Perf, Repeat, Row, Speculation, Spread
from lowlat.tools.bench.scenarios import Case, Scenario
from lowlat.tools.bench.step_bytes import step_bytes

__all__ = ["CaseRun", "Samples", "room_of"]

CHURN_FACTOR = 4  # requests for each slot in a churning repeat
CANCELLED = 8  # every eighth of them is cancelled half-way
LOOP_ROOM = 512  # steps that a loop on the device may run before the host stops it
Tiles = dict[str, dict[str, int]]  # counts by kind of layer
PER_CHUNK = RuntimeConfig.prefill_chunk  # a prompt may run a chunk at a time while others decode (max_stall_ms)


def room_of(case: Case, scenario: Scenario, *, device_loop: bool, strict: bool = False) -> int:
    """Return the tokens after the prompt that a request may need: in warm-up, in steps, and while it waits for others.

    strict  requests also draft while they wait
    """
    churns = scenario.traffic == "churn"
    chunks = 1 if scenario.reuse_prompts else -(-case.context // PER_CHUNK)  # chunks that a shared prefix does not save
    waiting = case.batch * (2 + chunks) * (case.num_speculative_tokens + 1 if strict else 1)
    steps = scenario.warm_up + (0 if churns else scenario.steps) + 4 + (LOOP_ROOM if device_loop else 0)
    return max(scenario.steps if churns else 0, waiting + steps * (case.num_speculative_tokens + 1))


@dataclass
class Samples:
    """The timed steps of one repeat.

    step_ms   between a step's outputs and the next one's
    tokens    new tokens of all requests together
    active    requests with a new token
    lengths   mean tokens of an active request before the step
    first_ms  from the submission of a request without a shared prefix to its first token
    """

    step_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    active: list[int] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    stats: SpeculativeDecodingStats = field(default_factory=SpeculativeDecodingStats)
    perf: PerfCounters = field(default_factory=PerfCounters)
    tiles: Tiles = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all requests together."""
        return 1e3 * sum(self.tokens) / sum(self.step_ms)

    @property
    def token_ms(self) -> list[float]:
        """One sample for each token: its step's time over the mean new tokens of an active request in that step."""
        figures = zip(self.step_ms, self.tokens, self.active, strict=True)
        return [ms * active / tokens for ms, tokens, active in figures for _ in range(tokens)]

    def add(self, elapsed_ms: float, steps: Sequence[dict[str, int]], lengths: dict[str, int]) -> None:
        """Add steps whose outputs came together; lengths, by request, grow by the new tokens."""
        for step in steps:
            self.step_ms.append(elapsed_ms / len(steps))
            self.tokens.append(sum(step.values()))
            self.active.append(len(step))
            self.lengths.append(fmean(lengths[name] for name in step))
            for name, count in step.items():
                lengths[name] += count

    def summary(self) -> Repeat:
        """Return the repeat's figures."""
        spread = Spread.of(self.step_ms)
        drafted = self.stats.num_drafts > 0
        return Repeat(
            ms_per_step_p50=spread.p50,
            ms_per_step_p99=spread.p99,
            tokens_per_s=round(self.tokens_per_s, 3),
            accept_length=self.stats.mean_acceptance_length if drafted else None,
            time_to_first_token_ms=Spread.of(self.first_ms).p50 if self.first_ms else None,
        )


class CaseRun:
    """One case of a scenario on a runtime of sufficient size; call `repeat` for each repeat, then `row`.

    wall_gb_per_s  the GPU's memory bandwidth; None without a GPU
    """

    def __init__(
        self,
        runtime: Runtime,
        case: Case,
        scenario: Scenario,
        prompts: Prompts,
        *,
        temperature: float = 0.0,
        wall_gb_per_s: float | None = None,
    ) -> None:
        self._runtime, self._case, self._scenario, self._prompts = runtime, case, scenario, prompts
        self._temperature, self._wall = temperature, wall_gb_per_s
        self._samples: list[Samples] = []
        self._tokens: dict[str, list[int]] | None = {} if scenario.alike else None
        self._first: list[list[int]] = []  # tokens of each request in the first repeat
        self._experts: list[float] = []

    def repeat(self) -> None:
        """Submit the requests, time their steps, and end them. Raises LowlatError if one fails."""
        run = self._churn if self._scenario.traffic == "churn" else self._steady
        self._samples.append(run())

    def profile(self, num_steps: int) -> dict[str, Any]:
        """Record steps on the GPU and summarise them by stage, as `lowlat profile --json`. Raises LowlatError."""
        from lowlat.tools.profile.recording import profile_steps

        lengths = self._begin()
        try:
            return profile_steps(self._runtime, lengths, num_steps, self._wall).to_dict()
        finally:
            self._end(lengths)

    @property
    def samples(self) -> tuple[Samples, ...]:
        """The timed steps, repeat by repeat."""
        return tuple(self._samples)

    def row(self) -> Row:
        """Summarise all repeats in one row."""
        case, runtime = self._case, self._runtime
        pooled = [ms for samples in self._samples for ms in samples.step_ms]
        active = [count for samples in self._samples for count in samples.active]
        length = fmean(each for samples in self._samples for each in samples.lengths)
        num_tokens = sum(sum(samples.tokens) for samples in self._samples)
        first = [ms for samples in self._samples for ms in samples.first_ms]
        stats = SpeculativeDecodingStats(simulated=runtime.simulated)
        for samples in self._samples:
            stats.merge(samples.stats)
        perf = runtime.perf()
        perf = perf.since(perf)  # without counts before the timed steps
        for samples in self._samples:
            perf = perf.plus(samples.perf)
        tiles = reduce(_sum_tiles, (samples.tiles for samples in self._samples))
        times = Spread.of(pooled)
        experts = fmean(self._experts) if self._experts else None
        chosen = steps_by_width(runtime.ladder, perf.undrafted_steps, stats).get("steps_by_width")
        moved = self._bytes([length] * max(1, round(fmean(active))), experts, chosen)
        floor = None if self._wall is None else moved / self._wall / 1e6
        imposed = runtime.geometry.simulated_acceptance
        return Row(
            case=case,
            simulated_accept_length=None
            if imposed is None
            else round(expected_accept_length(imposed, case.num_speculative_tokens), 4),
            num_steps=len(pooled),
            num_tokens=num_tokens,
            mean_context=round(length, 1),
            ms_per_step=times,
            ms_per_token=Spread.of([ms for samples in self._samples for ms in samples.token_ms]),
            time_to_first_token_ms=Spread.of(first) if first else None,
            tokens_per_s=round(1e3 * num_tokens / sum(pooled), 3),
            effective_accept_length=round(num_tokens / sum(active), 5),
            active_slots=ActiveSlots(min=min(active), mean=round(fmean(active), 4), max=max(active)),
            bytes_per_step=moved,
            distinct_experts=experts,
            wall_gb_per_s=self._wall,
            floor_ms=floor,
            share_of_wall=None if floor is None else floor / times.p50,
            memory=_memory(runtime.device_choice.device),
            eagle_speculation=Speculation(**stats.to_dict(sum(active))) if stats.num_drafts else None,
            repeats=tuple(samples.summary() for samples in self._samples),
            perf=Perf(**perf.to_dict()),
            steps_by_width=chosen,
            mean_width=None if chosen is None else round(_mean_length(chosen), 4),
            numerics=runtime.numerics,
            attention_tiles=tiles,
        )

    def _bytes(self, lengths: Sequence[float], experts: float | None, chosen: Sequence[int] | None) -> int:
        """Return the bytes of a step of active requests of these lengths; a mean over the chosen draft lengths."""
        runtime = self._runtime
        bucket = runtime.ladder.choose(len(lengths), self._case.num_speculative_tokens)
        if chosen is None:
            return step_bytes(runtime, bucket, lengths, experts)
        bodies = zip(bodies_of(bucket), chosen, strict=False)
        total = sum(count * step_bytes(runtime, body, lengths, experts) for body, count in bodies if count)
        return round(total / sum(chosen))

    def _params(self, max_tokens: int, number: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number, temperature=self._temperature)

    def _steady(self) -> Samples:
        """Decode all requests side by side, first to warm up, then timed."""
        read = self._read_prompts() if self._scenario.reuse_prompts and not self._samples else []
        lengths = self._begin()
        samples = Samples(first_ms=[*read, *self._first_token_ms(lengths)])
        self._time(self._scenario.warm_up, Samples(), lengths, self._count_experts)
        before, perf, tiles = self._stats(lengths), self._runtime.perf(), _tiles(self._runtime)
        self._time(self._scenario.steps, samples, lengths)
        samples.tiles = _sum_tiles(_tiles(self._runtime), tiles, -1)
        samples.stats, samples.perf = _since(before, self._stats(lengths)), self._runtime.perf().since(perf)
        self._end(lengths)
        self._compare(lengths)
        return samples

    def _compare(self, names: Iterable[str]) -> None:
        """Compare a repeat's tokens with those of the first one. Raises LowlatError if they differ."""
        if self._tokens is None:
            return
        brought = [self._tokens.pop(name, []) for name in names]
        for number, (own, first) in enumerate(zip(brought, self._first, strict=False)):
            place = next((at for at, pair in enumerate(zip(own, first, strict=False)) if pair[0] != pair[1]), None)
            if place is not None:
                raise LowlatError(
                    f"{self._case.name}: repeat {len(self._samples) + 1} brought request {number} other tokens than "
                    f"the first did, from token {place} on"
                )
        self._first = self._first or brought

    def _read_prompts(self) -> list[float]:
        """Read each prompt while nothing decodes, in a fraction of the time; returns ms to the first tokens."""
        first = []
        for prompt in self._prompts.of(self._case):
            name = self._runtime.submit(prompt, self._params(1, 0))
            while self._runtime.busy:
                self._take(self._runtime.step(), may_end=True)
            first += self._first_token_ms([name])
            if self._tokens is not None:
                self._tokens.pop(name, None)
        return first

    def _begin(self) -> dict[str, int]:
        """Submit the requests and step until each has a token, without drafts if allowed; returns their lengths."""
        runtime = self._runtime
        config = runtime.config
        room = room_of(self._case, self._scenario, device_loop=config.device_loop, strict=config.is_strict)
        prompts = self._prompts.of(self._case)
        lengths = {runtime.submit(each, self._params(room, seed)): len(each) for seed, each in enumerate(prompts)}
        waiting = set(lengths)
        while waiting:
            for step in self._take(runtime.step(None if config.is_strict else 0)):
                for name, count in step.items():
                    lengths[name] += count
                    waiting -= {name} if count else set()
        return lengths

    def _end(self, lengths: Iterable[str]) -> None:
        for name in lengths:
            self._runtime.cancel(name)
        while self._runtime.busy:
            self._runtime.step()

    def _time(
        self, count: int, samples: Samples, lengths: dict[str, int], after: Callable[[], None] | None = None
    ) -> None:
        """Run at least `count` steps; `after` is called after each call of `Runtime.step`."""
        start = time.perf_counter()
        while len(samples.step_ms) < count:
            outputs = self._runtime.step()
            now = time.perf_counter()
            steps = self._take(outputs)
            if steps:
                samples.add(1e3 * (now - start), steps, lengths)
                start = now
            if after is not None:
                after()
                start = time.perf_counter()

    def _churn(self) -> Samples:
        """Run more requests than slots, of many lengths, some cancelled, until all have ended."""
        if not self._samples:
            lengths = self._begin()
            self._time(self._scenario.warm_up, Samples(), lengths, self._count_experts)
            self._end(lengths)
        runtime, lengths, limits = self._runtime, {}, {}
        for number, (prompt, wanted) in enumerate(self._crowd()):
            name = runtime.submit(prompt, self._params(wanted, number))
            lengths[name] = len(prompt)
            if number % CANCELLED == CANCELLED - 1:
                limits[name] = len(prompt) + wanted // 2
        perf, tiles = runtime.perf(), _tiles(runtime)
        samples, start = Samples(), time.perf_counter()
        while runtime.busy:
            outputs = runtime.step()
            now = time.perf_counter()
            steps = self._take(outputs, may_end=True)
            if steps:
                samples.add(1e3 * (now - start), steps, lengths)
                start = now
            ended = {output.request_id for output in outputs if output.finish_reason is not None}
            for name in [name for name, limit in limits.items() if name in ended or lengths[name] >= limit]:
                del limits[name]
                if name not in ended:
                    runtime.cancel(name)
        samples.first_ms, samples.stats = self._first_token_ms(lengths), self._stats(lengths)
        samples.perf, samples.tiles = runtime.perf().since(perf), _sum_tiles(_tiles(runtime), tiles, -1)
        return samples

    def _crowd(self) -> list[tuple[list[int], int]]:
        """Return the prompts of a churning repeat, and the tokens of each request; the same in each repeat."""
        case, steps = self._case, self._scenario.steps
        draw = random.Random(f"{case.context} {case.batch}")
        count = CHURN_FACTOR * case.batch
        lengths = [draw.randint(max(1, case.context // 4), case.context) for _ in range(count)]
        wanted = [draw.randint(max(1, steps // 4), steps) for _ in range(count)]
        return list(zip(self._prompts.some(lengths), wanted, strict=True))

    def _take(self, outputs: Sequence[StepOutput], *, may_end: bool = False) -> list[dict[str, int]]:
        """Return tokens by request for each step in a call's outputs; a request's outputs are from successive steps.

        Raises LowlatError for a request that fails.
        """
        seen: Counter[str] = Counter()
        steps: list[dict[str, int]] = []
        for output in outputs:
            if output.finish_reason == "cancelled":
                continue
            if output.finish_reason is not None and (not may_end or output.error):
                reason = output.error or output.finish_reason
                raise LowlatError(f"{self._case.name}: {output.request_id} ended early: {reason}")
            if self._tokens is not None:
                self._tokens.setdefault(output.request_id, []).extend(output.token_ids)
            place = seen[output.request_id]
            seen[output.request_id] += 1
            if place == len(steps):
                steps.append({})
            steps[place][output.request_id] = len(output.token_ids)
        return steps

    def _first_token_ms(self, names: Iterable[str]) -> list[float]:
        found = [self._runtime.metrics(name) for name in names]
        times = [each.time_to_first_token_s for each in found if not each.cached_prompt_tokens]
        return [1e3 * seconds for seconds in times if seconds is not None]

    def _stats(self, names: Iterable[str]) -> SpeculativeDecodingStats:
        total = SpeculativeDecodingStats()
        for name in names:
            stats = self._runtime.metrics(name).speculation
            if stats is not None:
                total.merge(stats)
        return total

    def _count_experts(self) -> None:
        """Count the experts that rows chose; it waits for the device, so it is only for steps that are not timed."""
        if self._runtime.model_config.experts is None:
            return
        from lowlat.tools.profile.recording import chosen_experts

        scheduler = self._runtime.scheduler
        if scheduler.num_active:
            self._runtime.executor.synchronize()  # a step that is under way may choose another length
            bucket = scheduler.choose_bucket(self._runtime.num_speculative_tokens)
            if is_choice(bucket):
                bucket = bodies_of(bucket)[int(self._runtime.executor.state["draft_length_choice"])]
            self._experts.append(chosen_experts(self._runtime, bucket))


def _since(before: SpeculativeDecodingStats, after: SpeculativeDecodingStats) -> SpeculativeDecodingStats:
    """Return the statistics between two snapshots."""
    values: dict[str, Any] = {"simulated": after.simulated}
    for item in fields(SpeculativeDecodingStats):
        old, new = getattr(before, item.name), getattr(after, item.name)
        if isinstance(new, dict):
            values[item.name] = {
                name: [b - a for a, b in zip(old.get(name, [0] * len(counts)), counts, strict=True)]
                for name, counts in new.items()
            }
        elif isinstance(new, list):
            values[item.name] = [b - a for a, b in zip(old, new, strict=True)]
        elif item.name not in values:
            values[item.name] = new - old
    return SpeculativeDecodingStats(**values)


def _tiles(runtime: Runtime) -> Tiles:
    """Return the tiles that attention has walked since the load; empty if they are not counted."""
    found: Tiles = runtime.summary().get("attention_tiles", {})
    return found


def _sum_tiles(counts: Tiles, others: Tiles, sign: int = 1) -> Tiles:
    """Add or subtract counts of the same kinds of layers; the numbers of layers stay."""
    return {
        kind: {
            name: count if name == "layers" else count + sign * others.get(kind, {}).get(name, 0)
            for name, count in own.items()
        }
        for kind, own in counts.items()
    }


def _mean_length(counts: Sequence[int]) -> float:
    """Return the mean draft length; counts are by length."""
    return sum(length * count for length, count in enumerate(counts)) / max(sum(counts), 1)


def _memory(device: torch.device) -> Memory:
    taken = int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else None
    lines = (find_text(Path("/proc/self/status"), 1 << 16) or "").splitlines()
    peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
    return Memory(device_bytes=taken, host_peak_bytes=peak)
