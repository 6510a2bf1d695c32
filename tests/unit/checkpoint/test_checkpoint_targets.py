"""Targets written by transformers' own classes: canonical weights equal the model's parameters, rearranged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import edit_json
from safetensors.torch import load_file, save_file
from tiny_models import make_target, mxfp4_target

from lowlat.errors import ConfigError
from lowlat.models.layer_spec import RopeConfig
from lowlat.models.target import load_target, read_model_config
from lowlat.models.weight_plan import weight_plan

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-legacy": {"legacy_config": True, "rope_parameters": LLAMA3_ROPE},
    "mistral": {},
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3-biases": {"attention_bias": True},
    "gpt_oss": {},
    "gpt_oss-no-bias": {"attention_bias": False},
}


def expected_weights(model: Any) -> dict[str, torch.Tensor]:
    """Canonical weights out of transformers' module tree."""
    weights = {"embed.weight": model.model.embed_tokens.weight, "norm.weight": model.model.norm.weight}
    weights["lm_head.weight"] = model.lm_head.weight
    for i, layer in enumerate(model.model.layers):
        attention, found = layer.self_attn, {}
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        found["attn_norm.weight"] = layer.input_layernorm.weight
        found["ffn_norm.weight"] = layer.post_attention_layernorm.weight
        found["qkv.weight"] = torch.cat([p.weight for p in projections])
        found["o.weight"] = attention.o_proj.weight
        if attention.q_proj.bias is not None:
            found["qkv.bias"] = torch.cat([p.bias for p in projections])
            if attention.o_proj.bias is not None:
                found["o.bias"] = attention.o_proj.bias
        if hasattr(attention, "q_norm"):
            found["q_norm.weight"], found["k_norm.weight"] = attention.q_norm.weight, attention.k_norm.weight
        if hasattr(attention, "sinks"):
            found["sinks"] = attention.sinks
        if hasattr(layer.mlp, "router"):
            experts = layer.mlp.experts
            found["router.weight"], found["router.bias"] = layer.mlp.router.weight, layer.mlp.router.bias
            gate_up = experts.gate_up_proj.transpose(1, 2)  # [E, 2I, N], interleaved
            found["experts.gate_up.weight"] = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
            bias = experts.gate_up_proj_bias
            found["experts.gate_up.bias"] = torch.cat((bias[:, ::2], bias[:, 1::2]), dim=1)
            found["experts.down.weight"] = experts.down_proj.transpose(1, 2)
            found["experts.down.bias"] = experts.down_proj_bias
        else:
            mlp = layer.mlp
            found["gate_up.weight"] = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
            found["down.weight"] = mlp.down_proj.weight
            if mlp.gate_proj.bias is not None:
                found["gate_up.bias"] = torch.cat((mlp.gate_proj.bias, mlp.up_proj.bias))
                found["down.bias"] = mlp.down_proj.bias
        weights.update({f"layers.{i}.{name}": value for name, value in found.items()})
    return {name: value.detach() for name, value in weights.items()}


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(weights) == set(expected)
    for name, value in expected.items():
        assert torch.equal(weights[name], value.to(weights[name].dtype)), name
        assert weights[name].is_contiguous(), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_models(name: str, dtype: str, tmp_path: Path) -> None:
    model = make_target(tmp_path, name.split("-")[0], **CASES[name])
    loaded = load_target(tmp_path, dtype=dtype)
    assert_same(loaded.weights, expected_weights(model))
    compute = getattr(torch, dtype)
    for weight, tensor in loaded.weights.items():
        assert tensor.dtype == (torch.float32 if weight.endswith("sinks") else compute), weight

    plan = dict(weight_plan(loaded.config))
    tied = loaded.config.tie_embeddings
    assert (loaded.weights["lm_head.weight"] is loaded.weights["embed.weight"]) == tied
    held = {k: (tuple(v.shape), v.dtype) for k, v in loaded.weights.items() if not (tied and k == "lm_head.weight")}
    assert plan == held


