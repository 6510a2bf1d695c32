"""Draft lengths priced by the experts that rows choose: what is counted, what that gains, and what a runtime learns."""

import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_length_replay import Replay, speeds
from fake_device import load_fake
from hypothesis import given
from hypothesis import strategies as st
from recording import run_all
from safetensors.torch import load_file, save_file
from tiny_models import make_target

from lowlat.engine.drafting import expert_prices
from lowlat.engine.runtime import Runtime
from lowlat.models.layer_spec import ExpertsSpec
from lowlat.options.request import SamplingParams
from lowlat.options.speculative import SpeculativeConfig
from lowlat.speculators import default_length
from lowlat.step.draft_length_costs import StepCosts
from lowlat.step.expert_counts import KNOWN_BEFORE, ExpertCounts, chosen_rows

DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive_width=True)
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 128, "block_size": 16}
EXPERTS = ExpertsSpec(num_experts=128, num_experts_per_token=4, inner_size=64)
BATCHES, LENGTHS = (1, 2, 4, 8), 7
UNIFORM = {slots: [EXPERTS.expected_distinct(slots * rows) for rows in range(1, LENGTHS + 2)] for slots in BATCHES}


def step(source: random.Random, slots: int, rows: int, near: float) -> list[list[int]]:
    """Rows of a step: each expert of a row is, with a chance, one of the row before, else any."""
    found = []
    for _ in range(slots):
        chosen: list[list[int]] = []
        for _ in range(rows):
            own: set[int] = set()
            while len(own) < 4:
                kept = chosen and source.random() < near
                own.add(source.choice(chosen[-1]) if kept else source.randrange(128))
            chosen.append(sorted(own))
        found.append([sum(1 << each for each in row) for row in chosen])
    return found


@given(st.lists(st.lists(st.sets(st.integers(0, 20), min_size=1), min_size=1, max_size=4), min_size=1, max_size=4))
def test_every_number_of_slots_and_rows_of_a_step_is_counted(sets: list[list[set[int]]]) -> None:
    counts, width = ExpertCounts(UNIFORM), max(map(len, sets))
    ids = torch.full((len(sets) + 1, width, 21), -1)
    for slot, rows in enumerate(sets):
        for row, each in enumerate(rows):
            ids[slot, row, : len(each)] = torch.tensor(sorted(each))
    found = chosen_rows(ids.view(-1, 21), len(sets) + 1, [*range(len(sets)), -1])
    assert [len(each) for each in found] == [len(each) for each in sets]
    counts.record(found)
    for slots in BATCHES:
        expected = counts.expected(slots)
        for num_rows in range(1, min(map(len, sets)) + 1):
            if slots <= len(sets):
                seen = {each for rows in sets[:slots] for row in rows[:num_rows] for each in row}
                known = KNOWN_BEFORE * UNIFORM[slots][num_rows - 1]
                assert expected[num_rows - 1] == pytest.approx((known + len(seen)) / (KNOWN_BEFORE + 1))


@pytest.mark.parametrize(("near", "slots", "rows"), [(0.0, 4, 4), (0.7, 1, 4), (0.7, 4, 2), (1.0, 1, 2)])
def test_steps_that_were_seen_tell_of_longer_and_larger_ones(near: float, slots: int, rows: int) -> None:
    """Better than what was known before, which holds of a router that spreads rows evenly."""
    source, counts = random.Random(7), ExpertCounts(UNIFORM)
    for _ in range(200):
        counts.record(step(source, slots, rows, near))
    for batch in (1, 4):
        true = [0.0] * (LENGTHS + 1)
        for _ in range(100):
            union = [0] * (LENGTHS + 1)
            for each in step(source, batch, LENGTHS + 1, near):
                seen = 0
                for row, chosen in enumerate(each):
                    seen |= chosen
                    union[row] |= seen
            true = [mean + each.bit_count() / 100 for mean, each in zip(true, union, strict=True)]
        learnt = counts.expected(batch)
        off = [abs(one - other) for one, other in zip(learnt, true, strict=True)]
        before = [abs(one - other) for one, other in zip(UNIFORM[batch], true, strict=True)]
        if near:
            assert sum(off) < (0.7 if batch > slots or near == 1.0 else 0.4) * sum(before), (batch, learnt, true)
        else:
            assert max(off) < 0.06 * max(true)


# ms of gpt-oss-120b on an H200 at 32K: S = 0, and S = 3 of 14.0 experts and of 4.0, between which lie those of others
PLAIN_MS, DRAFT_MS, EXPERT_MS = 2.05, 0.25, 0.111


