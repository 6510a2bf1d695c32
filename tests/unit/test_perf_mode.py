"""Strict mode and performance counters: what is refused, where; what is counted of lowered programs and of steps."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import outputs_of
from tiny_models import PairPaths, make_pair

from lowlat import ConfigError, DeviceError, RequestError, Runtime, RuntimeConfig, SamplingParams, SpeculativeConfig
from lowlat.engine.figures.perf import PerfCounters
from lowlat.engine.figures.published_steps import PublishedSteps, StepChecks
from lowlat.engine.loading.strict import check_device, check_launches
from lowlat.engine.mailbox.publications import SlotPublication
from lowlat.executors import LaunchCounts
from lowlat.executors.devices import DeviceChoice
from lowlat.options.request import StepOutput
from lowlat.options.runtime import TraceConfig
from lowlat.tools.bench.measure import CaseRun
from lowlat.tools.bench.prompts import Prompts
from lowlat.tools.bench.scenarios import Case, Scenario
from lowlat.tools.planned_step import target_config

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "max_batch": 2, "max_context": 160, "block_size": 4, "prefill_chunk": 8, "dtype": "float32", "device": "cpu",
}  # fmt: skip
STRICT: dict[str, Any] = {**OPTIONS, "executor": "reference", "perf_mode": "strict"}
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def runtime(pair: PairPaths) -> Iterator[Runtime]:
    """A strict one that speculates."""
    with Runtime.load(pair.target, SpeculativeConfig(model=pair.head), **STRICT) as loaded:
        yield loaded


def run(runtime: Runtime, *requests: SamplingParams) -> list[StepOutput]:
    for number, params in enumerate(requests):
        runtime.submit(list(range(1, 20 + 7 * number)), params)
    return outputs_of(runtime)


def tokens_of(outputs: list[StepOutput]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for output in outputs:
        found.setdefault(output.request_id, []).extend(output.token_ids)
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "eager"}, "executor 'eager' is for debugging"),
        ({"fuse": False}, "fuse False is for debugging"),
        ({"traces": TraceConfig(step=True)}, "traces TraceConfig(step=True"),
        ({"perf_mode": "fast"}, "perf_mode must be 'default' or 'strict', got 'fast'"),
    ],
)
def test_debugging_is_refused_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        RuntimeConfig(**{"perf_mode": "strict", **options})


def test_torch_runs_a_strict_step_only_where_it_is_asked_for_by_name(pair: PairPaths) -> None:
    with pytest.raises(ConfigError, match=r"perf_mode 'strict' runs kernels.*the CPU was asked for.*by name"):
        Runtime.load(pair.target, **{**STRICT, "executor": "auto"})
    check_device(RuntimeConfig(), DeviceChoice(CPU, "reference", "no GPU"))
    check_device(RuntimeConfig(perf_mode="strict"), DeviceChoice(CPU, "graph", "a GPU"))


def test_a_draft_model_that_does_not_fit_is_an_error(pair: PairPaths, tmp_path: Path) -> None:
    missing = SpeculativeConfig(model=tmp_path / "none")
    with pytest.raises(ConfigError, match="none"):
        Runtime.load(pair.target, missing, **STRICT)


def test_sampling_hooks_and_steps_without_drafts_are_refused(runtime: Runtime) -> None:
    for params, message in (
        (SamplingParams(max_tokens=9, temperature=0.7), "temperature must be 0, got 0.7"),
        (SamplingParams(max_tokens=9, max_draft_tokens=0), "max_draft_tokens must be 1 or more, got 0"),
    ):
        with pytest.raises(RequestError, match=f"perf_mode 'strict'.*{message}"):
            runtime.submit([1, 2], params)
    name = runtime.submit([1, 2], SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="max_draft_tokens must be 1 or more, got 0"):
        runtime.set_draft_limit(name, 0)
    with pytest.raises(ConfigError, match="decodes at S = 3 alone, got 0"):
        runtime.step(0)
    with pytest.raises(ConfigError, match="for debugging, which perf_mode 'strict' refuses"):
        runtime.executor.set_hook(lambda op, arguments: None)
    runtime.executor.set_hook(None)
    run(runtime)


def test_another_depth_is_set_between_requests_alone(runtime: Runtime) -> None:
    name = runtime.submit([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    with pytest.raises(ConfigError, match="between requests"):
        runtime.speculate(1)
    runtime.cancel(name)
    while runtime.busy:
        runtime.step()
    for depth, message in ((0, "must be 1 or more"), (99, "no bucket")):
        with pytest.raises(ConfigError, match=message):
            runtime.speculate(depth)
    configured = runtime.num_speculative_tokens
    runtime.speculate(1)
    name = runtime.submit([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    while runtime.busy:
        runtime.step()
    stats = runtime.metrics(name).speculation
    assert stats is not None and stats.num_drafts == stats.total_draft_tokens > 0
    runtime.speculate(configured)


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_strict_steps_pass_their_checks_with_the_same_tokens(pair: PairPaths, tree: list[list[int]] | None) -> None:
    speculative = SpeculativeConfig(model=pair.head, tree=tree, num_speculative_tokens=3)
    requests = [SamplingParams(max_tokens=n, stop_token_ids=(5, 7), ignore_eos=n % 2 == 0) for n in (1, 2, 31, 40)]
    with Runtime.load(pair.target, **OPTIONS) as plain, Runtime.load(pair.target, speculative, **STRICT) as strict:
        expected, found = run(plain, *requests), run(strict, *requests)
        for outputs in (expected, found):
            assert {output.finish_reason for output in outputs} - {None} <= {"stop", "length"}
        assert tokens_of(found) == tokens_of(expected)
        counters = strict.perf()
        assert set(counters.undrafted_steps) <= {"last_token"}
        assert (counters.synchronisations, counters.copies, counters.launches) == (0, 0, 0)
        assert counters.library_calls > 0 == counters.fallback_calls
        assert strict.summary()["perf"] == counters.to_dict()
        assert plain.perf().undrafted_steps == {}


def test_steps_without_drafts_are_counted_by_reason(pair: PairPaths) -> None:
    with Runtime.load(pair.target, SpeculativeConfig(model=pair.head), **OPTIONS) as runtime:
        run(runtime, SamplingParams(max_tokens=9, max_draft_tokens=0, ignore_eos=True))
        assert runtime.perf().undrafted_steps == {"max_draft_tokens": 8}
        before = runtime.perf()
        run(runtime, SamplingParams(max_tokens=2, ignore_eos=True))
        assert runtime.perf().since(before).undrafted_steps == {"last_token": 1}
        runtime.submit([1, 2, 3], SamplingParams(max_tokens=9, ignore_eos=True))
        while runtime.busy:
            runtime.step(0)
        since = runtime.perf().since(before)
        assert since.undrafted_steps == {"last_token": 2, "no_drafts": 7}
        assert since.plus(since).undrafted_steps == {"last_token": 4, "no_drafts": 14}
        summary = runtime.summary()
        assert summary["disabled_slots"] == {"max_draft_tokens": 8, "last_token": 2, "no_drafts": 7}
        assert summary["active_slots"] == {"steps": 17, "min": 1, "mean": 1.0, "max": 1}


def test_active_slots_are_in_the_summary_and_once_in_the_log(pair: PairPaths, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lowlat.engine"), Runtime.load(pair.target, **OPTIONS) as runtime:
        for max_tokens in (3, 9):
            runtime.submit([1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        while runtime.busy:
            runtime.step()
        assert runtime.summary()["active_slots"] == {"steps": 9, "min": 1, "mean": 1.1111, "max": 2}
        assert "disabled_slots" not in runtime.summary()  # nothing to be disabled
    (line,) = (record.getMessage() for record in caplog.records if "active slots" in record.getMessage())
    assert line == "9 steps, 1 to 2 active slots, 1.11 on average"
    alike = PublishedSteps(None)
    for count, described in ((3, "1 step, 3 active slots each"), (3, "2 steps, 3 active slots each")):
        alike.active.count(count)
        assert alike.describe() == described


GOOD = SlotPublication(
    1, (4, 5, 6), None, verified=3, verified_depth=3, verified_source=1, accepted=2, length=23, logprobs=None
)


@pytest.mark.parametrize(
    ("changes", "num_remaining", "problem"),
    [
        ({}, 9, None),
        ({"accepted": 4}, 9, "accepted 4 of 3 drafts, 3 deep, and 3 can be verified"),
        ({"verified": 4}, 9, "accepted 2 of 4 drafts"),
        ({"token_ids": (4, 5, 6, 7), "length": 24}, 9, "gave 4 tokens, having accepted 2 with 9 to go"),
        ({}, 2, "gave 3 tokens, having accepted 2 with 2 to go"),
        ({"length": 24}, 9, "ended at length 24, and 20 and 3 tokens were committed"),
        ({"token_ids": (4, -1, 6)}, 9, "gave tokens [4, -1, 6], of a vocabulary of 97"),
        ({"verified": 0, "verified_depth": 0, "accepted": 0, "token_ids": (4,), "length": 21}, 9, "verified no draft"),
        ({"verified": 0, "verified_depth": 0, "accepted": 0, "token_ids": (4,), "length": 21}, 1, None),
    ],
)  # fmt: skip
def test_a_step_that_does_not_add_up_is_an_error(
    changes: dict[str, Any], num_remaining: int, problem: str | None
) -> None:
    checks = StepChecks(max_drafts=3, vocab_size=97, must_draft=True)
    publication = GOOD._replace(**changes)
    if problem is None:
        checks.check(publication, 20, first=False, num_remaining=num_remaining)
        return
    with pytest.raises(DeviceError, match=re.escape(problem)):
        checks.check(publication, 20, first=False, num_remaining=num_remaining)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        (LaunchCounts(launches=9, planned=5, tuned=5, library_calls=2), None),
        (LaunchCounts(launches=9, planned=5, tuned=3), "2 of 5 launches have plans that were derived for this GPU"),
        (LaunchCounts(fallbacks=("linear in a", "linear in b")), "in for kernels in 2 calls, the first linear in a"),
    ],
)
def test_launches_that_were_not_tuned_are_an_error(counts: LaunchCounts, problem: str | None) -> None:
    target = target_config(Path("llama-8b"))
    check_launches(RuntimeConfig(), counts, target)
    if problem is None:
        check_launches(RuntimeConfig(perf_mode="strict"), counts, target)
        return
    with pytest.raises(ConfigError, match=problem):
        check_launches(RuntimeConfig(perf_mode="strict"), counts, target)


def test_a_benchmark_s_row_has_the_counters_of_its_timed_steps(runtime: Runtime) -> None:
    before = runtime.perf()
    scenario = Scenario((60,), (2,), (3,), steps=4, warm_up=1, repeats=2)
    case = CaseRun(runtime, Case(60, 2, 3), scenario, Prompts.random(90))
    for _ in range(scenario.repeats):
        case.repeat()
    found = case.row().perf
    assert found is not None
    assert found.library_calls == before.library_calls and found.undrafted_steps == {}
    assert (found.synchronisations, found.copies, found.fallback_calls) == (0, 0, 0)
    counts = LaunchCounts(launches=5, planned=3, tuned=3, synchronisations=2)
    later = PerfCounters.of(counts, 4, {"no_drafts": 2})
    assert (later.synchronisations, later.copies, later.tuned_launches) == (2, 4, 3)
