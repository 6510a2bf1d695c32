"""Widths of steps: what is chosen pays where acceptance is simulated, programs lower, drafts are of fixed widths."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import load_fake
from lowered import Pair
from recording import prompt_of, run_all
from stages import later
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.executors.lowering.binding import Binding
from lowlat.executors.lowering.lower import lower
from lowlat.executors.workspace import SharedWorkspace
from lowlat.graphs import Bucket, BucketLadder, BufferSet
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.reference.step.widths import MAX_WIDTH, choose_width, join_widths
from lowlat.kernels.toolchain.digests import source_digest
from lowlat.kernels.toolchain.kernel import H200
from lowlat.step import width_times
from lowlat.step.adaptive import build_adaptive

DEMO = Path(__file__).parents[2] / "lowlat" / "demo"
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 128, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
INTS: dict[str, Any] = {"dtype": torch.int32}
# us of a step: without drafts, of the draft model's run, of a draft, of a row; near an H200's
COSTS = {"bundled": (166, 18, 25, 3), "llama": (3770, 60, 200, 15), "mixture": (1790, 60, 110, 250)}
WAITING = 32
Right = Callable[[int, random.Random], int]  # by position of the text: how many of seven drafts would be right


def rates(*each: float) -> Right:
    """Acceptance of drafts by position, the last for all behind it."""

    def right(place: int, source: random.Random) -> int:
        count = 0
        while count < MAX_WIDTH and source.random() < each[min(count, len(each) - 1)]:
            count += 1
        return count

    return right


def regimes(first: Right, second: Right, period: int) -> Right:
    """Two in turn."""
    return lambda place, source: (first, second)[place // period % 2](place, source)


class Steps:
    """A slot whose steps are chosen, on a text of which it is known where drafts are right. Times are in us."""

    def __init__(self, name: str, right: Right, length: int = 4000, request: int = 400) -> None:
        base, self.run, draft, row = COSTS[name]
        self.fixed = [base, *(base + self.run + (draft + row) * width for width in range(1, MAX_WIDTH + 1))]
        source = random.Random(3)
        self.text, self.request = [right(place, source) for place in range(length)], request

    def at_width(self, width: int) -> float:
        """Tokens a us of a fixed width."""
        place = steps = 0
        while place < len(self.text):
            place, steps = place + 1 + min(self.text[place], width), steps + 1
        return place / (steps * self.fixed[width])

    def chosen(self) -> float:
        """Tokens a us of chosen widths."""
        state: dict[str, Any] = {
            "width_odds": torch.zeros(2, MAX_WIDTH, 2, **INTS),
            "width_seen": torch.zeros(1, 2, **INTS),
            "width_policy": torch.zeros(4, **INTS),
        }
        lengths, extended = torch.zeros(1, **INTS), torch.zeros(1, **INTS)
        costs = [1000 * cost for cost in (*self.fixed, self.fixed[0] + self.run)]
        costs[0] += 1000 * self.run // WAITING
        given: dict[str, Any] = {
            "active": torch.ones(1, **INTS),
            "slot_ints": torch.zeros(1, NUM_INTS, dtype=torch.int64),
            "width_bounds": torch.tensor([0, MAX_WIDTH], **INTS),
            "width_costs": torch.tensor([costs], **INTS),
        }
        given["slot_ints"][0, DRAFT_LIMIT] = MAX_WIDTH
        choice, place, time_us, joined = torch.zeros(1, **INTS), 0, 0, -self.request
        while place < len(self.text):
            if place - joined >= self.request:
                joined, lengths[0] = place, 10 + place
                live = torch.ones(1, dtype=torch.uint8)
                join_widths(torch.zeros(1, **INTS), lengths, live, extended=extended, **state)
            choose_width(
                lengths=lengths, extended=extended, **given, **state, width_choice=choice, row=0, most_waiting=WAITING
            )
            body = int(choice)
            width = body if body <= MAX_WIDTH else 0
            if body:
                extended[0] = lengths[0] - 1
            place += 1 + min(self.text[place], width)
            lengths[0], time_us = 10 + place, time_us + (costs[body] // 1000 if body else self.fixed[0])
        return place / time_us


@pytest.mark.parametrize(
    ("name", "right", "least"),
    [
        ("bundled", rates(0.05), 0.99),
        later("bundled", rates(0.7, 0.75, 0.8), 0.985),
        ("llama", rates(0.75), 0.985),
        later("llama", rates(0.15), 0.98),
        later("mixture", rates(0.1), 0.99),
        ("mixture", rates(0.6), 0.985),
        ("bundled", regimes(rates(0.05), rates(0.95), 600), 1.1),
    ],
)
def test_what_is_chosen_comes_near_the_best_width(name: str, right: Right, least: float) -> None:
    """And goes beyond it where texts change; without drafts it would never be more than a hundredth faster."""
    steps = Steps(name, right)
    found, fixed = steps.chosen(), [steps.at_width(width) for width in range(MAX_WIDTH + 1)]
    assert found > least * max(fixed), (found / max(fixed), fixed.index(max(fixed)))
    assert found > 0.99 * fixed[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A small target and a draft model."""
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


