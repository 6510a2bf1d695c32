"""Suffix drafts: what is drafted, by reference, walked kernel and programs; the method in runtime and loops."""

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
from recording import run_all, run_one
from suffix_cases import Options, arguments, check_suffix_draft, expected_rows
from tiny_models import make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ShapeError
from lowlat.kernels.reference.sampling.suffix_draft import suffix_draft
from lowlat.kernels.sampling.suffix_draft import suffix_draft as kernel
from lowlat.kernels.toolchain.kernel import KernelCall
from lowlat.models.target import read_model_config
from lowlat.speculators.methods import load_speculator, plan_speculator
from lowlat.speculators.suffix.speculator import SuffixSpeculator

SIZES: dict[str, Any] = {"max_batch": 3, "max_context": 128, "block_size": 4, "prefill_chunk": 8}
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
def test_what_is_drafted(text: list[int], options: tuple[Any, ...], drafts: list[int], length: int) -> None:
    found = arguments([text], 5, 64)
    suffix_draft(**{**found, **Options(*options)._asdict()})
    assert found["draft_nodes"].tolist() == [[-1, *drafts, *[-1] * (4 - len(drafts))]]
    assert found["match_lens"].tolist() == [length]


@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(1, 8), CHOICES)
def test_texts_against_plain_words(texts: list[list[int]], rows: int, options: Options) -> None:
    found = arguments(texts, rows, 96)
    suffix_draft(**{**found, **options._asdict()})
    nodes, shares, lengths = expected_rows(texts, rows, options)
    assert found["draft_nodes"].tolist() == nodes
    assert found["draft_shares"].tolist() == shares
    assert [[length] for length in found["match_lens"].tolist()] == lengths


@pytest.mark.parametrize("options", [Options(), Options(3, 0.5, 0.4), Options(32, 16.0, 0.0)])
def test_the_kernel_walked_by_few_threads(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that short texts take several turns and a warp several lengths."""
    drafts = 0
    for seed, lengths in enumerate(
        ([1, 2, 3], [64, 65], [600], [700], [250, 256, 257], [511, 513], [40] * 5, [512, 700])
    ):
        walker = Walker()
        with walkable(walker, "common.memory", "sampling.suffix_draft") as modules:
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


@pytest.mark.parametrize("operation", [suffix_draft, kernel])
def test_what_does_not_fit_is_refused(operation: Any) -> None:
    good = {**arguments([[1, 2], [3, 4]], 3, 8), **Options()._asdict()}
    wrong = torch.zeros(3, dtype=torch.int32)
    for options, match in (
        ({"slots": wrong}, "slots must"),
        ({"draft_shares": wrong}, "draft_shares must"),
        ({"match_lens": wrong}, "match_lens must"),
        ({"tokens": torch.zeros(1, 8, dtype=torch.int32)}, "tokens must have rows for 2 slots"),
        ({"max_depth": 33}, "max_depth must be from 1 to 32, got 33"),
        ({"max_spec_factor": 0.0}, "max_spec_factor must be above 0"),
        ({"min_token_prob": 1.5}, "min_token_prob must be from 0 to 1, got 1.5"),
    ):
        with pytest.raises(ShapeError, match=match):
            operation(**{**good, **options})


def test_the_method_and_its_programs(target: Path) -> None:
    """One operation more than the baseline, no state, no weights; its launches lower in every bucket."""
    config = read_model_config(target)
    found = load_speculator(SUFFIX, config)
    assert found.speculator == plan_speculator(SUFFIX, config) == SuffixSpeculator(24, 1.0, 0.1)
    assert not found.weights and found.directory is None and found.speculator.draft_config is None
    options = {"suffix_cache_max_depth": 24, "max_spec_factor": 1.0, "min_token_prob": 0.1}
    assert found.speculator.report() == {"method": "suffix", **options}
    pair, plain = Pair(target, method="suffix"), Pair(target)
    baseline = [op.kind for op in plain.program(0, 2).ops]
    for depth in range(8):
        added = ["suffix_draft", "tree_masks"] if depth else []
        assert [op.kind for op in pair.program(depth, 2).ops] == [*baseline[:-1], *added, "publish"]
        names = [call.kernel.name for call in pair.lower(depth, 3).calls]
        assert sum(name.startswith("suffix_draft_256_") for name in names) == (depth > 0)


@pytest.mark.parametrize("device_loop", [False, True])
def test_a_device_that_runs_ahead_gives_the_same(device_loop: bool, target: Path) -> None:
    prompts = [[5, 6, 7, 8] * 4, [9, 3], [1, 2, 3] * 6, [4]]
    samplings = [SamplingParams(max_tokens=30, seed=k, temperature=0.7 * (k % 2)) for k in range(4)]
    with Runtime.load(target, device="cpu", **SIZES) as runtime:
        expected = [run_one(runtime, *each) for each in zip(prompts, samplings, strict=True)]
    runtime, _ = load_fake(target, SUFFIX, device_loop=device_loop, seed=3, lead=3, **SIZES)
    with runtime:
        names = [runtime.submit(*each) for each in zip(prompts, samplings, strict=True)]
        tokens = run_all(runtime)
        assert [tokens[name] for name in names] == expected
        assert runtime.summary()["eagle_speculation"]["total_accepted_tokens"] > 20
