"""The runtime as a caller sees it, on the bundled pair: requests, text, metrics, refusals, ends."""

import json
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import outputs_of, prompt_of, tokens_of
from tiny_models import make_pair

import lowlat
from lowlat import CapacityError, ConfigError, LowlatError, RequestError, Runtime, SamplingParams, SpeculativeConfig
from lowlat.engine.memory.plan import MemoryNeed, check_fits
from lowlat.graphs import BufferSpec, Role
from lowlat.options.request import StepOutput

DEMO = Path(lowlat.__file__).parent / "demo"
TARGET = DEMO / "target"
HEAD = SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=3, strict=True)
PROMPT = "The Congress shall have power to"


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime.load(TARGET, HEAD, max_batch=2, max_context=256, max_queue=2) as loaded:
        yield loaded


def run(runtime: Runtime, prompt: str | list[int], params: SamplingParams) -> list[StepOutput]:
    name = runtime.submit(prompt, params)
    outputs = [output for output in outputs_of(runtime) if output.request_id == name]
    runtime.scheduler.invariants()
    return outputs


def text_of(outputs: list[StepOutput]) -> str:
    return "".join(output.text or "" for output in outputs)


def test_text_comes_out_whole_and_the_end_says_why(runtime: Runtime) -> None:
    outputs = run(runtime, PROMPT, SamplingParams(max_tokens=24))
    assert runtime.codec is not None
    prompt = runtime.codec.encode(PROMPT)
    whole = runtime.codec.decode([*prompt, *tokens_of(outputs)])
    assert whole == runtime.codec.decode(prompt) + text_of(outputs)
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == "length"
    assert len(tokens_of(outputs)) == 24
    assert len(outputs) < 24  # several tokens a step


def test_metrics_add_up_and_stay_readable(runtime: Runtime) -> None:
    name = runtime.submit(PROMPT, SamplingParams(max_tokens=20))
    assert runtime.metrics(name).completion_tokens == 0
    while runtime.busy:
        runtime.step()
    metrics = runtime.metrics(name)
    stats = metrics.speculation
    assert stats is not None
    assert metrics.completion_tokens == 20
    assert 1 + metrics.num_steps + stats.total_accepted_tokens == 20
    assert stats.total_draft_tokens == stats.total_accepted_tokens + stats.num_rewound_tokens
    assert sum(stats.accepted_length_histogram) == stats.num_drafts
    assert stats.mean_acceptance_length == pytest.approx(1 + stats.total_accepted_tokens / stats.num_drafts)
    block = metrics.to_dict()["eagle_speculation"]
    assert json.loads(json.dumps(block)) == block
    assert metrics.time_to_first_token_s is not None
    assert metrics.time_to_first_token_s >= (metrics.prefill_s or 0.0)
    assert runtime.summary()["num_live"] == 0


def test_stop_strings_cut_the_text_and_end_the_request(runtime: Runtime) -> None:
    plain = run(runtime, PROMPT, SamplingParams(max_tokens=20))
    text = text_of(plain)
    stop = text[25:31]
    before = text.index(stop)
    outputs = run(runtime, PROMPT, SamplingParams(max_tokens=20, stop=(stop,)))
    assert text_of(outputs) == text[:before]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].stop_reason == stop
    count = len(tokens_of(outputs))
    assert tokens_of(outputs) == tokens_of(plain)[:count]
    assert runtime.codec is not None
    assert stop in runtime.codec.decode(tokens_of(outputs))
    assert stop not in runtime.codec.decode(tokens_of(outputs)[:-1])


def test_logprobs_belong_to_the_tokens(runtime: Runtime) -> None:
    outputs = run(runtime, PROMPT, SamplingParams(max_tokens=12, logprobs=3))
    entries = [entry for output in outputs for entry in output.logprobs or ()]
    assert [entry.token_id for entry in entries] == tokens_of(outputs)
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob)  # greedy: the token is the likeliest
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(value <= 0 and math.isfinite(value) for value in values)
    baseline = run(runtime, PROMPT, SamplingParams(max_tokens=12, logprobs=3, max_draft_tokens=0))
    assert [entry for output in baseline for entry in output.logprobs or ()] == entries  # to the bit
    assert run(runtime, PROMPT, SamplingParams(max_tokens=2))[0].logprobs is None


def test_a_bias_decides(runtime: Runtime) -> None:
    outputs = run(runtime, PROMPT, SamplingParams(max_tokens=4, logit_bias={77: 100.0}))
    assert tokens_of(outputs) == [77] * 4


