"""Requests that give their slot away on a GPU, and prompts read while they are written: no token changes.

Steps run ahead, and the device repeats them by itself, while requests are paused, resumed and outranked.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from paused_requests import alone, paused_each_step, play, random_moves
from recording import prompt_of, run_all
from tiny_models import KERNEL_HYBRID, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 512} | {
    "max_position_embeddings": 2048
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SIZES | {"head_dim": 128},
    "gpt_oss": SIZES | {"head_dim": 64, "sliding_window": 128},
    "qwen3_5_text": SIZES | KERNEL_HYBRID | {"gain": 0.4},
}
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 700, "block_size": 32, "prefill_chunk": 64} | {
    "dtype": "bfloat16",
    "device": "cuda",
    "max_queue": 6,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
REQUESTS = [
    (prompt_of(count, seed=count), SamplingParams(max_tokens=60, temperature=temperature, seed=count, ignore_eos=True))
    for count, temperature in ((300, 0.9), (5, 0.0), (450, 0.7), (128, 1.0))
]


@pytest.mark.parametrize("loops", [False, True], ids=["steps", "loops"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_moves_change_no_token(family: str, loops: bool, tmp_path: Path) -> None:
    make_target(tmp_path / "target", family, **FAMILIES[family])
    with Runtime.load(tmp_path / "target", **OPTIONS) as runtime:
        expected = alone(runtime, REQUESTS)
    for speculative in (None, NGRAM):
        options = {**OPTIONS, "device_loop": loops, "executor": "graph", "kv_blocks": 30}
        with Runtime.load(tmp_path / "target", speculative, **options) as runtime:
            assert sum(play(runtime, random_moves(seed, 120), REQUESTS, expected) for seed in range(3)) > 3
            assert paused_each_step(runtime, REQUESTS[0]) == expected[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_open_prompt_has_the_answer_of_the_whole(family: str, tmp_path: Path) -> None:
    make_target(tmp_path / "target", family, **FAMILIES[family])
    source = random.Random(family)
    with Runtime.load(tmp_path / "target", NGRAM, **OPTIONS) as runtime:
        expected = alone(runtime, REQUESTS)
    with Runtime.load(tmp_path / "target", NGRAM, **OPTIONS) as runtime:
        for (prompt, params), tokens in zip(REQUESTS, expected, strict=True):
            handle, start = runtime.open_prompt(params), 0
            while start < len(prompt):
                stop = min(len(prompt), start + source.randint(1, 90))
                handle.append(prompt[start:stop])
                start = stop
                if source.random() < 0.4:
                    handle.finish(speculative=True)
                for _ in range(source.randint(0, 9)):
                    assert not runtime.step()
            handle.finish()
            assert run_all(runtime)[handle.request_id] == tokens
