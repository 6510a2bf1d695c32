"""N-gram and suffix drafts: what is drafted, by reference and walked kernel; programs, runtime, loops and lowering."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import load_fake
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import Bench
from kernel_walk import Walker, walkable
from lowered import Pair
from ngram_cases import drafted, random_text
from recording import run_all, run_one
from stages import wide
from suffix_cases import Options, check_suffix_draft, expected_rows
from suffix_cases import arguments as suffix_arguments
from tiny_models import make_target

from lowlat import ConfigError, Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import RequestError, ShapeError
from lowlat.graphs import Bucket, Role
from lowlat.graphs.program import Stage
from lowlat.kernels.reference.speculation.ngram_draft import ngram_draft
from lowlat.kernels.reference.speculation.suffix_draft import suffix_draft
from lowlat.kernels.speculation.ngram_draft import ngram_draft as ngram_kernel
from lowlat.kernels.speculation.suffix_draft import suffix_draft as suffix_kernel
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.models.target import read_model_config
from lowlat.speculators.base import Speculator
from lowlat.speculators.methods import METHODS, load_speculator, plan_speculator
from lowlat.speculators.ngram.speculator import NgramSpeculator
from lowlat.speculators.suffix.speculator import SuffixSpeculator

SIZES: dict[str, Any] = {"max_batch": 3, "max_context": 128, "block_size": 4, "prefill_chunk": 8}
OPTIONS: dict[str, Any] = {**SIZES, "device": "cpu"}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
SUFFIX = SpeculativeConfig(method="suffix", num_speculative_tokens=5)
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=90)
CHOICES = st.builds(
    Options,
    st.sampled_from((1, 2, 5, 24, 32)),
    st.sampled_from((0.3, 0.5, 1.0, 2.5, 16.0)),
    st.sampled_from((0.0, 0.1, 0.3, 0.5, 1.0)),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that soon repeats itself; the kernels cover its sizes."""
    directory = tmp_path_factory.mktemp("target")
    make_target(directory, "llama", gain=0.3, num_hidden_layers=2, hidden_size=64, intermediate_size=64, head_dim=64)
    return directory


TEXTS_AHEAD = [
    (prompt, SamplingParams(max_tokens=30, seed=k, temperature=0.7 * (k % 2)))
    for k, prompt in enumerate(([5, 6, 7, 8] * 4, [9, 3], [1, 2, 3] * 6, [4]))
]


@pytest.fixture(scope="module")
def alone(target: Path) -> list[list[int]]:
    """The tokens of each without drafts."""
    with Runtime.load(target, **OPTIONS) as runtime:
        return [run_one(runtime, *each) for each in TEXTS_AHEAD]


def arguments(texts: list[list[int]], count: int, context: int = 64) -> dict[str, torch.Tensor]:
    """Return the arguments of the n-gram operation for one text a slot."""
    found = suffix_arguments(texts, count + 1, context)
    return {name: found[name] for name in found if name not in ("draft_shares", "match_lens")}


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
def test_what_ngrams_draft(text: list[int], expected: list[int] | None) -> None:
    given = arguments([text], 4)
    ngram_draft(**given, min_match=2, max_match=4)
    assert given["draft_nodes"].tolist() == [[-1, *(expected or [-1] * 4)]]


@pytest.mark.parametrize("matches", [(1, 1), (2, 4), (3, 3), (1, 16)])
def test_ngrams_of_random_texts_against_plain_words(matches: tuple[int, int]) -> None:
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


