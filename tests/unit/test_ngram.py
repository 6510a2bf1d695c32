"""N-gram drafts: what is drafted, by the reference and in the programs; the method in runtime, loops and lowering."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import load_fake
from lowered import Pair
from ngram_cases import drafted, random_text
from recording import run_all, run_one
from tiny_models import make_target

from lowlat import ConfigError, Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import RequestError, ShapeError
from lowlat.graphs import Bucket, Role
from lowlat.host.loading import make_topologies
from lowlat.kernels.reference.sampling.ngram_draft import ngram_draft
from lowlat.kernels.sampling.ngram_draft import ngram_draft as kernel
from lowlat.models.program import Program, Stage
from lowlat.models.target import read_model_config
from lowlat.speculators.methods import METHODS, load_speculator, plan_speculator
from lowlat.speculators.ngram.speculator import NgramSpeculator

OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 128, "block_size": 4, "prefill_chunk": 8, "device": "cpu"}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that soon repeats itself; the kernels cover its sizes."""
    directory = tmp_path_factory.mktemp("target")
    make_target(directory, "llama", gain=0.3, num_hidden_layers=2, hidden_size=64, intermediate_size=64, head_dim=64)
    return directory


def arguments(texts: list[list[int]], count: int, context: int = 64) -> dict[str, torch.Tensor]:
    """What the operation takes for texts in slots of their own, in order."""
    tokens = torch.full((len(texts), context), -7, dtype=torch.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    batch = len(texts)
    return {
        "tokens": tokens,
        "slots": torch.arange(batch, dtype=torch.int32),
        "draft_live": torch.ones(batch, dtype=torch.uint8),
        "draft_lens": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "draft_nodes": torch.full((batch, count + 1), -77, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 9, 1, 2, 3, 8, 1, 2], [3, 8, 1, 2]),  # the last of two equally long ones
        ([5, 1, 2, 9, 0, 1, 2, 3, 5, 1, 2], [9, 0, 1, 2]),  # the longest
        ([7, 7, 7], [7, 7, 7, 7]),  # which overlaps itself: a period of one
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
        ([1, 2, 3, 4, 2, 3, 4], [2, 3, 4, 2]),  # past the end with the period
        ([1, 2, 3, 4, 1], None),  # one token is fewer than the least
        ([1], None),
        ([1, 1], None),
    ],
)
def test_what_is_drafted(text: list[int], expected: list[int] | None) -> None:
    given = arguments([text], 4)
    ngram_draft(**given, min_match=2, max_match=4)
    assert given["draft_nodes"].tolist() == [[-1, *(expected or [-1] * 4)]]


@pytest.mark.parametrize("matches", [(1, 1), (2, 4), (3, 3), (1, 16)])
def test_random_texts_against_plain_words(matches: tuple[int, int]) -> None:
    source, drafting = random.Random(sum(matches)), 0
    for _ in range(150):
        texts = [random_text(source, source.randint(1, 64)) for _ in range(3)]
        given = arguments(texts, 5)
        given["draft_live"][1] = 0
        ngram_draft(**given, min_match=matches[0], max_match=matches[1])
        for index, text in enumerate(texts):
            drafts = [] if index == 1 else drafted(text, 5, *matches)
            assert given["draft_nodes"][index].tolist() == [-1, *(drafts or [-1] * 5)]
            drafting += bool(drafts)
    assert 50 < drafting < 300


@pytest.mark.parametrize("operation", [ngram_draft, kernel])
def test_shapes_that_do_not_fit_are_refused(operation: Any) -> None:
    good = arguments([[1, 2], [3, 4]], 3)
    wrong = torch.zeros(3, dtype=torch.int32)
    for options, match in (
        ({"slots": wrong}, "slots must"),
        ({"draft_live": wrong}, "draft_live must"),
        ({"draft_lens": wrong}, "draft_lens must"),
        ({"tokens": torch.zeros(1, 8, dtype=torch.int32)}, "tokens must have rows for 2 slots"),
        ({"min_match": 0}, "got min 0 and max 4"),
        ({"min_match": 5}, "got min 5 and max 4"),
        ({"max_match": 17}, "from 1 to 16 long"),
    ):
        with pytest.raises(ShapeError, match=match):
            operation(**{**good, "min_match": 2, "max_match": 4, **options})


