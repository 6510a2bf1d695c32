"""Calls of the public API with arguments of every wrong type: refused by name, and nothing is changed by them."""

import array
import copy
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording import run_all, run_one
from tiny_models import PairPaths, make_pair, make_target, random_draft_model

from lowlat import ConfigError, LowlatError, RequestError, Runtime, SamplingParams, SpeculativeConfig

SIZES: dict[str, Any] = {"max_batch": 2, "max_context": 64, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="module")
def runtime(pair: PairPaths) -> Any:
    draft = SpeculativeConfig(model=pair.head, num_speculative_tokens=2)
    with Runtime.load(pair.target, draft, **SIZES) as loaded:
        yield loaded


NO_PROMPTS = (
    b"hello",
    bytearray(b"ab"),
    memoryview(b"ab"),
    5,
    None,
    1.5,
    True,
    {1: 2},
    {1, 2},
    torch.tensor(3),
    object(),
)
NO_TOKENS = (
    *([True], [1.0], ["a"], [[1, 2]], [None], [-1], [97], [1 << 80], [b"a"]),
    *(np.array([[1, 2]]), np.array([1.0]), np.array([True]), torch.tensor([[1]]), torch.tensor([True])),
)


@pytest.mark.parametrize("prompt", [*NO_PROMPTS, *NO_TOKENS], ids=lambda prompt: type(prompt).__name__)
def test_what_is_no_prompt_is_refused(runtime: Runtime, prompt: Any) -> None:
    message = "prompt token 0 is" if any(prompt is each for each in NO_TOKENS) else "must be text or a sequence of"
    with pytest.raises(RequestError, match=message):
        runtime.submit(prompt, ONE)
    assert not runtime.busy


def test_integers_of_any_library_are_token_ids(runtime: Runtime) -> None:
    """Prompts as tokenizers and datasets give them, a generator's among them."""
    ids = [5, 6, 7]
    prompts: list[Any] = [
        *(ids, tuple(ids), range(5, 8), (each for each in ids), array.array("i", ids)),
        *(np.array(ids), np.array(ids, np.uint8), torch.tensor(ids), [np.int64(each) for each in ids]),
        list(torch.tensor(ids)),
    ]
    short: dict[str, Any] = {"max_tokens": np.int64(4), "seed": np.int32(1), "top_p": np.float32(0.5)}
    found = []
    for prompt in prompts:
        name = runtime.submit(prompt, SamplingParams(**short))
        found.append(run_all(runtime)[name])
    assert len(found[0]) == 4 and all(tokens == found[0] for tokens in found)
    given: dict[str, Any] = {"stop_token_ids": np.array([1, 2]), "logit_bias": {np.int64(3): np.float32(2)}}
    params = SamplingParams(**given, temperature=torch.tensor(0.5))  # type: ignore[arg-type]
    assert params == SamplingParams(stop_token_ids=(1, 2), logit_bias={3: 2.0}, temperature=0.5)
    assert type(params.temperature) is float and type(params.stop_token_ids[0]) is int


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a dict for params": (lambda r: r.submit([1], {"max_tokens": 1}), "params must be SamplingParams, got dict"),
    "a number for params": (lambda r: r.submit([1], 5), "params must be SamplingParams, got int"),
    "a class for params": (lambda r: r.submit([1], SamplingParams), "params must be SamplingParams, got type"),
    "a number for an id": (lambda r: r.submit([1], ONE, request_id=5), r"\(request_id\) must be text.* got 5"),
    "no text for an id": (lambda r: r.submit([1], ONE, request_id=""), r"\(request_id\) must be text, and not empty"),
    "a list for an id": (lambda r: r.submit([1], ONE, request_id=["a"]), r"\(request_id\) must be text"),
    "a number for a salt": (lambda r: r.submit([1], ONE, cache_salt=5), "cache_salt must be text, got 5"),
    "text for a switch": (lambda r: r.submit([1], ONE, allow_special="no"), "allow_special must be true or false"),
    "an unknown id": (lambda r: r.cancel("nobody"), "'nobody' is unknown or has ended"),
    "cancel None": (lambda r: r.cancel(None), r"\(request_id\) must be text, and not empty, got None"),
    "cancel a list": (lambda r: r.cancel(["a"]), r"\(request_id\) must be text"),
    "metrics of nobody": (lambda r: r.metrics("nobody"), "no metrics of request 'nobody'"),
    "metrics of a list": (lambda r: r.metrics(["a"]), r"\(request_id\) must be text"),
    "a limit for nobody": (lambda r: r.set_draft_limit("nobody", 1), "'nobody' is unknown or has ended"),
    "a text depth": (lambda r: r.step("1"), "num_speculative_tokens must be an integer, got '1'"),
    "a true depth": (lambda r: r.step(True), "num_speculative_tokens must be an integer, got True"),
    "a deep depth": (lambda r: r.step(9), "num_speculative_tokens 9 has no bucket"),
    "to speculate None": (lambda r: r.speculate(None), "num_speculative_tokens must be an integer, got None"),
    "to speculate 1.0": (lambda r: r.speculate(1.0), "num_speculative_tokens must be an integer, got 1.0"),
    "a list of options": (lambda _: SamplingParams.from_options([1]), "must map names to values, got list"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_wrong_types_are_refused_by_name(runtime: Runtime, name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises((RequestError, ConfigError), match=message):
        call(runtime)
    assert not runtime.busy


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((5,), {}, "model must be a directory or ORG/NAME of a repository, got 5"),
        ((None,), {}, "model must be a directory .* got None"),
        ((b"model",), {}, "model must be a directory"),
        (("",), {}, "model must be a directory .* got ''"),
        (("model", {"method": "ngram"}), {}, "speculative must be a SpeculativeConfig or None, got dict"),
        (("model", "ngram"), {}, "speculative must be a SpeculativeConfig or None, got str"),
        (("model", SamplingParams()), {}, "speculative must be a SpeculativeConfig or None, got SamplingParams"),
        (("model",), {"progress": 5}, "progress must be a function or None, got int"),
        (("model",), {"max_batch": "2"}, "max_batch must be an integer, got '2'"),
        (("model",), {"speculate": 1}, "unknown option 'speculate'"),
    ],
)
def test_loads_of_wrong_types_are_refused_by_name(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runtime.load(*arguments, **options)


def test_a_closed_runtime_refuses_everything_and_has_nothing_left(pair: PairPaths) -> None:
    runtime = Runtime.load(pair.target, **SIZES)
    name = runtime.submit([1], ONE)
    run_all(runtime)
    runtime.submit([1], ONE)
    runtime.close()
    runtime.close()
    assert not runtime.busy and runtime.metrics(name).completion_tokens == 1
    calls: tuple[Callable[[], Any], ...] = (
        *(lambda: runtime.submit([1]), runtime.step, lambda: runtime.cancel(name), lambda: runtime.speculate(0)),
        *(lambda: runtime.set_draft_limit(name, 1), runtime.summary, runtime.perf, runtime.__enter__),
    )
    for call in calls:
        with pytest.raises(LowlatError, match="the runtime is closed"):
            call()


def test_threads_that_close_at_once_all_find_it_closed(pair: PairPaths) -> None:
    runtime = Runtime.load(pair.target, **SIZES)
    runtime.generate([1], max_tokens=1)
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(runtime.close) for _ in range(3)]:
            done.result(20)
    with pytest.raises(LowlatError, match="the runtime is closed"):
        runtime.generate([1])


