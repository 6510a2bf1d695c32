"""Targets against transformers, in float32: the same logits over prefill and decode, the same greedy tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import assert_close, check_parity
from recording import run_all
from stages import later, staged
from tiny_models import make_target, mxfp4_target, residual_streams, transformers_logits

from lowlat import Runtime, SamplingParams
from lowlat.graphs.program import Op

OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 183, "block_size": 8, "prefill_chunk": 32} | {
    "device": "cpu",
    "dtype": "float32",
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0} | {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32} | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


@dataclass(frozen=True)
class Case:
    """One odd shape; `prompt` tokens are prefilled and `completion` tokens decoded."""

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: int = 71
    completion: int = 8
    make: Callable[..., Any] = make_target


CASES = {
    "llama": Case("llama"),
    "llama-legacy-config": Case("llama", {"legacy_config": True, "rope_parameters": LLAMA3_ROPE}),
    "llama-wide-heads": Case("llama", {"head_dim": 24}),
    "llama-one-kv-head": Case("llama", {"num_key_value_heads": 1, "vocab_size": 131}),
    "llama-own-kv-heads": Case("llama", {"num_key_value_heads": 4}),
    "llama-tied": Case("llama", {"tie_word_embeddings": True}),
    "llama-biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": Case("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-dynamic": Case("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn": Case("llama", {"rope_parameters": YARN_ROPE, "max_position_embeddings": 192}),
    "llama-one-token-prompt": Case("llama", prompt=1),
    "llama-whole-chunks": Case("llama", prompt=65),
    "llama-past-tiles": Case("llama", {"max_position_embeddings": 1024}, prompt=545),
    "mistral": Case("mistral"),
    "mistral-wide-heads": Case("mistral", {"head_dim": 24, "num_key_value_heads": 1, "legacy_config": True}),
    "mistral-past-windows": Case("mistral", {"sliding_window": 24}),
    "qwen2": Case("qwen2"),
    "qwen2-past-windows": Case("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2-tied": Case("qwen2", {"tie_word_embeddings": True, "legacy_config": True, "hidden_size": 48}),
    "qwen2-yarn": Case("qwen2", {"rope_parameters": YARN_ROPE, "max_position_embeddings": 192}),
    "qwen3": Case("qwen3"),
    "qwen3-wide-heads": Case("qwen3", {"head_dim": 20, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen3-tied-biased": Case("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3_moe": Case("qwen3_moe"),
    "qwen3_moe-shares-of-all": Case("qwen3_moe", {"norm_topk_prob": False, "legacy_config": True}),
    "qwen3_5": Case("qwen3_5_text"),
    "qwen3_5-tied": Case("qwen3_5_text", {"tie_word_embeddings": True, "linear_num_value_heads": 2}),
    "qwen3_5-biases": Case("qwen3_5_text", {"attention_bias": True}),
    "qwen3_5_moe": Case("qwen3_5_moe_text", {"head_dim": 24}),
    "qwen3_5_moe-own-shared": Case("qwen3_5_moe_text", {"shared_expert_intermediate_size": 40}),
    "qwen3_next": Case("qwen3_next"),
    "qwen3_next-mixed": Case("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "gpt_oss": Case("gpt_oss"),
    "gpt_oss-past-yarn": Case("gpt_oss", prompt=135),
    "gpt_oss-window-128": Case("gpt_oss", {"sliding_window": 128, "num_hidden_layers": 2}, prompt=140),
    "gpt_oss-wide-heads": Case("gpt_oss", {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "gpt_oss-all-experts": Case("gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "gpt_oss-mxfp4": Case("gpt_oss", make=mxfp4_target),
}


def build(case: Case, directory: Path, seed: int) -> Any:
    """Write the case's target; transformers' model of it."""
    if case.make is mxfp4_target:
        return mxfp4_target(directory, seed=seed, **case.options)
    return make_target(directory, case.family, seed=seed, **case.options)


def prompt_of(length: int, vocab: int, seed: int) -> list[int]:
    """A random prompt."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


