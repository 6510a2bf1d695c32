"""Whole models as draft models on a GPU: no draft changes a token, and a model is always right about itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from quantised_layers import quantise_target
from recording import prompt_of, run_all, run_one
from tiny_models import make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "head_dim": 64} | {
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}
SMALL: dict[str, Any] = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
WINDOW: dict[str, Any] = {"sliding_window": 64}
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 700, "block_size": 32, "prefill_chunk": 64} | {
    "dtype": "bfloat16"
}
GREEDY, SAMPLED = (SamplingParams(max_tokens=50, temperature=heat, seed=11) for heat in (0.0, 0.9))
WAYS: dict[str, dict[str, Any]] = {
    "one": {"num_speculative_tokens": 1},
    "three": {"num_speculative_tokens": 3},
    "seven": {"num_speculative_tokens": 7},
    "adaptive": {"num_speculative_tokens": "auto"},
    "rounded": {"num_speculative_tokens": 3, "draft_quantize": "fp8"},
    "cut": {"num_speculative_tokens": 3, "draft_vocab_size": 200},
    "next to text": {"num_speculative_tokens": 3, "text_drafts": "suffix"},
}
PROMPTS = [prompt_of(count, seed=count) for count in (5, 64, 130, 300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, smaller models of its vocabulary and of padded ones, and one in FP8."""
    made = tmp_path_factory.mktemp("draft-models")
    make_target(made / "target", "qwen3", gain=0.3, **SIZES)
    make_target(made / "small", "qwen3", gain=0.3, seed=1, tie_word_embeddings=True, **SMALL)
    make_target(made / "padded", "llama", gain=0.3, seed=2, tie_word_embeddings=True, **{**SMALL, "vocab_size": 480})
    make_target(made / "larger", "llama", gain=0.3, seed=3, **{**SMALL, "vocab_size": 640})
    make_target(made / "windows", "gemma3_text", gain=0.3, seed=4, **{**SMALL, "num_hidden_layers": 3, **WINDOW})
    make_target(made / "fp8", "llama", gain=0.3, seed=5, **SMALL)
    quantise_target(made / "fp8", "fp8-channel", None)
    (made / "ids.json").write_text(json.dumps(list(range(512)) + list(range(200)) * 3))
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    """The tokens without drafts, greedy and sampled, prompt by prompt."""
    with Runtime.load(folder / "target", device="cuda", prefix_reuse=False, **OPTIONS) as runtime:
        return [[run_one(runtime, prompt, params) for prompt in PROMPTS] for params in (GREEDY, SAMPLED)]


def check_tokens(folder: Path, options: SpeculativeConfig, expected: list[list[list[int]]], **others: Any) -> None:
    """Requests together, the second time after shared prefixes."""
    with Runtime.load(folder / "target", options, device="cuda", **{**OPTIONS, **others}) as runtime:
        for params, tokens in zip((GREEDY, SAMPLED), expected, strict=True):
            for _ in range(2):
                names = [runtime.submit(prompt, params) for prompt in PROMPTS]
                found = run_all(runtime)
                assert [found[name] for name in names] == tokens
        assert runtime.summary()["eagle_speculation"]["num_drafts"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_drafting_changes_a_token(way: str, folder: Path, expected: list[list[list[int]]]) -> None:
    cut: dict[str, Any] = {"draft_vocab": folder / "ids.json"} if way == "cut" else {}
    options = SpeculativeConfig(folder / "small", "draft_model", strict=True, **WAYS[way], **cut)
    check_tokens(folder, options, expected)


@pytest.mark.parametrize("name", ["padded", "larger", "windows", "fp8"])
def test_no_model_changes_a_token(name: str, folder: Path, expected: list[list[list[int]]]) -> None:
    options = SpeculativeConfig(folder / name, "draft_model", num_speculative_tokens=3, strict=True)
    check_tokens(folder, options, expected, device_loop=True)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_a_model_is_always_right_about_itself(cache: Any, folder: Path) -> None:
    """Its own keys and values are there, to the bit, after prefill, after reuse and after rewinds."""
    options = SpeculativeConfig(folder / "target", "draft_model", num_speculative_tokens=5, strict=True)
    with Runtime.load(folder / "target", options, device="cuda", kv_cache_dtype=cache, **OPTIONS) as runtime:
        for _ in range(2):
            for prompt in PROMPTS:
                runtime.submit(prompt, GREEDY)
            run_all(runtime)
        run_one(runtime, PROMPTS[2], GREEDY, lambda number: (0, 5, 2)[number % 3])
        counts = runtime.summary()["eagle_speculation"]
        assert counts["total_accepted_tokens"] == counts["total_draft_tokens"] > 200


def test_executors_draft_alike(folder: Path) -> None:
    """Of the reference a few drafts are others, since it rounds otherwise; by far most are the same."""
    prompt, found = prompt_of(150), {}
    options = SpeculativeConfig(folder / "small", "draft_model", num_speculative_tokens=3, strict=True)
    for executor in ("graph", "eager", "reference"):
        with Runtime.load(folder / "target", options, device="cuda", executor=executor, **OPTIONS) as runtime:
            tokens = run_one(runtime, prompt, GREEDY)
            found[executor] = tokens, runtime.summary()["eagle_speculation"]["acceptance_by_position"]
    assert found["graph"] == found["eager"]
    if found["graph"][0] == found["reference"][0]:
        assert abs(found["graph"][1][0] - found["reference"][1][0]) < 0.15