def test_a_runtime_is_of_one_process_and_no_copies(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"a Runtime cannot be copied or pickled: .* lowlat.ipc.Client"):
            call(runtime)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    for refused in (lambda: runtime.submit([1], ONE), lambda: runtime.generate([1]), runtime.step, runtime.summary):
        with pytest.raises(LowlatError, match=r"loaded by process .* fork of it, 1: load one here"):
            refused()
    runtime.close()  # leaves what is the other process's
    monkeypatch.undo()
    assert runtime.submit([1], ONE) in run_all(runtime)


def test_outputs_without_an_error_have_no_code(runtime: Runtime) -> None:
    name = runtime.submit([1, 2, 3], SamplingParams(max_tokens=5))
    gone = runtime.submit([4, 5], SamplingParams(max_tokens=50))
    outputs = runtime.step()
    runtime.cancel(gone)
    while runtime.busy:
        outputs += runtime.step()
    assert {output.finish_reason for output in outputs} == {None, "length", "cancelled"}
    assert all(output.error is None and output.error_code is None for output in outputs)
    assert runtime.metrics(name).finish_reason == "length"


@pytest.mark.parametrize("options", [{"tree": tuple((rank,) for rank in range(6))}, {"dynamic_tree_max_topk": 6}])
def test_a_tree_wider_than_the_draft_vocabulary_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """Whether or not the draft model must fit: it is the tree that does not. As wide as it is runs."""
    target = make_target(tmp_path / "target", "llama", num_hidden_layers=2)
    random_draft_model(tmp_path / "draft", target, draft_vocab_size=5)
    depth = 1 if "tree" in options else 3
    for strict in (False, True):
        draft = SpeculativeConfig(tmp_path / "draft", num_speculative_tokens=depth, strict=strict, **options)
        with pytest.raises(ConfigError, match=r"6 likeliest tokens .* 5 tokens \(draft_vocab_size\)"):
            Runtime.load(tmp_path / "target", draft, **SIZES)
    fitting = {"dynamic_tree_max_topk": 5} if depth == 3 else {"tree": tuple((rank,) for rank in range(5))}
    draft = SpeculativeConfig(tmp_path / "draft", num_speculative_tokens=depth, strict=True, **fitting)
    with Runtime.load(tmp_path / "target", draft, **SIZES) as runtime:
        assert len(run_one(runtime, [1, 2, 3], SamplingParams(max_tokens=6))) == 6