def test_a_prefix_is_reused_and_changes_nothing(tmp_path: Path) -> None:
    pair, prompt = make_pair(tmp_path, "llama"), prompt_of(37)
    head = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    with Runtime.load(pair.target, head, max_batch=2, max_context=64, prefill_chunk=16, block_size=8) as runtime:
        first = runtime.submit(prompt, params)
        cold = tokens_of(outputs_of(runtime))
        second = runtime.submit(prompt, params)
        assert tokens_of(outputs_of(runtime)) == cold
        assert runtime.metrics(first).cached_prompt_tokens == 0
        assert runtime.metrics(second).cached_prompt_tokens == 32
        same = runtime.metrics(first).speculation, runtime.metrics(second).speculation
        assert same[0] == same[1]  # the head's KV too: the very same drafts were accepted
        for salt, cached in (("a", 0), ("b", 0), ("a", 32)):  # nobody learns from another's salt what was asked
            name = runtime.submit(prompt, params, cache_salt=salt)
            salted = tokens_of(outputs_of(runtime))
            assert (runtime.metrics(name).cached_prompt_tokens, salted) == (cached, cold)


@pytest.mark.wide
def test_what_decoding_wrote_is_shared_only_when_asked_for() -> None:
    prompt = list(range(300, 340))
    cached = {}
    for share in (False, True):
        options: dict[str, Any] = {"prefill_chunk": 32, "block_size": 16, "share_decoded": share}
        with Runtime.load(TARGET, HEAD, max_batch=1, max_context=256, **options) as runtime:
            answer = tokens_of(run(runtime, prompt, SamplingParams(max_tokens=80, ignore_eos=True)))
            name = runtime.submit([*prompt, *answer], SamplingParams(max_tokens=24, ignore_eos=True))
            while runtime.busy:
                runtime.step()
            runtime.scheduler.invariants()
            cached[share] = runtime.metrics(name).cached_prompt_tokens
            stats = runtime.metrics(name).speculation
            assert stats is not None
            assert stats.total_accepted_tokens > 0  # the head's rows came along
    assert cached == {False: 32, True: 96}


def test_given_ids_do_not_meet_made_ones() -> None:
    with Runtime.load(TARGET, max_batch=1, max_context=64) as runtime:
        few = SamplingParams(max_tokens=1)
        names = [runtime.submit([1, 2], few, request_id="request-0"), runtime.submit([1, 2], few)]
        assert len(set(names)) == 2


@pytest.mark.wide
def test_simulated_acceptance_is_marked_everywhere() -> None:
    config = SpeculativeConfig(
        model=DEMO / "head", num_speculative_tokens=3, simulated_accept_length=2.5, simulated_seed=1
    )
    with Runtime.load(TARGET, config, max_batch=1, max_context=1024) as runtime:
        outputs = run(runtime, PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))
        assert all(output.simulated for output in outputs)
        stats = runtime.summary()["eagle_speculation"]
        assert stats["simulated"] is True
        assert stats["mean_acceptance_length"] == pytest.approx(2.5, abs=0.15)


