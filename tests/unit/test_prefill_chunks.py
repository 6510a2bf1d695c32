"""How many chunks of a prompt run at once by default, by what the target is; and that no bit depends on it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recording import prompt_of
from tiny_models import make_target

from lowlat import Runtime, SamplingParams
from lowlat.engine.loading.geometry import make_geometry
from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import DenseSpec, ExpertsSpec
from lowlat.models.prefill_chunks import most_prefill_chunks, prefill_positions
from lowlat.options.runtime import RuntimeConfig
from lowlat.speculators.tree.topology import TreeTopology
from lowlat.tools.planned_step import target_config

POSITIONS: Mapping[str, int] = {
    "llama-8b": 2048,
    "llama-70b": 2048,
    "gpt-oss-20b": 2048,
    "gemma-4-31b": 2048,
    "qwen3.5-27b": 2048,
    "qwen3-30b-a3b": 4096,
    "gemma-4-26b-a4b": 4096,
    "gpt-oss-120b": 8192,
    "qwen3.6-35b-a3b": 8192,
    "qwen3-coder-next": 8192,
}


def config_of(name: str) -> ModelConfig:
    return target_config(Path(name))


@pytest.mark.parametrize(("name", "positions"), POSITIONS.items())
def test_an_expert_gets_256_rows_on_average(name: str, positions: int) -> None:
    """Of chunks of 128: 16, 32 or 64. Chunks of other sizes have as many positions, or as many as 64 of them have."""
    config = config_of(name)
    assert prefill_positions(config) == positions
    for chunk in (32, 64, 128, 256, 1024):
        most = most_prefill_chunks(config, chunk, None)
        assert most == min(64, positions // chunk)
    assert most_prefill_chunks(config, 96, None) * 96 in range(positions - 95, positions + 1) or positions > 64 * 96
    assert most_prefill_chunks(config, 1 << 16, None) == 1
    assert [most_prefill_chunks(config, 128, asked) for asked in (1, 5, 64)] == [1, 5, 64]


def with_experts(config: ModelConfig, num_experts: int, each: int, layer: int) -> ModelConfig:
    """The target with other experts in one layer."""
    layers = list(config.layers)
    ffn = layers[layer].ffn
    assert isinstance(ffn, ExpertsSpec)
    layers[layer] = replace(layers[layer], ffn=replace(ffn, num_experts=num_experts, num_experts_per_token=each))
    return replace(config, layers=tuple(layers))


def test_the_layer_of_the_most_experts_decides() -> None:
    """And dense layers among them do not."""
    config = config_of("gpt-oss-20b")
    assert prefill_positions(with_experts(config, 32, 8, 3)) == 2048
    assert prefill_positions(with_experts(config, 33, 4, 3)) == 4096
    assert prefill_positions(with_experts(config, 65, 4, 3)) == 8192
    dense = replace(config.layers[0], ffn=config_of("llama-8b").layers[0].ffn)
    assert isinstance(dense.ffn, DenseSpec)
    assert (
        prefill_positions(replace(config_of("gpt-oss-120b"), layers=(dense, *config_of("gpt-oss-120b").layers))) == 8192
    )


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 16),
        ({"max_context": 4096}, 32),
        ({"max_context": 8065}, 64),
        ({"max_context": 131072}, 64),
        ({"max_context": 131072, "prefill_chunk": 512}, 16),
        ({"max_context": 131072, "max_prefill_chunks": 16}, 16),
        ({"max_context": 1000}, 8),
        ({"max_context": 131072, "prompt_logits": True, "prefix_reuse": False}, 1),
    ],
)
def test_a_runtime_s_chunks_are_no_more_than_a_prompt_has(options: dict[str, Any], count: int) -> None:
    config = config_of("gpt-oss-120b")
    geometry = make_geometry(config, None, {0: TreeTopology.chain(0)}, RuntimeConfig(**options), None)
    assert geometry.max_prefill_chunks == count
    assert geometry.prefill_sizes[-1] == count * geometry.prefill_chunk


def test_experts_have_the_same_bits_by_more_chunks_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 chunks of a target of 16 experts, of which a token takes one, next to 16 and next to single ones."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 4096}
    make_target(tmp_path, "qwen3_moe", num_local_experts=16, num_experts_per_tok=1, **small, **more)
    options: dict[str, Any] = {"device": "cpu", "max_batch": 1, "max_context": 4096}
    prompt, found = prompt_of(24 * 128 - 5), []
    for most in (None, 16, 1):
        with Runtime.load(tmp_path, max_prefill_chunks=most, **options) as runtime:
            seen: list[int] = []
            monkeypatch.setattr(runtime.scheduler.pace, "saw", lambda count, _, seen=seen: seen.append(count))
            runtime.submit(prompt, SamplingParams(max_tokens=2, logprobs=5))
            outputs = [output for _ in range(30) for output in runtime.step()]
            found.append((seen, [output.logprobs for output in outputs], runtime.summary()["max_prefill_chunks"]))
    assert [each[0] for each in found] == [[24], [16, 8], [1] * 24]
    assert [each[2] for each in found] == [32, 16, 1]
    assert found[0][1] and found[0][1] == found[1][1] == found[2][1]
