"""Requests that give their slot away go on with the tokens of one that ran on, whatever they keep and wherever."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from fake_device import load_fake
from hypothesis import given, settings
from paused_requests import alone, moves, paused_each_step, play, random_moves
from recording import prompt_of, run_all
from stages import later, wide
from tiny_grammars import Automaton, submit_with
from tiny_models import PairPaths, make_pair, make_target
from tiny_mtp import add_mtp
from unit.test_grammar_masks import FORKS, NARROW, WIDE
from unit.test_lossless import MODES
from unit.test_specpv import LOSSLESS, SPECPV

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import CapacityError, RequestError
from lowlat.executors.block_moves import BlockMover

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 96, "block_size": 4, "prefill_chunk": 8} | {
    "dtype": "float32",
    "max_queue": 6,
}
CPU = {**OPTIONS, "device": "cpu"}
FEW: dict[str, Any] = {"kv_blocks": 40}  # blocks: those of requests without a slot must leave the device
PROMPTS = [prompt_of(21), prompt_of(5, seed=1), [*prompt_of(16), 5, 7, 5, 7], prompt_of(30, seed=3)]
METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "eagle3": {"num_speculative_tokens": 3},
    "eagle3+": {"num_speculative_tokens": 4, "adaptive_width": True},
    "tree": {"num_speculative_tokens": 2, "tree": ((0,), (1,), (0, 0), (0, 1), (1, 0))},
    "beside": {"num_speculative_tokens": 3, "text_drafts": "suffix"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "specpv": {"num_speculative_tokens": 3, **SPECPV},
    "lossless": {"num_speculative_tokens": 3, **SPECPV, **LOSSLESS},
}
CASES = [
    ("llama", "eagle3", "penalised"),
    wide("llama", "tree", "sampled"),
    wide("llama", "beside", "greedy"),
    wide("gpt_oss", "eagle3", "sampled"),  # windows
    later("qwen3_5_text", "mtp", "sampled"),  # recurrent states
    wide("llama", "specpv", "sampled"),
    wide("llama", "lossless", "sampled"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    """A target and a draft model of each family; the hybrid has an MTP layer of its own."""
    found = {family: make_pair(tmp_path_factory.mktemp(family), family) for family in ("llama", "gpt_oss")}
    hybrid = tmp_path_factory.mktemp("hybrid")
    make_target(hybrid, "qwen3_5_text", gain=0.3)
    add_mtp(hybrid, copies=True)
    return {**found, "qwen3_5_text": replace(found["llama"], target=hybrid)}


def speculation(pair: PairPaths, method: str) -> SpeculativeConfig | None:
    own = METHODS[method]
    if not own:
        return None
    model = {} if own.get("method") in ("ngram", "mtp") else {"model": pair.head}
    return SpeculativeConfig(strict=True, **{**model, **own})


def sampling(mode: str, seed: int = 7, **others: Any) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 18, **MODES[mode], **others})


@pytest.mark.second
@pytest.mark.parametrize(("family", "method", "mode"), CASES)
@pytest.mark.parametrize("few", [True, wide(False)])
def test_any_moves_change_no_token(family: str, method: str, mode: str, few: bool, pairs: dict[str, PairPaths]) -> None:
    pair, config = pairs[family], speculation(pairs[family], method)
    requests = [(prompt, sampling(mode, seed=seed, max_tokens=24)) for seed, prompt in enumerate(PROMPTS)]
    with Runtime.load(pair.target, config, **CPU) as runtime:
        expected = alone(runtime, requests)
    options = {**CPU, **(FEW if few else {})}
    if few and family == "gpt_oss":
        options["prefix_reuse"] = False
    with Runtime.load(pair.target, config, **options) as runtime:
        assert play(runtime, random_moves(len(method), 60), requests, expected) > 1


@pytest.mark.parametrize(
    ("family", "method"), [("llama", "eagle3"), wide("gpt_oss", "none"), later("qwen3_5_text", "mtp")]
)
def test_a_request_may_be_paused_after_each_of_its_steps(family: str, method: str, pairs: dict[str, PairPaths]) -> None:
    with Runtime.load(pairs[family].target, speculation(pairs[family], method), **CPU) as runtime:
        request = PROMPTS[0], sampling("penalised")
        (expected,) = alone(runtime, [request])
        assert paused_each_step(runtime, request) == expected


@pytest.mark.second
def test_checks_of_steps_hold_for_requests_that_come_back(pairs: dict[str, PairPaths]) -> None:
    options = {**CPU, **FEW, "check": "masks,spans,lengths"}
    with Runtime.load(pairs["llama"].target, speculation(pairs["llama"], "eagle3"), **options) as runtime:
        requests = [(prompt, sampling("sampled", seed=seed)) for seed, prompt in enumerate(PROMPTS)]
        expected = alone(runtime, requests)
        assert play(runtime, random_moves(5, 40), requests, expected) > 1


@pytest.mark.second
def test_ranks_move_their_states_together(pairs: dict[str, PairPaths]) -> None:
    requests = [(prompt, sampling("sampled", seed=seed)) for seed, prompt in enumerate(PROMPTS)]
    with Runtime.load(pairs["llama"].target, tensor_parallel_size=2, **CPU, **FEW) as runtime:
        expected = alone(runtime, requests)
        assert play(runtime, random_moves(5, 40), requests, expected) > 1


@pytest.mark.second
@pytest.mark.parametrize("loops", [False, later(True)])
def test_steps_under_way_are_waited_for_and_grammars_go_on(loops: bool, pairs: dict[str, PairPaths]) -> None:
    """The device works later, and repeats steps by itself; some requests have a grammar."""
    grammars = [None, WIDE, NARROW, FORKS]
    requests = [(prompt, sampling("sampled", seed=seed)) for seed, prompt in enumerate(PROMPTS)]

    def submit(runtime: Runtime, which: int, priority: int) -> str:
        prompt, params = requests[which]
        params, edges = replace(params, priority=priority), grammars[which]
        if edges is None:
            return runtime.submit(prompt, params)
        return submit_with(runtime, Automaton(edges, (3,)), prompt, params)

    expected = []
    with Runtime.load(pairs["llama"].target, **CPU) as runtime:
        for which in range(len(requests)):
            name = submit(runtime, which, 0)
            expected.append(run_all(runtime)[name])
    draft = speculation(pairs["llama"], "eagle3")
    runtime, _ = load_fake(pairs["llama"].target, draft, device_loop=loops, lead=2, **OPTIONS, **FEW)
    with closing(runtime):
        assert play(runtime, random_moves(3, 60), requests, expected, submit) > 1


def test_a_request_that_ends_while_another_is_paused_says_so(pairs: dict[str, PairPaths]) -> None:
    """The steps under way are waited for with the first pause, and end the second; its last output comes later."""
    runtime, _ = load_fake(pairs["llama"].target, None, device_loop=False, lead=2, **OPTIONS, **FEW)
    with closing(runtime):
        params, missed = sampling("sampled", ignore_eos=True), 0
        for count in range(3, 8):
            first, second = (runtime.submit(PROMPTS[1], replace(params, max_tokens=most)) for most in (20, count))
            while runtime.metrics(second).completion_tokens < count - 1:
                runtime.step()
            given = runtime.metrics(second).finish_reason is not None
            assert runtime.pause(first)
            if not given and runtime.metrics(second).finish_reason is not None:
                missed += 1
                assert runtime.pause(second) is False
            runtime.cancel(first)
            while runtime.busy:
                runtime.step()
            with pytest.raises(RequestError, match="has ended"):
                runtime.pause(second)
        assert missed


def test_a_higher_priority_takes_the_slot_of_the_lowest_and_equals_take_turns(pairs: dict[str, PairPaths]) -> None:
    with Runtime.load(pairs["llama"].target, **CPU) as runtime:
        params = sampling("sampled", ignore_eos=True)
        names = [runtime.submit(PROMPTS[1], replace(params, priority=priority)) for priority in (1, 0, 0)]
        for _ in range(8):
            runtime.step()
        phase = runtime.scheduler.phase
        assert [str(phase(name)) for name in names] == ["decoding", "decoding", "queued"]
        urgent = runtime.submit(PROMPTS[3], replace(params, priority=2))
        runtime.step()
        assert [str(phase(name)) for name in (*names, urgent)][:3] == ["decoding", "queued", "queued"]
        assert runtime.summary()["paused"]["num_without_slot"] == 1
        order: list[str] = []
        while runtime.busy:
            order += [output.request_id for output in runtime.step() if output.finish_reason]
        assert order.index(names[1]) < order.index(names[2])  # it came first, and goes on first


def test_what_has_no_space_is_refused_and_nobody_waits_for_ever(pairs: dict[str, PairPaths]) -> None:
    with Runtime.load(pairs["llama"].target, pause_gib=0.0, **CPU) as runtime:
        name = runtime.submit(PROMPTS[1], sampling("sampled", ignore_eos=True))
        other = runtime.submit(PROMPTS[1], sampling("greedy"))
        runtime.step()
        runtime.step()
        with pytest.raises(CapacityError, match="pause_gib"):
            runtime.pause(name)
        runtime.cancel(other)
        third = runtime.submit(PROMPTS[0], sampling("greedy"))
        fourth = runtime.submit(PROMPTS[0], sampling("greedy"))
        runtime.pause(fourth)  # it is queued, and keeps nothing
        with pytest.raises(RequestError, match="paused already"):
            runtime.pause(fourth)
        runtime.cancel(third)
        run_all(runtime)
        runtime.resume(fourth)
        with pytest.raises(RequestError, match="is not paused"):
            runtime.resume(fourth)
        assert len(run_all(runtime)[fourth]) == 18


def test_where_the_host_refuses_memory_requests_keep_their_slots(
    pairs: dict[str, PairPaths], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [(PROMPTS[1], sampling("sampled", ignore_eos=True)), (PROMPTS[0], sampling("greedy", priority=3))]
    with Runtime.load(pairs["llama"].target, **{**CPU, "max_batch": 1}) as runtime:
        expected = alone(runtime, requests)

        def refused(*_: object) -> None:
            raise CapacityError("the host refuses 1 GiB of pinned memory")

        monkeypatch.setattr(BlockMover, "allocate", refused)
        low = runtime.submit(*requests[0])
        tokens = [token for _ in range(3) for output in runtime.step() for token in output.token_ids]
        for _ in range(2):
            with pytest.raises(CapacityError, match="while it is paused, and the host refuses 1 GiB"):
                runtime.pause(low)
        high = runtime.submit(*requests[1])
        ran = run_all(runtime)
        assert [tokens + ran[low], ran[high]] == expected
        assert len(caplog.records) == 1 and "keep their slots" in caplog.text
        monkeypatch.undo()
        runtime.scheduler.space._refused_until = 0.0  # it is asked again after a while
        low = runtime.submit(*requests[0])
        tokens = [token for _ in range(3) for output in runtime.step() for token in output.token_ids]
        assert runtime.pause(low)
        runtime.resume(low)
        assert tokens + run_all(runtime)[low] == expected[0]


def test_a_pause_ends_at_its_deadline(pairs: dict[str, PairPaths]) -> None:
    with Runtime.load(pairs["llama"].target, **CPU) as runtime:
        name = runtime.submit(PROMPTS[1], sampling("sampled"))
        runtime.step()
        assert runtime.pause(name, deadline_s=0.01)
        while not (outputs := runtime.step()):
            pass
        assert [(each.finish_reason, each.error_code) for each in outputs if each.finish_reason] == [
            ("error", "deadline")
        ]
        assert not runtime.busy and not runtime.scheduler.space.held


@pytest.fixture(scope="module")
def machine(pairs: dict[str, PairPaths]) -> Iterator[tuple[Runtime, list[Any], list[list[int]]]]:
    """A runtime whose blocks hold little more than a request, and what each request has alone."""
    requests = [(prompt, sampling("sampled", seed=seed)) for seed, prompt in enumerate(PROMPTS)]
    with Runtime.load(pairs["llama"].target, speculation(pairs["llama"], "ngram"), **CPU, **FEW) as runtime:
        yield runtime, requests, alone(runtime, requests)


@settings(max_examples=4)
@given(plan=moves())
def test_moves_of_any_order(machine: tuple[Runtime, list[Any], list[list[int]]], plan: list[tuple[str, int]]) -> None:
    runtime, requests, expected = machine
    play(runtime, plan, requests, expected)


@pytest.mark.skipif("LOWLAT_PAUSE_MOVES" not in os.environ, reason="long: LOWLAT_PAUSE_MOVES says how many moves")
def test_many_moves(machine: tuple[Runtime, list[Any], list[list[int]]]) -> None:
    runtime, requests, expected = machine
    for seed in range(int(os.environ["LOWLAT_PAUSE_MOVES"]) // 200):
        play(runtime, random_moves(seed, 200), requests, expected)