def times_of(experts: Sequence[float]) -> list[float]:
    """Microseconds by draft length, of rows that choose so many experts by their number."""
    times = [PLAIN_MS + DRAFT_MS * length + EXPERT_MS * (each - 4.0) for length, each in enumerate(experts)]
    return [1000 * each for each in (*times, PLAIN_MS + 0.06)]


@pytest.mark.second
def test_prices_of_the_experts_that_rows_choose_gain_what_others_lose() -> None:
    """Of random texts, whose rows choose at random, prices are too high for texts whose rows choose alike."""
    alike = [4.0, 6.3, 8.3, 10.0, 11.5, 12.9, 14.2, 15.4]
    costs = StepCosts(times_of(UNIFORM[1]), [0.0] * 9, [*UNIFORM[1], 4.0], 1000 * EXPERT_MS)
    true = times_of(alike)
    assert costs.choosing(alike).base == pytest.approx(true)
    gains = []
    for chance in (0.65, 0.92):
        spent = []
        for known in (costs.base, true):
            replay = Replay(true, known)
            speeds(replay, coins(chance, 5))  # what is right is learnt first
            spent.append(speeds(replay, coins(chance, 7))[0])
        gains.append(spent[1] / spent[0] - 1)
    assert min(gains) > 0.02 and max(gains) > 0.05, gains


def coins(chance: float, seed: int) -> list[list[int]]:
    """A text at each of whose positions drafts are right until a coin says no."""
    source = random.Random(seed)
    return [[next((n for n in range(LENGTHS) if source.random() >= chance), LENGTHS) for _ in range(800)]]


def loaded(directory: Path, alike: bool, **options: Any) -> Runtime:
    """A small target whose router spreads its rows, or has all choose alike; drafts are copies of its text."""
    make_target(directory, "gpt_oss", num_local_experts=16, num_experts_per_tok=2)
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name in [each for each in weights if ".router." in each]:
        if alike:
            weights[name] = torch.zeros_like(weights[name]) if name.endswith("weight") else torch.arange(16.0)
        elif name.endswith("weight"):
            weights[name] = torch.randn(weights[name].shape)
    save_file({name: each.contiguous() for name, each in weights.items()}, path, metadata={"format": "pt"})
    return Runtime.load(directory, DRAFTS, device="cpu", **OPTIONS, **options)


def answers_of(runtime: Runtime) -> list[list[int]]:
    """Two requests' tokens."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    names = [runtime.submit([5, 6, 7, 8] * length, params) for length in (4, 5)]
    tokens = run_all(runtime)
    return [tokens[name] for name in names]


@pytest.mark.parametrize("alike", [True, False])
def test_a_runtime_learns_what_its_router_does(alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_prices, "DRAFTED_INTERVAL", 1)
    monkeypatch.setattr(expert_prices, "IDLE_INTERVAL", 8)
    with loaded(tmp_path, alike) as runtime:
        costs, state = runtime._steps._learner._costs, runtime.executor.state  # type: ignore[union-attr]
        before = state["draft_length_costs"].clone()
        weights = runtime.executor._weights.items()  # type: ignore[attr-defined]
        own = sum(weight.nbytes for name, weight in weights if ".experts." in name) / 16
        for bucket, each in costs.items():
            assert each.experts == [
                pytest.approx(16 * (1 - (14 / 16) ** (bucket.batch * rows))) for rows in (1, 2, 3, 4, 1)
            ]
            assert each.per_expert == own > 0
            assert each.base[3] - each.base[0] == pytest.approx(own * (each.experts[3] - each.experts[0]))
        for seed in range(2):
            runtime.submit([5, 6, 7, 8] * 4, SamplingParams(max_tokens=40, ignore_eos=True, seed=seed))
        num_steps = 0
        while runtime.busy and num_steps < 24:
            runtime.step()
            num_steps += 1
        found = runtime.summary()["experts_by_rows"]
        assert all(2.0 <= each <= 16.0 for each in found["1"]) and found["1"][0] == 2.0
        told = state["draft_length_costs"]
        expected = runtime._steps._learner._counts.expected(1)  # type: ignore[union-attr]
        uniform = 16 * (1 - (14 / 16) ** 4)
        assert expected[3] < 0.8 * uniform if alike else expected[3] > 0.5 * uniform
        if alike:
            longest, shortest = told[0, 0, 3] / before[0, 0, 3], told[0, 0, 0] / before[0, 0, 0]
            assert longest < shortest, "drafts are cheaper than where rows choose at random"


@pytest.mark.parametrize("device_loop", [False, True], ids=["steps", "loops"])
def test_looks_come_when_a_device_that_works_later_has_made_their_steps(
    device_loop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_prices, "DRAFTED_INTERVAL", 1)
    monkeypatch.setattr(expert_prices, "IDLE_INTERVAL", 8)
    with loaded(tmp_path, True) as runtime:
        expected = answers_of(runtime)
    runtime, device = load_fake(tmp_path, DRAFTS, device_loop=device_loop, lead=2, seed=3, **OPTIONS)
    looks = []
    with closing(runtime):
        peek = device.peek

        def watched(buffers: Sequence[torch.Tensor]) -> Any:
            head, waits = device.head, not device.idle
            look = peek([*buffers, device.state["ring_head"]])
            assert device.head == head and (look() is None) == waits, "a copy waits for nothing"
            looks.append((head + waits, look))
            return lambda: None if (found := look()) is None else found[:-1]

        monkeypatch.setattr(device, "peek", watched)
        assert answers_of(runtime) == expected
        device.synchronize()
        found = [(number, look()) for number, look in looks]
        assert all(each is not None and number <= int(each[-1]) <= device.head for number, each in found)
        if device_loop:
            assert looks, "of a loop one is made"
        else:
            assert len(looks) > 2 and runtime.summary()["experts_by_rows"]["1"][0] == 2.0


def test_loops_are_looked_at_one_at_a_time_and_nobody_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is queued after a loop: no other is, and no costs are told, before it has come."""
    with loaded(tmp_path, True) as runtime:
        learner: Any = runtime._steps._learner
        executor, bucket = runtime.executor, next(iter(learner._costs))
        peek, there, begun, told = executor.peek, list[bool](), list[object](), list[object]()

        def queued(buffers: Sequence[torch.Tensor]) -> Any:
            found = peek(buffers)
            begun.append(buffers)
            return lambda: found() if there else None

        monkeypatch.setattr(executor, "peek", queued)
        monkeypatch.setattr(expert_prices, "write_costs", lambda *given: told.append(given))
        runtime.submit([5, 6, 7, 8] * 4, SamplingParams(max_tokens=8, ignore_eos=True))
        runtime.step()
        begun.clear()
        learner._looks.clear()
        for _ in range(5):
            learner.launched(bucket, loops=True)
        assert len(begun) == len(learner._looks) == 1 and not told
        there.append(True)
        learner.launched(bucket, loops=True)
        assert len(begun) == 1 and not learner._looks
        learner.launched(bucket, loops=True)
        assert len(begun) == 2