def test_llama_geometry(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", bos_token_id=1, eos_token_id=[2, 7], rope_parameters=LLAMA3_ROPE)
    config = read_model_config(tmp_path)
    attention = config.attention
    assert (config.family, config.num_layers, attention.num_heads, attention.num_kv_heads) == ("llama", 3, 4, 2)
    assert (config.hidden_size, config.ffn.inner_size, attention.head_dim) == (32, 48, 8)
    assert (config.vocab_size, config.max_position, config.rms_norm_eps) == (97, 512, 1e-6)
    assert attention.rope == RopeConfig(20000.0, "llama3", 4.0, 32, low_freq_factor=1.0, high_freq_factor=4.0)
    assert config.windows == (None, None, None) and config.experts is None and config.dtype == "float32"
    assert config.eos_token_ids == (2, 7) and config.bos_token_id == 1


def test_both_spellings_mean_the_same(tmp_path: Path) -> None:
    for family, rope in (("llama", LLAMA3_ROPE), ("qwen3", {"rope_type": "default", "rope_theta": 1e6})):
        new, old = tmp_path / f"{family}-new", tmp_path / f"{family}-old"
        make_target(new, family, rope_parameters=rope)
        make_target(old, family, rope_parameters=rope, legacy_config=True)
        assert "torch_dtype" in (old / "config.json").read_text()
        assert read_model_config(new) == read_model_config(old)


def test_gpt_oss_geometry(tmp_path: Path) -> None:
    make_target(tmp_path, "gpt_oss", swiglu_alpha=1.5)
    config = read_model_config(tmp_path)
    assert config.windows == (16, None, 16)
    assert config.experts is not None and config.experts.weight_format == "bf16"
    assert (config.experts.num_experts, config.experts.num_experts_per_token) == (4, 2)
    assert (config.experts.swiglu_limit, config.experts.swiglu_alpha) == (2.0, 1.5)
    assert config.attention.rope.kind == "yarn" and not config.attention.rope.truncate
    assert config.attention.rope.attention_factor == pytest.approx(1.2772588722)  # 0.1 ln 16 + 1


def test_gpt_oss_as_published_needs_no_dtype_in_its_config(tmp_path: Path) -> None:
    """The published config.json has the older spelling, both names of the expert count a token, and no dtype."""
    make_target(tmp_path, "gpt_oss", legacy_config=True)
    edit_json(
        tmp_path / "config.json",
        torch_dtype=...,
        experts_per_token=2,
        initial_context_length=32,
        swiglu_alpha=...,
        eos_token_id=5,
        router_aux_loss_coef=0.9,
        output_router_logits=False,
    )
    config = read_model_config(tmp_path)
    assert config.dtype == "float32" and config.eos_token_ids == (5,)
    assert config.experts is not None and config.experts.swiglu_alpha == 1.702
    tensors = {name: value.bfloat16() for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_model_config(tmp_path).dtype == "bfloat16"


def decoded(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """MXFP4 blocks and scales as float32 [E, rows, K], by transformers' function."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    values: torch.Tensor = convert_moe_packed_tensors(
        weights[f"{name}.blocks"], weights[f"{name}.scales"], dtype=torch.float32
    )
    return values.transpose(1, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_experts_stay_packed_and_mean_the_same(dtype: str, tmp_path: Path) -> None:
    model = mxfp4_target(tmp_path)
    loaded = load_target(tmp_path, dtype=dtype)
    assert loaded.config.experts is not None and loaded.config.experts.weight_format == "mxfp4"
    expected = expected_weights(model)
    for i in range(3):
        for part in ("gate_up", "down"):
            name = f"layers.{i}.experts.{part}"
            assert loaded.weights[f"{name}.blocks"].dtype == torch.uint8
            assert torch.equal(decoded(loaded.weights, name), expected.pop(f"{name}.weight"))
            loaded.weights.pop(f"{name}.blocks"), loaded.weights.pop(f"{name}.scales")
    assert_same(loaded.weights, expected)


def test_mxfp4_plan(tmp_path: Path) -> None:
    mxfp4_target(tmp_path)
    loaded = load_target(tmp_path)
    assert dict(weight_plan(loaded.config)) == {k: (tuple(v.shape), v.dtype) for k, v in loaded.weights.items()}
    assert weight_plan(loaded.config)["layers.0.experts.gate_up.blocks"][0] == (4, 64, 2, 16)


def set_scale(directory: Path, value: int, codes: int) -> None:
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"][2, 7, 0] = value
    tensors[f"{name}_blocks"][2, 7, 0] = codes
    save_file(tensors, directory / "model.safetensors")


def test_mxfp4_scales_outside_the_exact_range(tmp_path: Path) -> None:
    mxfp4_target(tmp_path)
    for scale, codes in ((1, 0x31), (0, 0x01), (192, 0x70), (255, 0x00)):
        set_scale(tmp_path, scale, codes)
        with pytest.raises(ConfigError) as caught:
            load_target(tmp_path)
        text = str(caught.value)
        assert "model.safetensors: tensor 'model.layers.1.mlp.experts.down_proj_scales'" in text
        assert f"from 2 to 191, found {scale} in expert 2" in text
    for scale, codes, kept, first in ((2, 0x31, 2, 0.5), (191, 0x77, 191, 6.0), (0, 0x00, 127, 0), (254, 0x88, 127, 0)):
        set_scale(tmp_path, scale, codes)  # of zeros it is a usual one, whatever it was
        weights = load_target(tmp_path).weights
        assert int(weights["layers.1.experts.down.scales"][2, 7, 0]) == kept
        assert float(decoded(weights, "layers.1.experts.down")[2, 7, 0]) == first * 2.0 ** (kept - 127)


def shard(directory: Path, count: int = 3) -> dict[str, str]:
    """Split model.safetensors into shards with an index, as transformers does; returns the weight map."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{i % count + 1:05d}-of-{count:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, directory / file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def test_transformers_own_shards_load(tmp_path: Path) -> None:
    model = make_target(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same(load_target(tmp_path).weights, expected_weights(model))


def test_shards_may_be_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    model = make_target(blobs, "llama")
    shard(blobs)
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert_same(load_target(snapshot).weights, expected_weights(model))


def test_a_tied_copy_must_be_equal(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as old versions stored
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load_target(tmp_path).weights
    assert weights["lm_head.weight"] is weights["embed.weight"]
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'lm_head\.weight' differs from the embedding.*tie_word_embeddings"):
        load_target(tmp_path)


def test_float16_names_the_knob_and_the_knob_works(tmp_path: Path) -> None:
    model = make_target(tmp_path, "llama")
    tensors = {name: value.half() for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for change in ({"dtype": "float16"}, {"dtype": ..., "torch_dtype": "float16"}, {"dtype": ..., "torch_dtype": ...}):
        edit_json(tmp_path / "config.json", **change)
        with pytest.raises(ConfigError, match=r"'float16'.*--dtype bfloat16 or --dtype float32 \(dtype="):
            load_target(tmp_path)
    loaded = load_target(tmp_path, dtype="float32").weights["norm.weight"]
    assert torch.equal(loaded, model.model.norm.weight.half().float())
    with pytest.raises(ConfigError, match="dtype must be 'auto', 'bfloat16' or 'float32', got 'int8'"):
        load_target(tmp_path, dtype="int8")


def test_end_tokens_come_from_generation_config_first(tmp_path: Path) -> None:
    make_target(tmp_path, "llama", bos_token_id=1, eos_token_id=2)
    (tmp_path / "generation_config.json").unlink()
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [9, 2, 9], "temperature": 0.6}))
    config = read_model_config(tmp_path)
    assert config.eos_token_ids == (9, 2) and config.bos_token_id == 1
    generation.write_text(json.dumps({"temperature": 0.6}))
    assert read_model_config(tmp_path).eos_token_ids == (2,)
    for wrong, found in (([97], r"\[97\]"), ([True], r"\[True\]"), (-1, "-1"), ("</s>", "'</s>'")):
        generation.write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(
            ConfigError, match=rf"generation_config\.json: eos_token_id must be .* 0 to 96, found {found}"
        ):
            read_model_config(tmp_path)