def load(pair: PairPaths, depth: Any = 5, *, adaptive: bool = True, **options: Any) -> Runtime:
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=depth, adaptive_width=adaptive, strict=True)
    return Runtime.load(pair.target, config, **{**OPTIONS, "dtype": "float32", **options})


def test_drafts_are_those_of_a_fixed_width(pair: PairPaths) -> None:
    """With all positions run over at once or one after the other: acceptance is what it was, draft by draft."""
    found = []
    sampling = SamplingParams(max_tokens=40, temperature=0.6, seed=2)
    for adaptive in (False, True):
        with load(pair, 3, adaptive=adaptive, max_batch=1) as runtime:
            for length in (9, 16):
                runtime.submit(prompt_of(length), sampling)
            run_all(runtime, 3)
            found.append(runtime.summary()["eagle_speculation"])
    assert found[0] == found[1] and found[0]["total_accepted_tokens"] > 10


def test_ahead_and_in_a_loop_tokens_are_those_without_drafts(pair: PairPaths) -> None:
    def run(runtime: Runtime) -> list[list[int]]:
        kinds = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "max_draft_tokens": 1})
        names = [
            runtime.submit(prompt_of(1 + 17 * number), SamplingParams(seed=number, max_tokens=20, **kinds[number % 3]))
            for number in range(5)
        ]
        tokens = run_all(runtime)
        return [tokens[name] for name in names]

    with Runtime.load(pair.target, **{**OPTIONS, "dtype": "float32"}) as runtime:
        expected = run(runtime)
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, adaptive_width=True, strict=True)
    options = {name: value for name, value in OPTIONS.items() if name != "device"}
    runtime, device = load_fake(pair.target, config, device_loop=True, lead=3, dtype="float32", **options)
    with runtime:
        assert run(runtime) == expected and device.count("loop")


def test_positions_that_wait_are_run_over_before_there_are_too_many(pair: PairPaths) -> None:
    """Steps of width zero leave them, and one in so many runs the draft model; drafts behind it are as ever."""
    with load(pair, max_batch=2) as runtime:
        runtime.submit(prompt_of(20), SamplingParams(max_tokens=90, temperature=0.0))
        state, waiting = runtime.executor.state, list[int]()
        while runtime.busy:
            runtime.step(0 if len(waiting) < 70 else 5)
            waiting.append(int(state["lengths"][0] - 1 - state["extended"][0]))
        assert max(waiting[:70]) == runtime.geometry.num_waiting == 32 and waiting[:70].count(1) >= 2
        assert runtime.summary()["steps_by_width"][0] == 69
        assert runtime.summary()["eagle_speculation"]["total_accepted_tokens"] > 0