def test_traces_are_silent_until_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    traces = lowlat.TraceConfig(step=True, accept=True, kv=True, tree=True)
    with caplog.at_level(logging.INFO, logger="lowlat.trace"):
        with Runtime.load(TARGET, HEAD, max_batch=1, max_context=64) as runtime:
            run(runtime, [5, 6, 7], SamplingParams(max_tokens=4))
        assert not [record for record in caplog.records if record.name == "lowlat.trace"]
        with Runtime.load(TARGET, HEAD, max_batch=1, max_context=64, traces=traces) as runtime:
            run(runtime, [5, 6, 7], SamplingParams(max_tokens=4))
    messages = [record.getMessage() for record in caplog.records if record.name == "lowlat.trace"]
    for word in ("step 1:", "accept: slot 0", "kv: ", "tree: slot 0 drafts"):
        assert any(message.startswith(word) for message in messages), word


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ([4096], {}, "prompt token 0 is 4096; ids are integers from 0 to 4095"),
        ([-1], {}, "prompt token 0 is -1"),
        ([True], {}, "prompt token 0 is True"),
        ([1.5], {}, "prompt token 0 is 1.5"),
        ([1] * 10, {"max_tokens": 300}, r"10 tokens and max_tokens 300 exceed 256 \(max_context\)"),
        ([1], {"max_tokens": 4, "stop_token_ids": (9999,)}, "stop_token_ids: 9999 is not a token id"),
        ([1], {"max_tokens": 4, "logit_bias": {5000: 1.0}}, "logit_bias: 5000 is not a token id"),
    ],
)
def test_bad_requests_are_refused_by_name(
    runtime: Runtime, prompt: list[int], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        runtime.submit(prompt, SamplingParams(**params))
    assert not runtime.busy


def test_the_queue_is_bounded(runtime: Runtime) -> None:
    names = [runtime.submit([1, 2], SamplingParams(max_tokens=2)) for _ in range(4)]
    with pytest.raises(CapacityError, match=r"max_queue"):
        runtime.submit([1, 2], SamplingParams(max_tokens=2))
    ended: list[str] = []
    while runtime.busy:
        ended.extend(output.request_id for output in runtime.step() if output.finish_reason)
    assert sorted(ended) == sorted(names)


def test_ids_are_used_once(runtime: Runtime) -> None:
    runtime.submit([1, 2], SamplingParams(max_tokens=1), request_id="mine")
    with pytest.raises(RequestError, match="mine"):
        runtime.submit([1, 2], SamplingParams(max_tokens=1), request_id="mine")
    while runtime.busy:
        runtime.step()
    with pytest.raises(RequestError, match="was used by a request that has ended"):
        runtime.submit([1, 2], SamplingParams(max_tokens=1), request_id="mine")


def test_cancelling_ends_a_request_once(runtime: Runtime) -> None:
    decoding = runtime.submit(PROMPT, SamplingParams(max_tokens=64))
    runtime.step()
    runtime.step()
    others = [runtime.submit([1, 2], SamplingParams(max_tokens=4)) for _ in range(2)]
    runtime.cancel(decoding)
    runtime.cancel(others[1])
    with pytest.raises(RequestError, match="unknown or has ended"):
        runtime.cancel(decoding)
    with pytest.raises(RequestError, match="unknown or has ended"):
        runtime.cancel("nobody")
    reasons = {}
    while runtime.busy:
        for output in runtime.step():
            if output.finish_reason:
                reasons[output.request_id] = output.finish_reason
    assert reasons == {decoding: "cancelled", others[0]: "length", others[1]: "cancelled"}
    assert runtime.metrics(decoding).finish_reason == "cancelled"
    assert runtime.kvcache.stats().num_used == 0


def test_depths_without_a_bucket_are_refused(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens 8 has no bucket"):
        runtime.step(8)
    with Runtime.load(TARGET, max_batch=1, max_context=64) as baseline, pytest.raises(ConfigError, match="2 has no"):
        baseline.step(2)


@pytest.mark.parametrize("window", [None, 16])
def test_a_draft_model_that_attends_beyond_its_positions_is_one_warning(
    window: int | None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    head = shutil.copytree(DEMO / "head", tmp_path / "head")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))
    speculative = SpeculativeConfig(model=head, num_speculative_tokens=1, draft_window=window, strict=True)
    with caplog.at_level(logging.WARNING, logger="lowlat"):
        Runtime.load(TARGET, speculative, max_batch=1, max_context=64).close()
    said = [record.getMessage() for record in caplog.records]
    assert [("48" in each, "64" in each, "draft_window" in each) for each in said] == [(True,) * 3] * (window is None)


def test_a_closed_runtime_says_so() -> None:
    runtime = Runtime.load(TARGET, max_batch=1, max_context=64)
    runtime.close()
    runtime.close()
    with pytest.raises(LowlatError, match="closed"):
        runtime.submit([1])


def test_a_head_that_does_not_fit_is_one_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    lenient = SpeculativeConfig(model=tmp_path / "nothing")
    with (
        caplog.at_level(logging.WARNING, logger="lowlat"),
        Runtime.load(TARGET, lenient, max_batch=1, max_context=64) as r,
    ):
        assert [record.getMessage()[:18] for record in caplog.records] == ["speculation is off"]
        assert r.speculation_error is not None
        assert "nothing" in r.speculation_error
        run(r, [1, 2, 3], SamplingParams(max_tokens=4))
        assert "eagle_speculation" not in r.summary()
    with pytest.raises(ConfigError, match="nothing"):
        Runtime.load(TARGET, SpeculativeConfig(model=tmp_path / "nothing", strict=True), max_batch=1, max_context=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 1 << 19}, "exceeds the model's max_position_embeddings 2048|max_position_embeddings"),
        ({"device": "cpu", "executor": "graph"}, "executor 'graph' needs an NVIDIA GPU.*use 'reference' or 'auto'"),
        ({"device": "cpu", "executor": "eager"}, "executor 'eager' needs an NVIDIA GPU, and the CPU was asked for"),
        ({"executor": "fast"}, "executor must be 'auto', 'reference', 'eager' or 'graph', got 'fast'"),
        ({"device": "tpu"}, "device must be"),
        ({"nonsense": 1}, "unknown option 'nonsense'"),
        ({"kv_blocks": 3, "max_batch": 0}, "max_batch must be from 1 to 32"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runtime.load(TARGET, **options)


def test_what_does_not_fit_is_refused_with_numbers() -> None:
    spec = BufferSpec("x", (1,), torch.float32, Role.STATE)
    assert spec.num_bytes == 4
    with pytest.raises(ConfigError, match=r"GiB are needed on cpu .*kv 4096.00.*lower max_batch"):
        check_fits(MemoryNeed(0, 4096 * 2**30, 0, 0), torch.device("cpu"))
    check_fits(MemoryNeed(1, 1, 1, 1), torch.device("cpu"))