def test_the_table_of_methods(target: Path) -> None:
    config = read_model_config(target)
    assert all(each.method == name for name, each in METHODS.items()) and "ngram" in METHODS
    found = load_speculator(NGRAM, config)
    assert found.speculator == plan_speculator(NGRAM, config) == NgramSpeculator(2, 4)
    assert not found.weights and found.directory is None and not found.speculator.weight_plan("bfloat16")
    assert found.speculator.draft_config is None and found.speculator.rope is None
    assert found.speculator.report() == {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def kinds_of(program: Program) -> list[str]:
    return [op.kind for op in program.ops]


def test_a_step_has_one_operation_more_than_the_baseline_and_the_hand_over(target: Path) -> None:
    """No state, no weights, nothing in prefill; at S = 0 the programs are the baseline's."""
    pair, plain = Pair(target, method="ngram", num_speculative_tokens=4), Pair(target)
    baseline = kinds_of(plain.program(0, 2))
    assert kinds_of(pair.program(0, 2)) == baseline
    for depth in range(1, 8):
        program = pair.program(depth, 2)
        assert kinds_of(program) == [*baseline[:-1], "ngram_draft", "tree_masks", "publish"]
        (op,) = (op for op in program.ops if op.stage is Stage.DRAFT)
        assert program.buffers[op.writes["draft_nodes"]].shape == (2, depth + 1)
        assert {spec.name for spec in program.specs(Role.STATE)} == {
            spec.name for spec in plain.program(0, 2).specs(Role.STATE)
        }


@pytest.mark.parametrize("depth", range(8))
def test_every_bucket_lowers(depth: int, target: Path) -> None:
    lowered = Pair(target, method="ngram").lower(depth, 3)
    names = [call.kernel.name for call in lowered.calls]
    assert sum(name.startswith("ngram_draft_256_") for name in names) == (depth > 0)
    for group in lowered.groups:
        if group.ops[0].kind == "ngram_draft":
            (call,) = group.kernel_calls
            assert call.grid == (3, 1, 1)


@pytest.mark.parametrize("device_loop", [False, True])
def test_a_device_that_runs_ahead_gives_the_same(device_loop: bool, target: Path) -> None:
    prompts = [[5, 6, 7, 8] * 4, [9, 3], [1, 2, 3] * 6, [4]]
    samplings = [SamplingParams(max_tokens=30, seed=k, temperature=0.7 * (k % 2)) for k in range(4)]
    with Runtime.load(target, **OPTIONS) as runtime:
        expected = [run_one(runtime, *each) for each in zip(prompts, samplings, strict=True)]
    runtime, device = load_fake(target, NGRAM, device_loop=device_loop, seed=3, lead=3, **_without_device())
    with runtime:
        names = [runtime.submit(*each) for each in zip(prompts, samplings, strict=True)]
        tokens = run_all(runtime)
        assert [tokens[name] for name in names] == expected
        assert device.count("loop") > 0 if device_loop else device.count("loop") == 0
        speculation = runtime.summary()["eagle_speculation"]
        assert speculation["total_accepted_tokens"] > 20


def _without_device() -> dict[str, Any]:
    return {name: value for name, value in OPTIONS.items() if name != "device"}


def test_a_text_without_repetition_costs_no_drafts(target: Path) -> None:
    """No step drafts where nothing stood before."""
    with Runtime.load(
        target, SpeculativeConfig(method="ngram", prompt_lookup_min=16, prompt_lookup_max=16), **OPTIONS
    ) as r:
        name = r.submit([1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0))
        bucket, state = Bucket(1, 4, 3), r.executor.state
        while r.busy:
            r.step()
            assert int(state["num_drafts"].sum()) == 0
        assert r.executor.scratch(bucket)["num_verified"].tolist() == [0]
        assert r.metrics(name).num_steps == 11 and r.metrics(name).speculation is None
        assert "eagle_speculation" not in r.summary()


def test_limits_of_requests_hold(target: Path) -> None:
    sampling = SamplingParams(max_tokens=30, temperature=0.0, max_draft_tokens=1)
    with Runtime.load(target, NGRAM, **OPTIONS) as runtime:
        name = runtime.submit([5, 6] * 5, sampling)
        run_all(runtime)
        stats = runtime.metrics(name).speculation
        assert stats is not None and stats.total_draft_tokens == stats.num_drafts > 0


def test_a_limit_can_be_changed_while_a_request_runs(target: Path) -> None:
    """And before it has a slot; whatever it is, the tokens are the same."""
    sampling, prompt = SamplingParams(max_tokens=60, temperature=0.0), [5, 6] * 5
    with Runtime.load(target, **OPTIONS) as runtime:
        expected = run_one(runtime, prompt, sampling)
    with Runtime.load(target, NGRAM, **OPTIONS) as runtime:
        name, tokens, verified = runtime.submit(prompt, sampling), [], []
        runtime.set_draft_limit(name, 0)
        for number in range(200):
            if number in (16, 20):
                runtime.set_draft_limit(name, {16: 2, 20: None}[number])
            before = runtime.metrics(name).speculation
            for output in runtime.step():
                tokens += output.token_ids
            after = runtime.metrics(name).speculation
            verified.append((after.total_draft_tokens if after else 0) - (before.total_draft_tokens if before else 0))
            if not runtime.busy:
                break
        assert tokens == expected
        assert set(verified[:16]) == {0} and max(verified[16:20]) == 2 and max(verified[20:24]) == 4
        for wrong in (-1, 1.5, "2"):
            with pytest.raises(RequestError, match="max_draft_tokens"):
                runtime.set_draft_limit(runtime.submit(prompt, sampling), wrong)
        with pytest.raises(RequestError, match="unknown or has ended"):
            runtime.set_draft_limit(name, 1)


def test_what_is_missing_or_too_much_is_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="model must be the path of a draft model's directory for method 'eagle3'"):
        SpeculativeConfig()
    limited = SpeculativeConfig(method="ngram", num_speculative_tokens=5, max_decoding_tokens=5)
    with pytest.raises(ConfigError, match=r"max_decoding_tokens 5 is below num_speculative_tokens \+ 1 = 6"):
        make_topologies(limited)


def test_an_imposed_acceptance_is_imposed_on_what_was_drafted(target: Path) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3, simulated_accept_length=4.0)
    with Runtime.load(target, config, **OPTIONS) as runtime:
        name = runtime.submit([5, 6] * 5, SamplingParams(max_tokens=30, temperature=0.0))
        run_all(runtime)
        stats = runtime.metrics(name).speculation
        assert stats is not None and stats.simulated
        assert stats.total_accepted_tokens == stats.total_draft_tokens > 0