def test_costs_stay_where_nothing_is_to_be_chosen() -> None:
    costs = StepCosts([1.0, 2.0], [0.0, 0.0], [4.0, 4.0], 0.5)
    assert costs.choosing([4.0]) == replace(costs, experts=(4.0, 4.0))
    assert costs.choosing([0.0]).base == [0.1, 0.2], "a step costs something"


@pytest.mark.parametrize(("asked", "decided", "length"), [({}, 3, 3), ({}, "auto", 7), ({}, 2, 2),
                                                          ({"num_speculative_tokens": 3}, "auto", 3)])  # fmt: skip
def test_a_target_with_experts_has_the_draft_length_that_gates_decide_for(
    asked: dict[str, Any], decided: Any, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_length, "default_lengths", lambda: {"experts": decided})
    layers = {"experts": [SimpleNamespace(experts=EXPERTS)], "dense": [SimpleNamespace(experts=None)]}
    waiting, none = (SimpleNamespace(waiting_boundaries=each, most_drafts=7) for each in ((1,), None))
    options = SpeculativeConfig(method="ngram", **asked)

    def found(target: str, speculator: Any, slots: int = 8, may_choose: bool = True, **more: Any) -> tuple[int, bool]:
        own: Any = SimpleNamespace(layers=layers[target])
        changed = replace(options, **more)
        made = default_length.with_default_length(changed, own, speculator, slots, may_choose=may_choose)
        return made.num_speculative_tokens, made.adaptive_width

    assert found("experts", waiting) == (length, decided == "auto" and not asked)
    fixed = (3, False)
    assert found("dense", waiting) == found("experts", none) == fixed, "it has none, or steps cannot choose"
    assert found("experts", waiting, adaptive_width=True) == (3, True), "it is asked for"
    if decided == "auto" and not asked:
        short = SimpleNamespace(waiting_boundaries=(1,), most_drafts=4)
        assert found("experts", short) == (4, True), "a block has no more"
        assert found("experts", waiting, 32) == (3, True), "rows last for no more"
        assert found("experts", waiting, may_choose=False) == fixed, "forced_rows goes with fixed lengths"
        own: dict[str, dict[str, Any]] = {
            "ngram": {"simulated_acceptance": 0.0},
            "eagle3": {"model": "draft", "max_path_len": 5},
            "dflash": {"model": "draft", "max_block_drafts": 15},
        }
        for method, more in own.items():
            assert found("experts", waiting, method=method, **more) == fixed, "they say what is verified"
