"""Gemma 4 on a GPU: drafts and neighbours change no token, fused or not, and steps are near the reference's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import Recorder, prompt_of, run_all, run_one
from tiny_gemma import E4B, GEMMA_31B, MOE
from tiny_gemma_drafts import gemma_draft_model
from tiny_models import make_target

from lowlat import Runtime, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 256, "global_head_dim": 512} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 96,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}
PER_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": GEMMA_31B | SIZES,
    "moe": MOE | SIZES | {"num_experts": 8, "moe_intermediate_size": 64},
    "per-layer": E4B | SIZES | PER_LAYER | {"num_key_value_heads": 1},
}
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 700, "block_size": 32, "prefill_chunk": 64} | {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_prefill_chunks": 4,
}
SAMPLED = SamplingParams(max_tokens=48, temperature=0.9, seed=11)
GREEDY = SamplingParams(max_tokens=48, temperature=0.0)


@pytest.fixture(scope="module", params=SHAPES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp(request.param)
    make_target(directory, "gemma4_text", gain=0.4, **SHAPES[request.param])
    yield directory


def speculation(depth: int) -> SpeculativeConfig | None:
    if not depth:
        return None
    return SpeculativeConfig(method="ngram", num_speculative_tokens=depth, prompt_lookup_min=1)


def test_drafts_neighbours_and_prefixes_change_no_token(target: Path) -> None:
    """Over the window's end and chunks of prefill."""
    prompts = [prompt_of(count, seed=count) for count in (5, 64, 130, 300)]
    with Runtime.load(target, prefix_reuse=False, **OPTIONS) as runtime:
        expected = [[run_one(runtime, prompt, params) for prompt in prompts] for params in (GREEDY, SAMPLED)]
    for depth in (0, 1, 3):
        with Runtime.load(target, speculation(depth), **OPTIONS) as runtime:
            for params, tokens in zip((GREEDY, SAMPLED), expected, strict=True):
                for _ in range(2):  # the second time after a prefix that is kept
                    names = [runtime.submit(prompt, params) for prompt in prompts]
                    found = run_all(runtime)
                    assert [found[name] for name in names] == tokens, depth
                    runtime.kvcache.invariants()


@pytest.mark.parametrize("depth", [0, 3])
def test_captured_launched_and_unfused_steps_are_one_and_near_the_reference(target: Path, depth: int) -> None:
    prompt = prompt_of(150)
    tokens: dict[str, list[int]] = {}
    logits: dict[str, torch.Tensor] = {}
    kinds: dict[str, dict[str, Any]] = {"graph": {}, "eager": {}, "unfused": {"fuse": False}, "reference": {}}
    for kind, own in kinds.items():
        executor = "eager" if kind == "unfused" else kind
        with Runtime.load(target, speculation(depth), executor=executor, **OPTIONS, **own) as runtime:
            recorder = None if kind == "graph" else Recorder(runtime)
            name = runtime.submit(prompt, GREEDY) if recorder is None else recorder.submit(prompt, GREEDY)
            tokens[kind] = run_all(runtime)[name]
            if recorder is not None:
                logits[kind] = recorder.logits[name][len(prompt)].float().cpu()
    assert tokens["graph"] == tokens["eager"] == tokens["unfused"]
    assert torch.equal(logits["eager"], logits["unfused"])
    assert torch.nn.functional.cosine_similarity(logits["reference"], logits["eager"], dim=0) > 0.999


@pytest.mark.parametrize(
    "flags", [{"block": False}, {"block": True, "layers": 3}, {"block": True, "rank": 32}], ids=str
)
def test_draft_models_of_its_layers_draft_alike_fused_or_not(flags: dict[str, Any], tmp_path: Path) -> None:
    """EAGLE3's, DFlash's and DSpark's, of heads of 512 that are values, too; tokens are those without drafts."""
    model = make_target(tmp_path / "target", "gemma4_text", gain=0.4, **SHAPES["dense"])
    gemma_draft_model(tmp_path / "head", model, head=512, **flags)
    method = "dspark" if flags["block"] else "eagle3"
    draft = SpeculativeConfig(method=method, model=tmp_path / "head", num_speculative_tokens=3, strict=True)
    prompt, drafted = prompt_of(150), dict[str, list[list[int]]]()
    with Runtime.load(tmp_path / "target", **OPTIONS) as runtime:
        expected = run_one(runtime, prompt, GREEDY)
    for kind in ("eager", "unfused", "graph", "reference"):
        options = {**OPTIONS, "executor": "eager" if kind == "unfused" else kind, "fuse": kind != "unfused"}
        with Runtime.load(tmp_path / "target", draft, **options) as runtime:
            name, tokens, drafted[kind] = runtime.submit(prompt, GREEDY), list[int](), []
            while runtime.busy:
                for output in runtime.step(3):
                    tokens += output.token_ids
                    drafted[kind].append(runtime.executor.state["drafts"][0, 1:4].tolist())
        assert kind == "reference" or tokens == expected, name
    assert drafted["eager"] == drafted["unfused"]
    same = [ours == theirs for ours, theirs in zip(drafted["eager"], drafted["reference"], strict=False)]
    assert sum(same[:8]) >= 6, "drafts are the reference's but for roundings"
