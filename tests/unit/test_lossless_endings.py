"""Every way in which a request ends gives the tokens of decoding without speculation, and harms no neighbour."""

import dataclasses
from typing import Any

import pytest
import torch
from recording import check_invariants, prompt_of, run_all, run_one, tokens_of
from stages import wide
from tiny_models import DISTINCT_FAMILIES, PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.scheduling.records import Phase
from lowlat.errors import RequestError
from lowlat.options.request import StepOutput

DEPTHS = (0, 3, 7)
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 96, "block_size": 4, "prefill_chunk": 8} | {
    "device": "cpu",
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PairPaths]:
    """A target and a head of every family."""
    return {family: make_pair(tmp_path_factory.mktemp(family), family) for family in DISTINCT_FAMILIES}


@pytest.fixture
def pair(pairs: dict[str, PairPaths]) -> PairPaths:
    """Whatever family: epilogues do not depend on it."""
    return pairs["llama"]


def load(pair: PairPaths, *, depth: int = 7, tree: Any = None, **options: Any) -> Runtime:
    """A runtime that speculates; a head that does not load is an error."""
    shape = tree if isinstance(tree, dict) else {"tree": tree}
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=depth, strict=True, **shape)
    return Runtime.load(pair.target, config, **{**OPTIONS, **options})


def outputs_of(runtime: Runtime, name: str, depth: int | None = None) -> list[StepOutput]:
    """Every output of one request; the others run on."""
    outputs: list[StepOutput] = []
    while runtime.busy and not (outputs and outputs[-1].finish_reason):
        outputs += [output for output in runtime.step(depth) if output.request_id == name]
    return outputs


@pytest.mark.parametrize("temperature", [wide(0.0), 1.0])
@pytest.mark.second
def test_stop_tokens_end_a_run_wherever_they_stand_in_it(temperature: float, pair: PairPaths) -> None:
    prompt, sampling = prompt_of(11, seed=2), SamplingParams(max_tokens=24, seed=5, temperature=temperature)
    inside = 0
    with load(pair) as runtime:
        truth = run_one(runtime, prompt, sampling, depth=0)
        firsts = [place for place, token in enumerate(truth) if token not in truth[:place]]
        assert len(firsts) > 4
        for place in firsts[:5]:
            stopping = dataclasses.replace(sampling, stop_token_ids=(truth[place],))
            for depth in DEPTHS:
                name = runtime.submit(prompt, stopping)
                outputs = outputs_of(runtime, name, depth)
                assert tokens_of(outputs) == truth[: place + 1]
                assert outputs[-1].finish_reason == "stop"
                assert outputs[-1].stop_reason == truth[place]
                inside += len(outputs[-1].token_ids) > 1
                check_invariants(runtime)
    assert inside > 2, "no stop token was found inside an accepted run"


@pytest.mark.parametrize("tree", [None, wide(TREE)])
@pytest.mark.second
def test_max_tokens_cut_a_run_wherever_they_fall_in_it(tree: Any, pair: PairPaths) -> None:
    prompt = prompt_of(11, seed=2)
    inside = 0
    with load(pair, depth=3 if tree else 7, tree=tree) as runtime:
        truth = run_one(runtime, prompt, SamplingParams(max_tokens=24), depth=0)
        for limit in range(1, 19, 2 if tree else 1):
            name = runtime.submit(prompt, SamplingParams(max_tokens=limit))
            outputs = outputs_of(runtime, name)
            assert tokens_of(outputs) == truth[:limit]
            assert [output.finish_reason for output in outputs[-1:]] == ["length"]
            metrics = runtime.metrics(name)
            assert metrics.completion_tokens == limit
            inside += len(outputs[-1].token_ids) > 1
            check_invariants(runtime)
    assert inside > 5


def test_a_context_filled_to_its_last_token(pair: PairPaths) -> None:
    prompt = prompt_of(60, seed=4)
    sampling = SamplingParams(max_tokens=36)
    with load(pair) as runtime:
        runs = [run_one(runtime, prompt, sampling, depth) for depth in DEPTHS]
        assert len(runs[0]) == 36
        assert runs[0] == runs[1] == runs[2]
        with pytest.raises(RequestError, match="max_context"):
            runtime.submit(prompt, SamplingParams(max_tokens=37))


