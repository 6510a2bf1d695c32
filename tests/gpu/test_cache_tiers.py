"""The tiers of the prefix cache on a GPU: what was read by another runtime, or left the device, changes no token."""

from pathlib import Path
from typing import Any

import pytest
from recording import prompt_of, run_all, run_one
from tiny_models import KERNEL_HYBRID, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.gpu

SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, seed=11)
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 512} | {
    "max_position_embeddings": 2048
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SIZES | {"head_dim": 128},
    "qwen3_5_text": SIZES | KERNEL_HYBRID | {"gain": 0.4},
}
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 700, "block_size": 32, "prefill_chunk": 64} | {
    "dtype": "bfloat16",
    "max_prefill_chunks": 4,
}


def speculation(depth: int) -> SpeculativeConfig | None:
    if not depth:
        return None
    return SpeculativeConfig(method="ngram", num_speculative_tokens=depth, prompt_lookup_min=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_and_host_memory_change_no_token(family: str, tmp_path: Path) -> None:
    make_target(tmp_path / "target", family, **FAMILIES[family])
    prompts = [prompt_of(count, seed=count) for count in (300, 450, 390)]

    def answers(runtime: Runtime) -> list[list[int]]:
        names = [runtime.submit(prompt, SAMPLED) for prompt in prompts]
        found = run_all(runtime)
        runtime.kvcache.invariants()
        return [found[name] for name in names]

    target, options = tmp_path / "target", {"device": "cuda", **OPTIONS}
    with Runtime.load(target, prefix_reuse=False, **options) as runtime:
        expected = answers(runtime)
    for depth in (0, 3, 3):
        with Runtime.load(target, speculation(depth), cache_dir=tmp_path / "cache", **options) as runtime:
            assert answers(runtime) == expected
            found = runtime.kvcache.stats().hit_tokens
    assert found >= 3 * 256 and runtime.config.cache_dir is not None
    small = {**options, "max_batch": 1, "kv_blocks": 26, "state_cache_gib": 0.001}
    with Runtime.load(target, host_cache_gib=0.5, **small) as runtime:
        assert [answers(runtime) for _ in range(2)] == [expected] * 2
        assert runtime.kvcache.stats().hit_tokens >= 3 * 256


@pytest.mark.parametrize("batches", [True, False], ids=["batches", "one by one"])
def test_sessions_come_back_beside_steps_with_the_tokens_of_requests_alone(batches: bool, tmp_path: Path) -> None:
    """Their chunks leave the device and come back while others decode; files go on in another runtime."""
    make_target(tmp_path / "target", "qwen3", **FAMILIES["qwen3"])
    target, options = tmp_path / "target", {"device": "cuda", **OPTIONS, "max_batch": 2, "kv_blocks": 28}
    prompts = [prompt_of(450, seed=seed) for seed in range(2)]
    with Runtime.load(target, prefix_reuse=False, **options) as runtime:
        other = prompt_of(100, seed=9)
        *expected, beside = (run_one(runtime, each, SAMPLED) for each in (*prompts, other))
    with Runtime.load(target, speculation(3), host_cache_gib=0.5, cache_copy_gb_per_s=5.0, **options) as runtime:
        runtime.executor.movers[0].bus._has_batches &= batches
        for turn in range(4):
            decoding = runtime.submit(other, SAMPLED)
            for _ in range(3):
                runtime.step()
            name = runtime.submit(prompts[turn % 2], SAMPLED, session=f"s{turn % 2}")
            found = run_all(runtime)
            assert found[name] == expected[turn % 2] and beside[-len(found[decoding]) :] == found[decoding]
        assert runtime.summary()["kv"]["tiers"]["bytes_in"] > 0
        runtime.session("s0").save(tmp_path / "file")
        runtime.kvcache.invariants()
    with Runtime.load(target, **options) as runtime:
        session = runtime.load_session(tmp_path / "file")
        name = runtime.submit(prompts[0], SAMPLED, session=session)
        assert run_all(runtime)[name] == expected[0] and runtime.kvcache.stats().hit_tokens >= 384
