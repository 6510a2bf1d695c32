"""RoPE tables against transformers' own functions, bit for bit."""

from typing import Any

import pytest
import torch

from lowlat.checkpoint.fields import Fields
from lowlat.errors import ConfigError
from lowlat.models.hf_config import parse_rope
from lowlat.models.layer_spec import RopeConfig
from lowlat.models.rope import RopeTables, inverse_frequencies, rope_tables

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 32.0, "original_max_position_embeddings": 4096}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, **LLAMA3},
    "llama3-published": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
    | {**LLAMA3, "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
    "yarn-gpt-oss": {"rope_type": "yarn", "rope_theta": 150000.0, **YARN}
    | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn-given-factor": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "attention_factor": 0.75},
    "yarn-mscale": {"rope_type": "yarn", "rope_theta": 1e4, **YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-short": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.5}
    | {"original_max_position_embeddings": 16, "beta_fast": 1.0, "beta_slow": 1.0},
}


def parsed(values: dict[str, Any]) -> RopeConfig:
    return parse_rope(Fields({"rope_parameters": dict(values)}, "config.json"), max_position=131072)


@pytest.mark.parametrize("head_dim", [4, 6, 64, 128])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_tables_are_transformers(name: str, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = CASES[name]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=dict(values),
    )
    embedding = LlamaRotaryEmbedding(config)
    rope = parsed(values)
    assert torch.equal(inverse_frequencies(rope, head_dim), embedding.inv_freq)
    assert rope.attention_factor == embedding.attention_scaling
    if values["rope_type"] != "default":
        expected, scaling = ROPE_INIT_FUNCTIONS[values["rope_type"]](config)
        assert torch.equal(inverse_frequencies(rope, head_dim), expected)
        assert rope.attention_factor == scaling

    cos, sin = rope_tables(rope, head_dim, 300)
    expected_cos, expected_sin = embedding(torch.zeros(1), torch.arange(300)[None])
    half = head_dim // 2
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (300, half)
    assert torch.equal(cos, expected_cos[0, :, :half]) and torch.equal(cos, expected_cos[0, :, half:])
    assert torch.equal(sin, expected_sin[0, :, :half])


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_tables_of_other_families_are_transformers(family: str) -> None:
    from transformers import GptOssConfig, Qwen3Config
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    classes = {"gpt_oss": (GptOssConfig, GptOssRotaryEmbedding), "qwen3": (Qwen3Config, Qwen3RotaryEmbedding)}
    make_config, embedding = classes[family]
    config = make_config()
    rope = parse_rope(
        Fields({"rope_parameters": dict(config.rope_parameters)}, "config.json"),
        max_position=config.max_position_embeddings,
    )
    cos, sin = rope_tables(rope, config.head_dim, 200)
    expected_cos, expected_sin = embedding(config)(torch.zeros(1), torch.arange(200)[None])
    assert torch.equal(cos, expected_cos[0, :, : config.head_dim // 2])
    assert torch.equal(sin, expected_sin[0, :, : config.head_dim // 2])


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="head_dim must be even and positive, got 5"):
        inverse_frequencies(RopeConfig(10000.0), 5)
    with pytest.raises(ConfigError, match="num_positions must be positive, got 0"):
        rope_tables(RopeConfig(10000.0), 4, 0)


def test_tables_are_made_when_they_are_read_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rope, made = RopeConfig(10000.0), list[int]()

    def counted(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        made.append(arguments[-1])
        return rope_tables(*arguments)

    monkeypatch.setattr("lowlat.models.rope.rope_tables", counted)
    tables = RopeTables(rope, 64, 77)
    assert tables.shape == (77, 32)
    assert not made
    cos, sin = rope_tables(rope, 64, 77)
    assert torch.equal(tables.cos(), cos)
    assert torch.equal(tables.sin(), sin)
    assert tables.cos() is tables.cos()
    assert made == [77]


@pytest.mark.parametrize(("head_dim", "positions"), [(5, 10), (0, 10), (4, 0)])
def test_tables_that_cannot_be_made_are_refused_before_they_are_read(head_dim: int, positions: int) -> None:
    with pytest.raises(ConfigError, match="must be"):
        RopeTables(RopeConfig(10000.0), head_dim, positions)