def test_min_tokens_hold_stop_tokens_back(pair: PairPaths) -> None:
    prompt, sampling = prompt_of(9, seed=6), SamplingParams(max_tokens=24, seed=8, temperature=1.0)
    with load(pair) as runtime:
        truth = run_one(runtime, prompt, sampling, depth=0)
        stops = tuple(dict.fromkeys(truth[2:6]))
        held = dataclasses.replace(sampling, stop_token_ids=stops, min_tokens=12)
        runs = [run_one(runtime, prompt, held, depth) for depth in DEPTHS]
    assert runs[0] == runs[1] == runs[2]
    assert len(runs[0]) > 12
    assert not set(stops) & set(runs[0][:12])


@pytest.mark.second
def test_a_request_may_limit_or_forbid_its_drafts(pair: PairPaths) -> None:
    prompt = prompt_of(11, seed=2)
    with load(pair) as runtime:
        truth = run_one(runtime, prompt, SamplingParams(max_tokens=24), depth=0)
        for limit in (0, 1, 3, None):
            name = runtime.submit(prompt, SamplingParams(max_tokens=24, max_draft_tokens=limit))
            outputs = outputs_of(runtime, name)
            assert tokens_of(outputs) == truth
            longest = max(len(output.token_ids) for output in outputs)
            assert longest == 1 if limit == 0 else 1 < longest <= (7 if limit is None else limit) + 1
            speculation = runtime.metrics(name).speculation
            assert (speculation is None) == (limit == 0)
            if speculation is not None:
                assert not any(speculation.drafted_by_position[7 if limit is None else limit :])


def test_a_seed_that_was_drawn_can_be_used_again(pair: PairPaths) -> None:
    prompt, sampling = prompt_of(8), SamplingParams(max_tokens=16, temperature=1.0)
    with load(pair) as runtime:
        names = [runtime.submit(prompt, sampling) for _ in range(2)]
        tokens = run_all(runtime)
        assert tokens[names[0]] != tokens[names[1]]
        for name in names:
            seeded = dataclasses.replace(sampling, seed=runtime.metrics(name).seed)
            assert run_one(runtime, prompt, seeded, depth=0) == tokens[name]


def test_logprobs_are_the_same_at_every_depth(pair: PairPaths) -> None:
    prompt, sampling = prompt_of(11), SamplingParams(max_tokens=20, temperature=1.0, seed=1, logprobs=5)
    runs = []
    with load(pair) as runtime:
        for depth in DEPTHS:
            name = runtime.submit(prompt, sampling)
            outputs = outputs_of(runtime, name, depth)
            assert all(len(output.logprobs or ()) == len(output.token_ids) for output in outputs)
            runs.append([entry for output in outputs for entry in output.logprobs or ()])
    assert [entry.token_id for entry in runs[0]] == tokens_of(outputs)
    assert runs[0] == runs[1] == runs[2]


