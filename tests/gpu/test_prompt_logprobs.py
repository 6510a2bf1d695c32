"""The logprobs of prompts on a GPU: each kernel, and whole runtimes next to each other and the reference."""

from pathlib import Path
from typing import Any

import pytest
from kernel_cases import Bench
from needed_gpus import need_gpus
from prompt_logprob_cases import check_all
from recording import prompt_of, run_all, tokens_of
from tiny_models import PairPaths, make_pair

import lowlat
from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.ipc.prompt_logprobs import PromptLogprobs
from lowlat.options.request import StepOutput

DEMO = Path(lowlat.__file__).parent / "demo"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 320, "block_size": 16, "prefill_chunk": 64} | {
    "device": "cuda",
    "dtype": "bfloat16",
}
LENGTHS = (1, 2, 63, 64, 65, 129, 200)


@pytest.mark.parametrize("width", [24, 4096])
def test_against_the_reference(bench: Bench, width: int) -> None:
    check_all(bench, width=width, vocabularies=(7, 300, 128256))


def outputs_of(runtime: Runtime, prompt: list[int], **params: Any) -> list[StepOutput]:
    """The outputs of a request alone."""
    runtime.submit(prompt, SamplingParams(**{"max_tokens": 5, "ignore_eos": True, **params}))
    outputs: list[StepOutput] = []
    while runtime.busy:
        outputs += runtime.step()
    runtime.scheduler.invariants()
    return outputs


def found_in(pair: PairPaths, **options: Any) -> list[PromptLogprobs]:
    """Return a runtime's logprobs for prompts of all lengths; check tokens and the next one's bits on the way."""
    draft = SpeculativeConfig(model=pair.head, num_speculative_tokens=3, strict=True)
    found = []
    with Runtime.load(pair.target, draft, **{**OPTIONS, **options}) as runtime:
        for length in LENGTHS:
            prompt = prompt_of(length, seed=length)
            plain = outputs_of(runtime, prompt, logprobs=3)
            asked = outputs_of(runtime, prompt, logprobs=3, prompt_logprobs=3)
            assert tokens_of(asked) == tokens_of(plain)
            first, of_prompt = plain[0], asked[0].prompt_logprobs
            assert of_prompt is not None and first.logprobs is not None
            behind = outputs_of(runtime, [*prompt, first.token_ids[0]], prompt_logprobs=3)[0].prompt_logprobs
            assert behind is not None and behind[-1] is not None
            drawn = first.logprobs[0]
            assert (behind[-1].token_id, behind[-1].logprob, behind[-1].top) == (
                drawn.token_id, drawn.logprob, drawn.top,
            )  # fmt: skip
            found.append(of_prompt)
        # next to requests that decode, and two that ask at once
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        names = [runtime.submit(prompt_of(20, seed=90 + number), params) for number in range(2)]
        runtime.step()
        for length in LENGTHS[-2:]:
            asks = SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=3)
            names.append(runtime.submit(prompt_of(length, seed=length), asks))
        together: list[PromptLogprobs] = []
        while runtime.busy:
            together += [each.prompt_logprobs for each in runtime.step() if each.prompt_logprobs is not None]
        assert sorted(together, key=len) == found[-2:]
    return found


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_executors_have_the_same_bits_and_the_references_values(family: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, family, **SIZES)
    found = found_in(pair)
    for options in ({"executor": "eager"}, {"fuse": False}, {"device_loop": True}, {"max_prefill_chunks": 1}):
        assert found_in(pair, **options) == found, options
    with Runtime.load(pair.target, None, **{**OPTIONS, "device": "cpu"}) as runtime:
        for length, mine in zip(LENGTHS, found, strict=True):
            theirs = outputs_of(runtime, prompt_of(length, seed=length), prompt_logprobs=3)[0].prompt_logprobs
            assert theirs is not None and theirs.prompt() == mine.prompt()
            for one, other in zip(mine, theirs, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert one.logprob == pytest.approx(other.logprob, abs=0.15)
                    assert one.top[0][1] == pytest.approx(other.top[0][1], abs=0.15)


def test_nothing_is_waited_for_or_copied_after_the_load(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama", **SIZES)
    with Runtime.load(pair.target, None, **OPTIONS) as runtime:
        before = runtime.perf()
        runtime.submit(prompt_of(200), SamplingParams(max_tokens=5, ignore_eos=True, prompt_logprobs=20))
        run_all(runtime)
        after = runtime.perf()
    assert (after.synchronisations, after.copies) == (before.synchronisations, before.copies)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("invariant", [False, True])
def test_two_ranks(invariant: bool) -> None:
    """Of the bundled pair: tokens as without, the next token's bits, and near what one rank gives.

    Two GPUs: a pass has 64 rows, and grids of two ranks that wait for each other do not fit on one.
    """
    need_gpus(2)
    pair = PairPaths(DEMO / "target", DEMO / "head")
    own = {"executor": "graph", "tp_invariant": invariant}
    found, alone = (found_in(pair, **own, tensor_parallel_size=size) for size in (2, 1))
    if invariant:
        assert found == alone
    for mine, theirs in zip(found, alone, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=0.15)