@pytest.mark.parametrize(
    ("text", "options", "drafts", "length"),
    [
        ([1, 2, 3, 4, 5, 1, 2], (), [3, 4], 2),  # no more than the ending has
        ([1, 2, 3, 4, 5, 1, 2], (24, 2.0), [3, 4, 5, 1], 2),
        ([1, 2, 9, 7, 1, 2, 8, 6, 1, 2, 9, 7, 5, 1, 2], (), [9, 7], 2),  # the more frequent one
        ([1, 2, 9, 0, 1, 2, 8, 5, 1, 2], (), [8, 5], 2),  # of equally frequent ones the last
        ([1, 2, 9, 0, 1, 2, 8, 5, 1, 2], (24, 1.0, 0.6), [], 0),
        ([7, 7, 7], (), [7, 7], 2),  # overlapping itself
        ([3, 1, 2, 5, 9, 4, 1, 2, 6, 0, 3, 1, 2], (), [5, 9, 4], 3),  # the longer ending
        ([1], (), [], 0),
        ([1, 2, 3], (), [], 0),
    ],
)
def test_what_suffixes_draft(text: list[int], options: tuple[Any, ...], drafts: list[int], length: int) -> None:
    found = suffix_arguments([text], 5, 64)
    suffix_draft(**{**found, **Options(*options)._asdict()})
    assert found["draft_nodes"].tolist() == [[-1, *drafts, *[-1] * (4 - len(drafts))]]
    assert found["match_lens"].tolist() == [length]


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 8), CHOICES)
def test_suffixes_of_texts_against_plain_words(texts: list[list[int]], rows: int, options: Options) -> None:
    found = suffix_arguments(texts, rows, 96)
    suffix_draft(**{**found, **options._asdict()})
    nodes, shares, lengths = expected_rows(texts, rows, options)
    assert found["draft_nodes"].tolist() == nodes
    assert found["draft_shares"].tolist() == shares
    assert [[length] for length in found["match_lens"].tolist()] == lengths