# what others have, too, or what a config alone decides
LATER = {
    *("llama-own-kv-heads", "llama-one-kv-head", "llama-dynamic", "llama-yarn", "llama-past-tiles", "qwen2-tied"),
    *("mistral-wide-heads", "qwen2-past-windows", "qwen3-wide-heads", "qwen3_moe-shares-of-all", "qwen3_5-tied"),
    *("qwen3_5-biases", "qwen3_5_moe-own-shared", "qwen3_next-mixed", "gpt_oss-window-128", "gpt_oss-wide-heads"),
    "gpt_oss-all-experts",
}


# of these a config decides, and others have each of their values
CONFIGS = {"llama-one-kv-head", "llama-own-kv-heads", "qwen2-tied", "mistral-wide-heads", "qwen3_5-biases"}


@pytest.mark.parametrize("name", staged(CASES, first=CASES.keys() - LATER, second=LATER - CONFIGS))
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case, tmp_path, seed=0)
    prompt = prompt_of(case.prompt, model.config.vocab_size, seed=0)
    context = max(OPTIONS["max_context"], case.prompt + case.completion)
    check_parity(tmp_path, model, prompt, case.completion, **{**OPTIONS, "max_context": context})


@pytest.mark.parametrize(
    "name",
    ["llama-biases", later("llama-llama3-rope"), later("qwen2"), "qwen3_5", later("qwen3_next"), "gpt_oss-mxfp4"],
)
def test_prefill_gives_the_residual_streams_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = build(case, tmp_path, seed=2)
    prompt = prompt_of(101, model.config.vocab_size, seed=2)
    chunks: dict[int, list[torch.Tensor]] = {b: [] for b in range(model.config.num_hidden_layers + 1)}

    def keep(op: Op, arguments: Mapping[str, torch.Tensor]) -> None:
        for argument, buffer in op.writes.items():
            prefix, _, boundary = buffer.rpartition(".")
            if prefix == "prefill.residual" and boundary.isdigit():
                chunks[int(boundary)].append(arguments[argument].clone())

    with Runtime.load(tmp_path, **OPTIONS, prompt_logprobs=False) as runtime:  # then streams alone are written
        runtime.executor.set_hook(keep)
        runtime.submit(prompt, SamplingParams(max_tokens=1))
        run_all(runtime)
    expected = residual_streams(model, prompt)
    assert len(expected) == len(chunks)
    for boundary, stream in enumerate(expected):
        found = torch.cat(chunks[boundary])[: len(prompt)]
        assert_close(found, stream)
    final = torch.cat(chunks[len(chunks) - 1])[: len(prompt)]
    with torch.no_grad():
        assert_close(model.lm_head(model.model.norm(final)), transformers_logits(model, prompt))


@pytest.mark.parametrize("family", ["llama", later("gpt_oss")])
def test_neighbours_in_one_batch_equal_transformers_too(family: str, tmp_path: Path) -> None:
    model = make_target(tmp_path, family, seed=3)
    prompts = [prompt_of(length, model.config.vocab_size, length) for length in (3, 40, 90)]
    with Runtime.load(tmp_path, **{**OPTIONS, "max_batch": 3}) as runtime:
        names = [runtime.submit(prompt, SamplingParams(max_tokens=16)) for prompt in prompts]
        completions = run_all(runtime)
    for name, prompt in zip(names, prompts, strict=True):
        chosen = transformers_logits(model, prompt + completions[name])[len(prompt) - 1 : -1].argmax(-1)
        assert completions[name] == chosen.tolist()


def test_the_window_and_yarn_matter_in_these_cases(tmp_path: Path) -> None:
    """Else the parity above would say nothing about them."""
    model = make_target(tmp_path, "gpt_oss", seed=0)
    tokens = prompt_of(120, 97, 0)
    expected = transformers_logits(model, tokens)
    layers = [layer.self_attn for layer in model.model.layers]
    changed = make_target(tmp_path / "wide", "gpt_oss", seed=0, sliding_window=128)
    assert (transformers_logits(changed, tokens) - expected)[-1].abs().max() > 0.01
    assert any(layer.sliding_window for layer in layers)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    plain = make_target(tmp_path / "plain", "gpt_oss", seed=0, rope_parameters=rope)
    assert (transformers_logits(plain, tokens) - expected)[-1].abs().max() > 0.01