def poison(runtime: Runtime, name: str, kind: str) -> None:
    """Write NaN over the newest committed block of a decoding request, in the target's cache or the head's."""
    slot, state = runtime.scheduler.slot(name), runtime.executor.state
    assert slot is not None
    block = int(state["block_table"][slot, (int(state["lengths"][slot]) - 2) // runtime.config.block_size])
    state[kind][block] = torch.nan


@pytest.mark.second
@pytest.mark.parametrize(("family", "tree"), [("llama", TREE), wide("gpt_oss", None)])
def test_nan_fails_its_request_alone(family: str, tree: Any, pairs: dict[str, PairPaths]) -> None:
    prompts = [prompt_of(length, seed=length) for length in (6, 17, 21)]
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=4)
    with load(pairs[family], depth=3, tree=tree, prefix_reuse=False) as runtime:
        truths = [run_one(runtime, prompt, sampling) for prompt in prompts]
        names = [runtime.submit(prompt, sampling) for prompt in prompts]
        outputs: list[StepOutput] = []
        while any(runtime.scheduler.phase(name) is not Phase.DECODING for name in names):
            outputs += runtime.step()
        poison(runtime, names[1], "v_cache.0")
        while runtime.busy:
            outputs += runtime.step()
        by_name = {name: [output for output in outputs if output.request_id == name] for name in names}
        failed = by_name[names[1]]
        assert failed[-1].finish_reason == "error"
        assert "finite" in (failed[-1].error or "") or "NaN" in (failed[-1].error or "")
        assert tokens_of(failed) == truths[1][: len(tokens_of(failed))]
        for place in (0, 2):
            assert tokens_of(by_name[names[place]]) == truths[place]
            assert by_name[names[place]][-1].finish_reason == "length"
        check_invariants(runtime)
        for name, tensor in runtime.executor.state.items():
            assert not tensor.is_floating_point() or tensor.isfinite().all(), f"{name} still holds NaN"
        assert [run_one(runtime, prompt, sampling) for prompt in prompts] == truths


def test_nan_in_a_shared_prefix_is_not_shared_any_further(pair: PairPaths) -> None:
    prompt, sampling = prompt_of(26, seed=3), SamplingParams(max_tokens=20)
    with load(pair, depth=3) as runtime:
        truth = run_one(runtime, prompt, sampling)
        name = runtime.submit(prompt, sampling)
        runtime.step()
        assert runtime.metrics(name).cached_prompt_tokens == 24
        slot = runtime.scheduler.slot(name)
        assert slot is not None
        runtime.executor.state["k_cache.1"][int(runtime.executor.state["block_table"][slot, 1])] = torch.nan
        assert outputs_of(runtime, name)[-1].finish_reason == "error"
        check_invariants(runtime)
        assert run_one(runtime, prompt, sampling) == truth
        assert run_one(runtime, prompt, sampling) == truth


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        wide("draft_model.k_cache", None),
        ("draft_model.v_cache", TREE),
        wide("block_features", {"dynamic_tree_max_topk": 3}),
        ("block_features", None),
    ],
)
@pytest.mark.second
def test_nan_in_the_head_costs_drafts_and_nothing_else(kind: str, tree: Any, pair: PairPaths) -> None:
    prompt, sampling = prompt_of(14, seed=9), SamplingParams(max_tokens=24, temperature=1.0, seed=2)
    with load(pair, depth=3, tree=tree) as runtime:
        truth = run_one(runtime, prompt, sampling, depth=0)
        name = runtime.submit(prompt, sampling)
        outputs = [*runtime.step(), *runtime.step(), *runtime.step()]
        poison(runtime, name, kind)
        outputs += outputs_of(runtime, name)
        assert tokens_of(outputs) == truth
        assert outputs[-1].finish_reason == "length"
        assert run_one(runtime, prompt, sampling) == truth


def test_a_request_can_be_cancelled_in_every_phase(pair: PairPaths) -> None:
    sampling = SamplingParams(max_tokens=16)
    with load(pair, depth=3, max_batch=2) as runtime:
        others = [prompt_of(7), prompt_of(30, seed=1)]
        truths = [run_one(runtime, prompt, sampling) for prompt in others]
        for phase in (Phase.QUEUED, Phase.PREFILLING, Phase.DECODING):
            first = runtime.submit(others[0], sampling)
            victim = runtime.submit(prompt_of(50, seed=5), sampling)
            second = runtime.submit(others[1], sampling)
            outputs: list[StepOutput] = []
            while runtime.scheduler.phase(victim) is not phase:
                outputs += runtime.step()
            if phase is Phase.DECODING:
                outputs += runtime.step()
            runtime.cancel(victim)
            check_invariants(runtime)
            with pytest.raises(RequestError, match=victim):
                runtime.cancel(victim)
            while runtime.busy:
                outputs += runtime.step()
            assert tokens_of(output for output in outputs if output.request_id == first) == truths[0]
            assert tokens_of(output for output in outputs if output.request_id == second) == truths[1]
            last = [output for output in outputs if output.request_id == victim][-1]
            assert (last.finish_reason, last.token_ids) == ("cancelled", ())
            assert runtime.metrics(victim).finish_reason == "cancelled"
            assert runtime.kvcache.stats().num_used == 0
            check_invariants(runtime)


@pytest.mark.second
def test_a_slot_that_was_cancelled_leaves_nothing_to_the_next(pair: PairPaths) -> None:
    """Drafts, penalties' counts, biases and stop ids of the one before must not reach the next in its slot."""
    prompt, plain = prompt_of(12), SamplingParams(max_tokens=20)
    heavy = SamplingParams(
        max_tokens=40, temperature=1.0, repetition_penalty=2.0, frequency_penalty=2.0, logit_bias={3: 50.0}, seed=0
    )
    with load(pair, max_batch=1) as runtime:
        truth = run_one(runtime, prompt, plain, depth=0)
        for steps in (0, 1, 4):
            name = runtime.submit(prompt_of(10, seed=steps), heavy)
            for _ in range(steps):
                runtime.step()
            runtime.cancel(name)
            assert run_one(runtime, prompt, plain) == truth
