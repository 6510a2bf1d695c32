"""Hybrids on a GPU: drafts, neighbours and prefixes change no token, and steps are near the reference's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import Recorder, prompt_of, run_all, run_one
from tiny_models import KERNEL_HYBRID, make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.gpu

CHUNK = 64
SIZES: dict[str, Any] = KERNEL_HYBRID | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} | {
    "num_experts": 8,
    "num_experts_per_tok": 3,
}
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 700, "block_size": 32, "prefill_chunk": CHUNK} | {
    "dtype": "bfloat16",
    "max_prefill_chunks": 4,
}
SAMPLED = SamplingParams(max_tokens=60, temperature=0.9, seed=11)
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)
NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1}


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_5_moe_text"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp(request.param)
    make_target(directory, request.param, gain=0.4, **SIZES, **(EXPERTS if "moe" in request.param else {}))
    yield directory


def speculation(depth: int) -> SpeculativeConfig | None:
    return SpeculativeConfig(num_speculative_tokens=depth, **NGRAM) if depth else None


def test_drafts_neighbours_and_prefixes_change_no_token(target: Path) -> None:
    prompts = [prompt_of(count, seed=count) for count in (5, 64, 130, 300)]
    with Runtime.load(target, device="cuda", prefix_reuse=False, **OPTIONS) as runtime:
        expected = [[run_one(runtime, prompt, params) for prompt in prompts] for params in (GREEDY, SAMPLED)]
    for depth in (0, 1, 3, 7):
        with Runtime.load(target, speculation(depth), device="cuda", **OPTIONS) as runtime:
            for params, tokens in zip((GREEDY, SAMPLED), expected, strict=True):
                for _ in range(2):  # the second time from snapshots, all at once
                    names = [runtime.submit(prompt, params) for prompt in prompts]
                    found = run_all(runtime)
                    assert [found[name] for name in names] == tokens, depth
                    runtime.kvcache.invariants()
            assert runtime.kvcache.stats().hit_tokens > 0


def test_steps_launched_one_by_one_are_the_captured_ones_and_near_the_reference(target: Path) -> None:
    prompt = prompt_of(150)
    tokens: dict[str, list[int]] = {}
    logits: dict[str, torch.Tensor] = {}
    for executor in ("graph", "eager", "reference"):
        with Runtime.load(target, speculation(3), device="cuda", executor=executor, **OPTIONS) as runtime:
            recorder = None if executor == "graph" else Recorder(runtime)
            name = runtime.submit(prompt, GREEDY) if recorder is None else recorder.submit(prompt, GREEDY)
            tokens[executor] = run_all(runtime)[name]
            if recorder is not None:
                logits[executor] = recorder.logits[name][len(prompt)].float().cpu()
    assert tokens["graph"] == tokens["eager"]
    assert torch.nn.functional.cosine_similarity(logits["reference"], logits["eager"], dim=0) > 0.999


@pytest.mark.parametrize("depth", [0, 3])
def test_nan_in_a_state_ends_its_request_alone_and_its_slot_is_cleared(target: Path, depth: int) -> None:
    prompts = [prompt_of(9), prompt_of(130, seed=1)]
    with Runtime.load(target, speculation(depth), device="cuda", prefix_reuse=False, **OPTIONS) as runtime:
        executor = runtime.executor
        states = [name for name in executor.state if name.startswith(("conv_state.", "delta_"))]
        truths = [run_one(runtime, prompt, SAMPLED) for prompt in prompts]
        names = [runtime.submit(prompt, SAMPLED) for prompt in prompts]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        ends: dict[str, str | None] = {}
        number = 0
        while runtime.busy:
            if number == 6:
                executor.synchronize()
                slot = runtime.scheduler.slot(names[0])
                assert slot is not None
                poisoned = executor.state["delta_state.0"].clone()
                poisoned[slot, 1, 2, 3] = torch.nan
                torch.cuda.synchronize()
                executor.write_state({"delta_state.0": poisoned})
            for output in runtime.step(depth):
                tokens[output.request_id] += output.token_ids
                ends[output.request_id] = output.finish_reason
            number += 1
        executor.synchronize()
        assert ends == {names[0]: "error", names[1]: "length"} and tokens[names[1]] == truths[1]
        assert 0 < len(tokens[names[0]]) < 60 and tokens[names[0]] == truths[0][: len(tokens[names[0]])]
        assert [name for name in states if executor.state[name][slot].any()] == []
        assert [run_one(runtime, prompt, SAMPLED) for prompt in prompts] == truths
