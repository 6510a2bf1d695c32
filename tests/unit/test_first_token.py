"""A prompt's first token comes out of prefill: no step is run for it, and the step after it verifies drafts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_device import load_fake
from recording import check_invariants, prompt_of, run_all, run_one
from stages import wide
from tiny_models import PairPaths, make_pair

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.executors.reference import ReferenceExecutor
from lowlat.graphs import Bucket

OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 96, "block_size": 4, "prefill_chunk": 8, "dtype": "float32"}
TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
LENGTHS = (1, 8, 9, 30)  # one token, ends of chunks, chunks that run together


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A target and a head that copies it."""
    return make_pair(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def num_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the steps that reference executors run from here on."""
    ran, step = list[Bucket](), ReferenceExecutor.step

    def counted(executor: ReferenceExecutor, bucket: Bucket, meanwhile: None) -> None:
        ran.append(bucket)
        step(executor, bucket, meanwhile)

    monkeypatch.setattr(ReferenceExecutor, "step", counted)
    return lambda: len(ran)


def load(pair: PairPaths, tree: Any = None, **options: Any) -> Runtime:
    config = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, tree=tree, strict=True)
    return Runtime.load(pair.target, config, **{**OPTIONS, "device": "cpu", **options})


@pytest.mark.parametrize("cached", [False, True])
def test_a_request_that_ends_with_its_first_token_takes_no_step(
    cached: bool, pair: PairPaths, num_steps: Callable[[], int]
) -> None:
    """By its limit or a stop id, whatever is cached of the prompt: its last chunk runs again where all of it is."""
    sampling: dict[str, Any] = {"temperature": 0.9, "seed": 5, "logprobs": 2}
    with load(pair, prefix_reuse=cached) as runtime:
        for length in LENGTHS:
            prompt = prompt_of(length)
            expected, *_ = run_one(runtime, prompt, SamplingParams(max_tokens=3, **sampling))
            before = num_steps()
            for reason, limit, stops in (("length", 1, ()), ("stop", 3, (expected,))):
                name = runtime.submit(prompt, SamplingParams(max_tokens=limit, stop_token_ids=stops, **sampling))
                outputs = [output for _ in range(-(-length // 32)) for output in runtime.step()]
                assert [(output.token_ids, output.finish_reason) for output in outputs] == [((expected,), reason)]
                assert outputs[0].logprobs is not None and outputs[0].logprobs[0].token_id == expected
                metrics = runtime.metrics(name)
                assert metrics.num_steps == 0 and metrics.decode_s == metrics.tokens_per_s == 0.0
                assert metrics.cached_prompt_tokens == ((length - 1) // 8 * 8 if cached else 0)
                assert (metrics.time_to_first_token_s or 0.0) >= (metrics.prefill_s or 0.0) > 0.0
            assert num_steps() == before and not runtime.busy
            check_invariants(runtime)
        assert runtime.kvcache.stats().num_used == 0


@pytest.mark.second
@pytest.mark.parametrize("tree", [wide(None), TREE], ids=["chain", "tree"])
def test_the_first_step_verifies_drafts(tree: Any, pair: PairPaths) -> None:
    """As many as any step; and those of a first token of another depth."""
    with load(pair, tree) as runtime:
        for length in LENGTHS:
            name = runtime.submit(prompt_of(length), SamplingParams(max_tokens=20))
            assert [len(output.token_ids) for output in runtime.step()] == [1]
            assert runtime.metrics(name).speculation is None
            runtime.step()
            speculation = runtime.metrics(name).speculation
            assert speculation is not None and speculation.num_drafts == runtime.metrics(name).num_steps == 1
            assert speculation.total_draft_tokens == (len(TREE) if tree else 3)
            run_all(runtime)
        expected = run_one(runtime, prompt_of(9), SamplingParams(max_tokens=20), 0)
        for odd in (0, 3):
            depths = [odd, 3 - odd] * 20
            assert run_one(runtime, prompt_of(9), SamplingParams(max_tokens=20), depths.__getitem__) == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_that_keep_coming_hold_nobody_up(ahead: bool, pair: PairPaths) -> None:
    """Whoever decodes gets a step after every first token of others, and these get theirs in order."""
    if ahead:
        runtime, _ = load_fake(pair.target, None, device_loop=False, **OPTIONS, max_queue=32)
    else:
        runtime = Runtime.load(pair.target, **OPTIONS, device="cpu", max_queue=32)
    with runtime:
        first = runtime.submit(prompt_of(5), SamplingParams(max_tokens=60))
        while runtime.metrics(first).num_steps < 2:
            runtime.step()
        others = [runtime.submit(prompt_of(1 + k, k), SamplingParams(max_tokens=1 + k % 2)) for k in range(12)]
        seen, order = set[str](), list[str]()
        while runtime.busy:
            for output in runtime.step():
                if output.request_id == first or output.request_id not in seen:
                    order.append(output.request_id)
                    seen.add(output.request_id)
        assert [name for name in order if name != first] == others
        last = order.index(others[-1])
        assert all(order[place] == first or order[place + 1] == first for place in range(last))
        check_invariants(runtime)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_cancelled_behind_its_first_token_is_heard_no_more(
    ahead: bool, pair: PairPaths, num_steps: Callable[[], int]
) -> None:
    """Where steps are not run ahead it takes none; others have the tokens that they have alone."""
    runtime = load_fake(pair.target, None, device_loop=False, **OPTIONS)[0] if ahead else load(pair)
    with runtime:
        expected = run_one(runtime, prompt_of(6), SamplingParams(max_tokens=9))
        before = num_steps()
        name = runtime.submit(prompt_of(12), SamplingParams(max_tokens=30))
        assert [output.request_id for output in runtime.step()] == [name]
        runtime.cancel(name)
        other = runtime.submit(prompt_of(6), SamplingParams(max_tokens=9))
        outputs = runtime.step()
        assert [output.finish_reason for output in outputs if output.request_id == name] == ["cancelled"]
        assert num_steps() - before <= ahead
        tokens = [token for output in outputs if output.request_id == other for token in output.token_ids]
        assert tokens + run_all(runtime).get(other, []) == expected
        assert runtime.kvcache.stats().num_used == 0


def test_nan_of_a_prompt_fails_its_request_by_name_and_nobody_else(pair: PairPaths) -> None:
    """Where only the last token's own row is not finite, too."""
    sampling = SamplingParams(max_tokens=12, temperature=1.0, seed=2)
    good = [3, 4, 5, 6]
    with load(pair) as runtime:
        expected = run_one(runtime, good, sampling)
        broken = next(token for token in range(97) if token not in (*good, *expected))
        bad = [*good * 3, broken]
        executor: Any = runtime.executor
        neighbour = runtime.submit(good, sampling)
        found = [output for _ in range(2) for output in runtime.step()]
        executor._weights["embed.weight"][broken] = torch.nan
        name = runtime.submit(bad, sampling)
        while runtime.busy:
            found += runtime.step()
        failed = [output for output in found if output.request_id == name]
        assert [(output.token_ids, output.finish_reason) for output in failed] == [((), "error")]
        assert failed[0].error == f"logits at position {len(bad)} are not finite"
        assert runtime.metrics(name).num_steps == 0 and runtime.metrics(name).time_to_first_token_s is None
        tokens = [token for output in found if output.request_id == neighbour for token in output.token_ids]
        assert tokens == expected == run_one(runtime, good, sampling)
        check_invariants(runtime)
