"""Blocks of more drafts than usual while drafts are accepted: when they are made, and that they change no token."""

from contextlib import closing
from typing import Any

import pytest
from fake_device import load_fake
from recording import assert_same, check_invariants, prompt_of, run_all, traced
from stages import later
from tiny_dflash import dflash_draft_model
from tiny_models import PairPaths, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.errors import ConfigError
from lowlat.step.ladder import StepLadder
from lowlat.step.variants import PLAIN

OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 128, "block_size": 4, "prefill_chunk": 8, "dtype": "float32"}
SECOND: dict[str, Any] = {"conv": (2, 16), "selector": (8, 6)}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.6, "logprobs": 2},
    "penalised": {"temperature": 0.8, "presence_penalty": -1.5, "repetition_penalty": 1.1},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A target whose next token its embedding often tells, and draft models whose first draft is that one."""
    folder = tmp_path_factory.mktemp("pair")
    made, model = PairPaths(folder / "target", folder / "head"), make_target(folder / "target", "llama", gain=0.45)
    for name, more in (("dflash", {}), ("dflash2", SECOND)):
        shape = {"block_size": 16, "layout": "speculators", "num_attention_heads": 8, **more}
        dflash_draft_model(folder / name, model, copies=True, **shape)
    dflash_draft_model(folder / "short", model, block_size=8)
    return made


def speculation(pair: PairPaths, draft: str = "dflash", most: int = 15, **own: Any) -> SpeculativeConfig:
    given = {"max_block_drafts": most, "num_speculative_tokens": 1, **own}
    return SpeculativeConfig(model=pair.head.parent / draft, method="dflash", strict=True, **given)


def params(mode: str = "greedy", max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True, **MODES[mode])


def longer(runtime: Runtime) -> dict[str, int]:
    found: dict[str, int] = runtime.summary().get("longer_drafts", {"steps": 0, "tokens": 0})
    return found


@pytest.mark.parametrize(("draft", "mode"), [("dflash", "greedy"), later("dflash2", "penalised")])
def test_longer_blocks_change_nothing(draft: str, mode: str, pair: PairPaths) -> None:
    with Runtime.load(pair.target, device="cpu", **OPTIONS) as runtime:
        expected = traced(runtime, prompt_of(13), params(mode))
    with Runtime.load(pair.target, speculation(pair, draft=draft), device="cpu", **OPTIONS) as runtime:
        found = traced(runtime, prompt_of(13), params(mode))
        assert longer(runtime)["steps"] > 3
        check_invariants(runtime)
    assert_same(found, expected)


def test_looping_steps_give_the_same_tokens(pair: PairPaths) -> None:
    """Both lengths are launched ahead and are repeated on the device, whatever comes after what."""
    requests = [(prompt_of(9 + n, seed=n), params(mode, 50 - 11 * n)) for n, mode in enumerate(MODES)]
    with Runtime.load(pair.target, device="cpu", **OPTIONS) as runtime:
        names = [runtime.submit(*request) for request in requests]
        tokens = run_all(runtime)
        expected = [tokens[name] for name in names]
    runtime, device = load_fake(
        pair.target, speculation(pair), device_loop=True, seed=1, lead=3, **OPTIONS, prefix_reuse=False
    )
    with closing(runtime):
        names = [runtime.submit(*request) for request in requests]
        tokens = run_all(runtime)
        assert [tokens[name] for name in names] == expected
        kinds = {entry[1].rows for entry in device.log if entry[0] == "loop"}
        assert {2, 16} <= kinds


@pytest.mark.parametrize(("acceptance", "most"), [(1.0, 9), (0.3, 26)])
def test_a_block_is_longer_while_drafts_are_accepted(acceptance: float, most: int, pair: PairPaths) -> None:
    """100 tokens: three steps of 8 say so, and others bring 16; or none does."""
    config = speculation(pair, num_speculative_tokens=7, simulated_acceptance=acceptance)
    with Runtime.load(pair.target, config, device="cpu", **OPTIONS) as runtime:
        name = runtime.submit(prompt_of(9), params(max_tokens=100))
        run_all(runtime)
        count, usual = runtime.metrics(name).num_steps, longer(runtime)["steps"] == 0
        assert usual == (acceptance < 1) and (usual or count <= most)
        fewer = runtime.submit(prompt_of(9), params(max_tokens=40))
        run_all(runtime, 3)
        assert runtime.metrics(fewer).num_steps >= 9  # of three drafts each, as the caller wants


def test_other_buckets_are_what_they_are_without(pair: PairPaths) -> None:
    loads = [Runtime.load(pair.target, speculation(pair, most=most), device="cpu", **OPTIONS) for most in (15, 0)]
    with loads[0] as runtime, loads[1] as usual:
        assert set(usual.ladder.programs) < set(runtime.ladder.programs)
        assert runtime.speculation_limits == usual.speculation_limits
        for bucket in usual.ladder.programs:
            kinds = [[op.kind for op in each.executor.program(bucket).ops] for each in (runtime, usual)]
            assert kinds[0] == kinds[1]
    ladder = StepLadder([1, 2, 4, 8], {0: 1, 7: 8}, longer=15)
    assert [each.batch for each in ladder.wide_buckets] == [4, 2, 1]
    assert ladder.wide_steps(3, PLAIN)[0].num_speculative_tokens == 15 and not ladder.wide_steps(5, PLAIN)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_block_drafts": 7}, "must be more than num_speculative_tokens, .* got 7 and 7"),
        ({"num_speculative_tokens": 0}, "which must be 1 or more; got 15 and 0"),
        ({"adaptive_width": True}, "max_block_drafts is not implemented for adaptive_width"),
        ({"enable_specpv": True}, "max_block_drafts is not implemented for enable_specpv"),
        ({"dynamic_tree_max_topk": 2}, "max_block_drafts is not implemented for dynamic_tree_max_topk"),
        ({"method": "eagle3"}, "max_block_drafts is an option of method 'dflash', and method is 'eagle3'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"model": "m", "method": "dflash", "num_speculative_tokens": 7, "max_block_drafts": 15, **options}
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**given)


def test_a_block_that_was_trained_shorter_is_refused(pair: PairPaths) -> None:
    with pytest.raises(ConfigError, match="max_block_drafts 15 is more than the 7 drafts of this draft model's block"):
        Runtime.load(pair.target, speculation(pair, draft="short"), device="cpu", **OPTIONS)