@pytest.mark.parametrize("options", [wide(Options()), Options(3, 0.5, 0.4), wide(Options(32, 16.0, 0.0))])
def test_the_suffix_kernel_walked_by_few_threads(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that short texts take several turns and a warp several lengths."""
    drafts = 0
    for seed, lengths in enumerate(
        ([1, 2, 3], [64, 65], [600], [700], [250, 256, 257], [511, 513], [40] * 5, [512, 700])
    ):
        walker = Walker()
        with walkable(walker, "common.memory", "speculation.suffix_draft") as modules:
            monkeypatch.setattr(modules[-1], "THREADS", 64)

            def run(*calls: KernelCall, walker: Walker = walker) -> None:
                for call in calls:
                    walker.run(call)

            def make(*given: Any, module: Any = modules[-1], **options: Any) -> Sequence[KernelCall]:
                found: Sequence[KernelCall] = module.suffix_draft(*given, **options)
                return found

            bench = Bench(torch.device("cpu"), run)
            drafts += check_suffix_draft(bench, seed, context=701, lengths=lengths, options=options, calls=make)
    assert drafts > 10


def suffix_operands() -> dict[str, Any]:
    return {**suffix_arguments([[1, 2], [3, 4]], 3, 8), **Options()._asdict()}


def ngram_operands() -> dict[str, Any]:
    return {**arguments([[1, 2], [3, 4]], 3), "min_match": 2, "max_match": 4}


WRONG, ONE_ROW = torch.zeros(3, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int32)
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    *[(both, {"slots": WRONG}, "where B = 3") for both in (ngram_operands, suffix_operands)],
    *[(both, {"tokens": ONE_ROW}, "tokens must have rows for 2 slots") for both in (ngram_operands, suffix_operands)],
    (ngram_operands, {"draft_live": WRONG}, "draft_live must"),
    (ngram_operands, {"draft_lens": WRONG}, "draft_lens must"),
    (ngram_operands, {"min_match": 0}, "got min 0 and max 4"),
    (ngram_operands, {"min_match": 5}, "got min 5 and max 4"),
    (ngram_operands, {"max_match": 17}, "from 1 to 16 long"),
    (suffix_operands, {"draft_shares": WRONG}, "draft_shares must"),
    (suffix_operands, {"match_lens": WRONG}, "match_lens must"),
    (suffix_operands, {"max_depth": 33}, "max_depth must be from 1 to 32, got 33"),
    (suffix_operands, {"max_spec_factor": 0.0}, "max_spec_factor must be above 0"),
    (suffix_operands, {"min_token_prob": 1.5}, "min_token_prob must be from 0 to 1, got 1.5"),
]


def test_what_does_not_fit_is_refused() -> None:
    """By the reference and by the kernel."""
    operations: dict[Any, Any] = {
        ngram_operands: (ngram_draft, ngram_kernel),
        suffix_operands: (suffix_draft, suffix_kernel),
    }
    for operands, wrong, match in REFUSED:
        for operation in operations[operands]:
            with pytest.raises(ShapeError, match=match):
                operation(**{**operands(), **wrong})


@pytest.mark.parametrize(
    ("options", "speculator", "reported"),
    [
        (NGRAM, NgramSpeculator(2, 4), {"prompt_lookup_min": 2, "prompt_lookup_max": 4}),
        (
            SUFFIX,
            SuffixSpeculator(24, 1.0, 0.1),
            {"suffix_cache_max_depth": 24, "max_spec_factor": 1.0, "min_token_prob": 0.1},
        ),
    ],
)
def test_the_table_of_methods(
    options: SpeculativeConfig, speculator: Speculator, reported: dict[str, Any], target: Path
) -> None:
    config = read_model_config(target)
    assert all(each.method == name for name, each in METHODS.items()) and options.method in METHODS
    found = load_speculator(options, config)
    assert found.speculator == plan_speculator(options, config) == speculator
    assert not found.weights and found.directory is None and not found.speculator.weight_plan("bfloat16")
    assert found.speculator.draft_config is None and not found.speculator.rotations
    assert found.speculator.report() == {"method": options.method, **reported}


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_step_has_one_operation_more_than_the_baseline_and_the_hand_over(method: str, target: Path) -> None:
    """No state, no weights, nothing in prefill; at S = 0 the programs are the baseline's. Every bucket lowers."""
    pair, plain = Pair(target, method=method, num_speculative_tokens=4), Pair(target)
    baseline = [op.kind for op in plain.program(0, 2).ops]
    for depth in range(8):
        program = pair.program(depth, 2)
        added = [f"{method}_draft", "tree_masks"] if depth else []
        assert [op.kind for op in program.ops] == [*baseline[:-1], *added, "publish"]
        assert {spec.name for spec in program.specs(Role.STATE)} == {
            spec.name for spec in plain.program(0, 2).specs(Role.STATE)
        }
        lowered = pair.lower(depth, 3)
        names = [call.kernel.name for call in lowered.calls]
        assert sum(name.startswith(f"{method}_draft_256_") for name in names) == (depth > 0)
        if depth:
            (op,) = (op for op in program.ops if op.stage is Stage.DRAFT)
            assert program.buffers[op.writes["draft_nodes"]].shape == (2, depth + 1)
            (group,) = (group for group in lowered.groups if group.ops[0].kind == op.kind)
            assert [call.grid for call in group.kernel_calls] == [(3, 1, 1)]


@pytest.mark.parametrize(("config", "device_loop"), [(NGRAM, False), (SUFFIX, True)])
def test_a_device_that_runs_ahead_gives_the_same(
    device_loop: bool, config: SpeculativeConfig, target: Path, alone: list[list[int]]
) -> None:
    runtime, device = load_fake(target, config, device_loop=device_loop, seed=3, lead=3, **SIZES)
    with runtime:
        names = [runtime.submit(*each) for each in TEXTS_AHEAD]
        tokens = run_all(runtime)
        assert [tokens[name] for name in names] == alone
        assert device.count("loop") > 0 if device_loop else device.count("loop") == 0
        assert runtime.summary()["eagle_speculation"]["total_accepted_tokens"] > 20


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
        name = runtime.submit(prompt, sampling)
        tokens: list[int] = []
        verified: list[int] = []
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
        wrong: Any
        for wrong in (-1, 1.5, "2"):
            with pytest.raises(RequestError, match="max_draft_tokens"):
                runtime.set_draft_limit(runtime.submit(prompt, sampling), wrong)
        with pytest.raises(RequestError, match="unknown or has ended"):
            runtime.set_draft_limit(name, 1)


def test_what_is_missing_or_too_much_is_refused(target: Path) -> None:
    with pytest.raises(ConfigError, match="model must be the path of a draft model's directory for method 'eagle3'"):
        SpeculativeConfig()
    with pytest.raises(ConfigError, match=r"max_decoding_tokens 5 is below the 6 nodes"):
        SpeculativeConfig(method="ngram", num_speculative_tokens=5, max_decoding_tokens=5)


def test_an_imposed_acceptance_is_imposed_on_what_was_drafted(target: Path) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=3, simulated_accept_length=4.0)
    with Runtime.load(target, config, **OPTIONS) as runtime:
        name = runtime.submit([5, 6] * 5, SamplingParams(max_tokens=30, temperature=0.0))
        run_all(runtime)
        stats = runtime.metrics(name).speculation
        assert stats is not None and stats.simulated
        assert stats.total_accepted_tokens == stats.total_draft_tokens > 0