def test_all_programs_lower() -> None:
    """Bodies have no more launches than steps of their width but for what brings their rows; a choice is two."""
    pair = Pair(DEMO / "target", DEMO / "head", adaptive_width=True, num_speculative_tokens=3)
    ladder, counts = BucketLadder([2], {depth: depth + 1 for depth in range(4)}, adaptive=True), {}
    for bucket in ladder.programs:
        program = build_adaptive(pair.geometry, bucket)
        buffers = BufferSet(program.buffers.values(), torch.device("cpu"), program.constants)
        workspace = SharedWorkspace(torch.device("cpu"))
        binding = Binding(program, buffers, pair.weights, H200, workspace, None, switches=True)
        calls = [call for group in lower(binding) for call in group.kernel_calls]
        counts[bucket] = len(calls)
        unlinked = [call.kernel.name for call in calls if not call.kernel.linked]
        assert len(unlinked) == bucket.chooses
    for bucket in ladder.buckets:
        assert counts[bucket] == 2
        for body in bucket.bodies[1:-1]:
            assert counts[body] <= len(pair.lower(body.num_speculative_tokens, body.batch).calls) + 5
        assert counts[bucket.bodies[0]] < len(pair.lower(0, bucket.batch).calls)


def test_what_cannot_be_chosen_is_refused(pair: PairPaths) -> None:
    with pytest.raises(ConfigError, match=r"adaptive_width .* tree asks"):
        SpeculativeConfig(model="x", num_speculative_tokens=1, adaptive_width=True, tree=[[0]])
    with pytest.raises(ConfigError, match=r"adaptive_width .* num_speculative_tokens is 0"):
        SpeculativeConfig(model="x", num_speculative_tokens=0, adaptive_width=True)
    automatic: Any = {"num_speculative_tokens": "auto"}
    config = SpeculativeConfig(model=pair.head, **automatic, text_drafts="suffix")
    assert (config.num_speculative_tokens, config.adaptive_width) == (7, True)
    with pytest.raises(ConfigError, match=r"adaptive_width .* text_drafts 'suffix'"):
        Runtime.load(pair.target, config, **OPTIONS)
    with pytest.raises(ConfigError, match="num_speculative_tokens must be an integer, got 'automatic'"):
        replace(config, num_speculative_tokens="automatic")


def test_times_are_kept_for_the_same_facts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read, or fits no longer, is measured anew."""
    bucket = Bucket(1, 3, 2, chooses=True)
    measured: list[int] = []

    def by_time(*_: Any) -> dict[Bucket, list[float]]:
        measured.append(1)
        return {bucket: [1.0, 1.5, 1.75, 1.25]}

    monkeypatch.setattr(width_times, "by_time", by_time)
    monkeypatch.setattr(width_times, "cache_directory", lambda: tmp_path)

    def times(**facts: Any) -> Any:
        return width_times._kept_times(None, [bucket], 8, facts)  # type: ignore[arg-type]

    assert times(card="a") == times(card="a") == {bucket: [1.0, 1.5, 1.75, 1.25]}
    assert len(measured) == 1
    times(card="b")
    assert len(measured) == 2
    for file in (tmp_path / "widths").iterdir():
        values = json.loads(file.read_text())
        file.write_text(json.dumps({**values, "times_ms": {str(bucket): [1.0]}}) if "a" in values["facts"] else "{")
    times(card="a")
    times(card="b")
    assert len(measured) == 4
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: type("Card", (), {"name": "A Card"}))
    stand_in: Any = type("Executor", (), {"device": "cuda"})
    geometry = Pair(DEMO / "target", DEMO / "head", adaptive_width=True, num_speculative_tokens=3).geometry
    digests = [source_digest(), "of other kernels", "of other kernels"]
    for digest in digests:
        monkeypatch.setattr("lowlat.kernels.toolchain.digests.source_digest", lambda digest=digest: digest)
        times(**width_times._facts(stand_in, geometry, fuse=True))
    assert len(measured) == 6
