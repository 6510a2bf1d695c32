"""EAGLE3 heads in the four public layouts: geometry, capture boundaries, canonical weights, and refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import draft_tensors, edit_json, target_geometry, write_draft_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lowlat.errors import ConfigError
from lowlat.models.layer_spec import DenseSpec, RopeConfig
from lowlat.speculators.eagle3.config import read_draft_config
from lowlat.speculators.eagle3.weights import draft_weight_plan, load_draft_model

LAYOUTS = ("safeai", "specforge", "modelopt", "speculators")
TARGET = target_geometry()
ATTENTION = "layers.0.self_attn"


def expected_weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Canonical weights of a plain head."""
    mlp = "layers.0.mlp"
    keys = [tensors[f"{ATTENTION}.{part}_proj.weight"] for part in "kv"]
    gates = [tensors[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")]
    return {
        "draft_model.fc.weight": tensors["fc.weight"],
        "draft_model.embed_norm.weight": tensors["layers.0.input_layernorm.weight"],
        "draft_model.hidden_norm.weight": tensors["layers.0.hidden_norm.weight"],
        "draft_model.q.weight": tensors[f"{ATTENTION}.q_proj.weight"],
        "draft_model.kv.weight": torch.cat(keys),
        "draft_model.o.weight": tensors[f"{ATTENTION}.o_proj.weight"],
        "draft_model.ffn_norm.weight": tensors["layers.0.post_attention_layernorm.weight"],
        "draft_model.gate_up.weight": torch.cat(gates),
        "draft_model.down.weight": tensors[f"{mlp}.down_proj.weight"],
        "draft_model.norm.weight": tensors["norm.weight"],
        "draft_model.lm_head.weight": tensors["lm_head.weight"],
        "draft_model.draft_to_target": (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).int(),
    }


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(weights) == set(expected)
    for name, value in expected.items():
        assert torch.equal(weights[name], value.to(weights[name].dtype)), name


def refused(directory: Path, *parts: str, target: Any = TARGET, **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_draft_model(directory, target, **options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_weights(layout: str, tmp_path: Path) -> None:
    tensors = write_draft_layout(tmp_path, layout)
    loaded = load_draft_model(tmp_path, TARGET)
    assert_same(loaded.weights, expected_weights(tensors))
    config = loaded.config
    assert config == read_draft_config(tmp_path, TARGET)
    assert config.layout == layout and config.capture_boundaries == (2, 4, 5)
    assert (config.hidden_size, config.target_hidden_size, config.ffn.inner_size) == (16, 16, 24)
    attention = config.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 6)
    assert (config.vocab_size, config.draft_vocab_size, config.max_position) == (40, 12, 256)
    assert attention.rope == RopeConfig(500000.0 if layout == "speculators" else 10000.0)
    assert config.norm_before_residual == (layout == "speculators")
    assert config.own_lm_head and config.own_draft_map and not config.own_embedding
    assert not (config.norm_output or config.fc_norm or config.norm_before_fc or attention.qk_norm)
    assert loaded.notes == ()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_take_the_targets_dtype(dtype: str, tmp_path: Path) -> None:
    tensors = write_draft_layout(tmp_path, "safeai")
    halves = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    write_draft_layout(tmp_path, "safeai", halves)
    loaded = load_draft_model(tmp_path, target_geometry(dtype=dtype))
    compute = getattr(torch, dtype)
    for name, tensor in loaded.weights.items():
        assert tensor.dtype == (torch.int32 if name == "draft_model.draft_to_target" else compute)
    assert_same(loaded.weights, expected_weights(halves))
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.weights.items()}
    assert dict(draft_weight_plan(loaded.config, dtype=dtype)) == held
    assert load_draft_model(tmp_path, TARGET, dtype="bfloat16").weights["draft_model.q.weight"].dtype == torch.bfloat16
    refused(tmp_path, "dtype must be 'bfloat16' or 'float32', got 'float16'", dtype="float16")


@pytest.mark.parametrize("layer", [{"model_type": "qwen2", "sliding_window": 131072}, {"model_type": "mistral"}])
def test_draft_models_of_other_families_layers(layer: dict[str, Any], tmp_path: Path) -> None:
    tensors = write_draft_layout(tmp_path, "speculators", layer=layer)
    assert_same(load_draft_model(tmp_path, TARGET).weights, expected_weights(tensors))


def test_a_leading_model_is_dropped(tmp_path: Path) -> None:
    tensors = write_draft_layout(tmp_path, "speculators")
    save_file({f"model.{name}": value for name, value in tensors.items()}, tmp_path / "model.safetensors")
    assert_same(load_draft_model(tmp_path, TARGET).weights, expected_weights(tensors))
    save_file({**tensors, "model.fc.weight": tensors["fc.weight"].clone()}, tmp_path / "model.safetensors")
    refused(tmp_path, "'model.fc.weight'", "are both 'fc.weight'")


def test_every_option_at_once(tmp_path: Path) -> None:
    tensors = draft_tensors(num_features=4)
    extra = {
        "input_norm.weight": (64,),
        "embed_tokens.weight": (40, 16),
        f"{ATTENTION}.o_proj.bias": (16,),
        **{f"fc_norm.{k}.weight": (16,) for k in range(4)},
        **{f"{ATTENTION}.{part}_proj.bias": (rows,) for part, rows in (("q", 24), ("k", 12), ("v", 12))},
        **{f"{ATTENTION}.{part}_norm.weight": (6,) for part in "qk"},
        **{f"layers.0.mlp.{part}_proj.bias": (rows,) for part, rows in (("gate", 24), ("up", 24), ("down", 16))},
    }
    tensors.update({name: torch.randn(shape) for name, shape in extra.items()})
    flags = {"norm_before_fc": True, "fc_norm": True, "norm_output": True, "norm_before_residual": False}
    layer = {"model_type": "qwen3", "attention_bias": True, "mlp_bias": True}
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 7, 8]}
    write_draft_layout(tmp_path, "speculators", tensors, config={**flags, **ids}, layer=layer)
    loaded = load_draft_model(tmp_path, TARGET)
    expected = expected_weights(tensors) | {
        "draft_model.input_norm.weight": tensors["input_norm.weight"],
        "draft_model.embed.weight": tensors["embed_tokens.weight"],
        "draft_model.q.bias": tensors[f"{ATTENTION}.q_proj.bias"],
        "draft_model.kv.bias": torch.cat([tensors[f"{ATTENTION}.{part}_proj.bias"] for part in "kv"]),
        "draft_model.o.bias": tensors[f"{ATTENTION}.o_proj.bias"],
        "draft_model.q_norm.weight": tensors[f"{ATTENTION}.q_norm.weight"],
        "draft_model.k_norm.weight": tensors[f"{ATTENTION}.k_norm.weight"],
        "draft_model.gate_up.bias": torch.cat([tensors[f"layers.0.mlp.{part}_proj.bias"] for part in ("gate", "up")]),
        "draft_model.down.bias": tensors["layers.0.mlp.down_proj.bias"],
        **{f"draft_model.fc_norm.{k}.weight": tensors[f"fc_norm.{k}.weight"] for k in range(4)},
    }
    assert_same(loaded.weights, expected)
    config = loaded.config
    attention, ffn = config.attention, config.ffn
    assert attention.qkv_bias and attention.output_bias and attention.qk_norm and config.own_embedding
    assert isinstance(ffn, DenseSpec) and ffn.bias
    assert config.norm_before_fc and config.fc_norm and config.norm_output and not config.norm_before_residual
    assert config.capture_boundaries == (1, 2, 7, 8)
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.weights.items()}
    assert dict(draft_weight_plan(config, dtype="float32")) == held


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("layout", "top", "eagle", "boundaries"),
    [
        ("speculators", [2, 4, 5], None, (2, 4, 5)),
        ("speculators", [1, 4, 5], None, (1, 4, 5)),  # boundaries, whatever the first is
        ("speculators", [0, 4, 8], None, (0, 4, 8)),
        ("specforge", None, [1, 3, 4], (2, 4, 5)),  # outputs: the first is 1
        ("specforge", None, [2, 4, 6], (2, 4, 6)),  # SGLang takes them as they are
        ("safeai", None, [1, 3, 4], (2, 4, 5)),
        ("modelopt", None, [1, 3, 4], (2, 4, 5)),
        ("modelopt", None, [2, 3, 7], (3, 4, 8)),  # ModelOpt hooks outputs
        ("modelopt", None, [4, 6, 8], (4, 6, 8)),  # 8 can only be a boundary, as in gpt-oss v3
        ("specforge", None, [1, 6, 8], (1, 6, 8)),
        ("specforge", [1, 4, 5], None, (1, 4, 5)),  # vLLM's key at the top level: boundaries
        ("modelopt", [2, 4, 5], [1, 3, 4], (2, 4, 5)),  # both, and they agree
        ("specforge", None, None, (2, 4, 5)),
        ("modelopt", None, [], (2, 4, 5)),
    ],
)
def test_capture_conventions_become_boundaries(
    layout: str, top: Any, eagle: Any, boundaries: tuple[int, ...], tmp_path: Path
) -> None:
    config = {} if top is None else {IDS: top}
    write_draft_layout(tmp_path, layout, config=config, eagle=None if eagle is None else {IDS: eagle})
    assert read_draft_config(tmp_path, TARGET).capture_boundaries == boundaries
    assert read_draft_config(tmp_path, TARGET, capture_layers=(0, 3, 3)).capture_boundaries == (0, 3, 3)


def test_layer_ids_are_boundaries(tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "specforge", eagle={"layer_ids": [1, 3, 4]})
    assert read_draft_config(tmp_path, TARGET).capture_boundaries == (1, 3, 4)
    assert read_draft_config(tmp_path, TARGET, capture_layers=(8, 3, 0)).capture_boundaries == (8, 3, 0)


@pytest.mark.parametrize(
    ("top", "eagle", "override", "parts"),
    [
        ([2, 4], None, None, ["expected 3 entries, as the draft model has features, found 2"]),
        ([4, 2, 5], None, None, ["expected ascending ids", "give capture_layers"]),
        ([2, 4, 9], None, None, ["list of at most 16 integers from 0 to 8", "found [2, 4, 9]"]),
        ([-1, 2, 4], None, None, ["found [-1, 2, 4]"]),
        ([True, 2, 4], None, None, ["found [True, 2, 4]"]),
        ("2,4,5", None, None, ["found '2,4,5'"]),
        ([2, 4, 5], [2, 4, 5], None, ["means boundaries [2, 4, 5]", "means [3, 5, 6]"]),
        (None, None, (1, 2), ["capture_layers = [1, 2]: expected 3 entries"]),
        (None, None, (1, 2, 9), ["capture_layers = [1, 2, 9]", "from 0 to the target's 8 layers, found 9"]),
    ],
)
def test_ids_that_cannot_be(top: Any, eagle: Any, override: Any, parts: list[str], tmp_path: Path) -> None:
    config = {} if top is None else {IDS: top}
    write_draft_layout(tmp_path, "modelopt", config=config, eagle=None if eagle is None else {IDS: eagle})
    refused(tmp_path, *parts, capture_layers=override)


def test_default_ids_need_a_deep_target(tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "safeai")
    assert read_draft_config(tmp_path, target_geometry(num_layers=36)).capture_boundaries == (2, 18, 33)
    refused(tmp_path, "needs a target of 7 layers or more, found 6", target=target_geometry(num_layers=6))
    write_draft_layout(tmp_path, "safeai", draft_tensors(num_features=2))
    refused(tmp_path, "the default", "[2, 4, 5]: expected 2 entries")


@pytest.mark.parametrize(
    ("layout", "flags", "fc_norm", "feedback", "note"),
    [
        ("speculators", {"norm_output": True}, False, True, None),
        ("modelopt", {"norm_output": True}, False, True, None),
        ("specforge", {"norm_output": True}, False, False, "norm_output without fc_norm"),
        ("specforge", {"norm_output": True, "fc_norm": True}, True, True, None),  # EAGLE 3.1
        ("specforge", {"norm_output": False, "fc_norm": True}, True, False, None),
        ("safeai", {"return_hidden_post_norm": True}, False, True, None),
        ("specforge", {"fc_norm": None}, True, False, "fc_norm is not in the config"),
        ("speculators", {"norm_before_residual": None}, False, False, "norm_before_residual is not in the config"),
    ],
)
def test_what_is_fed_back(
    layout: str, flags: dict[str, Any], fc_norm: bool, feedback: bool, note: str | None, tmp_path: Path
) -> None:
    tensors = draft_tensors()
    if fc_norm:
        tensors.update({f"fc_norm.{k}.weight": torch.ones(16) for k in range(3)})
    write_draft_layout(tmp_path, layout, tensors, config=flags)
    loaded = load_draft_model(tmp_path, TARGET)
    assert loaded.config.norm_output == feedback and loaded.config.fc_norm == fc_norm
    assert [note in text for text in loaded.notes] == ([True] if note else [])  # type: ignore[operator]


def test_flags_may_stand_in_nested_configs(tmp_path: Path) -> None:
    tensors = draft_tensors()
    tensors["input_norm.weight"] = torch.ones(48)
    write_draft_layout(tmp_path, "modelopt", tensors, eagle={"norm_before_fc": True})
    assert read_draft_config(tmp_path, TARGET).norm_before_fc
    write_draft_layout(tmp_path, "speculators", tensors, layer={"norm_before_fc": True, "norm_output": True})
    config = read_draft_config(tmp_path, TARGET)
    assert config.norm_before_fc and config.norm_output
    write_draft_layout(
        tmp_path, "speculators", tensors, config={"norm_before_fc": False}, layer={"norm_before_fc": True}
    )
    refused(tmp_path, "norm_before_fc is contradictory", "transformer_layer_config")


def test_flags_and_tensors_must_agree(tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "speculators", config={"norm_before_fc": True})
    refused(tmp_path, "norm_before_fc is True, but its tensors are missing")
    tensors = draft_tensors()
    tensors["fc_norm.0.weight"] = torch.ones(16)
    write_draft_layout(tmp_path, "speculators", tensors, config={"fc_norm": False})
    refused(tmp_path, "fc_norm is False, but its tensors are there")
    write_draft_layout(tmp_path, "speculators", tensors, config={"fc_norm": True})
    refused(tmp_path, "tensor 'fc_norm.1.weight' is missing; expected shape [16]")


def test_promised_biases(tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "specforge", layer={"attention_bias": True})
    loaded = load_draft_model(tmp_path, TARGET)
    assert not loaded.config.attention.qkv_bias and "attention_bias is true" in loaded.notes[0]
    write_draft_layout(tmp_path, "modelopt", layer={"mlp_bias": True})
    refused(tmp_path, "mlp_bias is true, but", "has no such bias")
    tensors = draft_tensors()
    tensors[f"{ATTENTION}.q_proj.bias"] = torch.ones(24)
    write_draft_layout(tmp_path, "modelopt", tensors)
    refused(tmp_path, f"'{ATTENTION}.k_proj.bias' is missing")


def test_the_targets_lm_head_is_shared_where_it_fits(tmp_path: Path) -> None:
    tensors = draft_tensors()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    write_draft_layout(tmp_path, "modelopt", tensors)
    loaded = load_draft_model(tmp_path, TARGET)
    assert loaded.config.draft_vocab_size == 40 and not loaded.config.own_lm_head and not loaded.config.own_draft_map
    assert "draft_model.lm_head.weight" not in loaded.weights
    assert loaded.weights["draft_model.draft_to_target"].tolist() == list(range(40))
    write_draft_layout(tmp_path, "modelopt", tensors, config={"draft_vocab_size": 12})
    refused(tmp_path, "draft_vocab_size 12 is not the 40 rows of the LM head")
    write_draft_layout(tmp_path, "modelopt", tensors, config={"tie_word_embeddings": True})
    refused(tmp_path, "tie_word_embeddings without lm_head.weight")
    assert load_draft_model(tmp_path, target_geometry(tie_embeddings=True)).config.draft_vocab_size == 40


def test_a_narrow_head_needs_its_own_tables(tmp_path: Path) -> None:
    """A draft of another width than the target's, as for Llama 70B, carries its own embedding."""
    target = target_geometry(hidden_size=20)
    tensors = draft_tensors()
    tensors["fc.weight"] = torch.randn(16, 60)
    write_draft_layout(tmp_path, "safeai", tensors, config={"target_hidden_size": 20})
    refused(tmp_path, "embed_tokens.weight is missing", "hidden_size 16 is not the target's 20", target=target)
    tensors["embed_tokens.weight"] = torch.randn(40, 16)
    write_draft_layout(tmp_path, "safeai", tensors, config={"target_hidden_size": 20})
    config = load_draft_model(tmp_path, target).config
    assert config.own_embedding and (config.hidden_size, config.target_hidden_size) == (16, 20)
    refused(tmp_path, "target_hidden_size 20 is not the target's 16")


def test_a_head_for_another_target(tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "safeai")
    refused(tmp_path, "multiple of the target's hidden_size 20, found [16, 48]", target=target_geometry(hidden_size=20))
    refused(tmp_path, "vocab_size 40 is not the target's 41", target=target_geometry(vocab_size=41))
    write_draft_layout(tmp_path, "safeai", config={"vocab_size": None})
    assert read_draft_config(tmp_path, TARGET).vocab_size == 40


def spoil_map(tensors: dict[str, torch.Tensor], at: int, value: int) -> dict[str, torch.Tensor]:
    tensors["d2t"][at] = value
    return tensors


@pytest.mark.parametrize("value", [-1, 29, 1 << 62, -(1 << 62)])
def test_offsets_out_of_range(value: int, tmp_path: Path) -> None:
    write_draft_layout(tmp_path, "safeai", spoil_map(draft_tensors(), 4, value))
    refused(tmp_path, "model.safetensors: tensor 'd2t'", "from 0 to 39", f"found offset {value} at 4")


def test_maps_that_do_not_ascend_or_disagree(tmp_path: Path) -> None:
    offsets = draft_tensors()["d2t"]
    write_draft_layout(tmp_path, "safeai", spoil_map(draft_tensors(), 6, int(offsets[5]) - 1))
    refused(tmp_path, "'d2t'", f"found offset {int(offsets[5]) - 1} at 6")
    tensors = draft_tensors()
    tensors["t2d"] = tensors["t2d"].roll(1)
    write_draft_layout(tmp_path, "safeai", tensors)
    refused(tmp_path, "tensors 'd2t' and 't2d' name different target ids")
    tensors["t2d"] = torch.zeros(39, dtype=torch.bool)
    write_draft_layout(tmp_path, "safeai", tensors)
    refused(tmp_path, "'t2d': expected dtype BOOL or U8 and shape [40], found BOOL [39]")
    tensors["d2t"] = tensors["d2t"][:-1].clone()
    write_draft_layout(tmp_path, "safeai", tensors)
    refused(tmp_path, "'d2t': expected dtype I64 or I32 and shape [12], found I64 [11]")
    del tensors["d2t"], tensors["t2d"]
    write_draft_layout(tmp_path, "safeai", tensors)
    refused(tmp_path, "tensor 'd2t' is missing; 12 draft ids cannot be mapped")


@pytest.mark.parametrize(
    ("layout", "changes", "parts"),
    [
        ("specforge", {"layer": {"num_hidden_layers": 2}}, ["'layers.1.input_layernorm.weight' is missing"]),
        ("specforge", {"layer": {"hidden_act": "relu"}}, ["hidden_act = 'relu'"]),
        ("modelopt", {"eagle": {"parallel_draft_step": 4}}, ["parallel_draft_step = 4"]),
        ("modelopt", {"eagle": {"use_last_layernorm": False}}, ["use_last_layernorm = False"]),
        ("modelopt", {"eagle": {"use_input_layernorm_in_first_layer": False}}, ["use_input_layernorm_in_first"]),
        ("modelopt", {"eagle": {"use_aux_hidden_state": 1}}, ["use_aux_hidden_state must be true or false"]),
        ("modelopt", {"eagle": {"brand_new_switch": True}}, ["eagle_config: 'brand_new_switch' = True"]),
        ("speculators", {"layer": {"brand_new_switch": 3}}, ["transformer_layer_config: 'brand_new_switch' = 3"]),
        ("speculators", {"layer": {IDS: [1, 2, 3]}}, [f"transformer_layer_config: '{IDS}'"]),
        ("specforge", {"config": {"layer_ids": [1, 2, 3]}}, ["'layer_ids' = [1, 2, 3]"]),
        ("specforge", {"config": {"architectures": ["LlamaForCausalLMEagle3Gated"]}}, ["Eagle3Gated"]),
        ("specforge", {"config": {"model_type": "deepseek_v3"}}, ["model_type = 'deepseek_v3'"]),
        ("speculators", {"config": {"speculators_model_type": "eagle"}}, ["'eagle3' or 'peagle', found 'eagle'"]),
        ("speculators", {"config": {"transformer_layer_config": None}}, ["transformer_layer_config is missing"]),
        ("safeai", {"config": {"transformer_layer_config": {"a": 1}}}, ["without speculators_model_type"]),
        ("safeai", {"layer": {"rope_scaling": {"type": "dynamic", "factor": 2.0}}}, ["'dynamic' is not implemented"]),
        ("safeai", {"config": {"quantization_config": {"quant_method": "hqq"}}}, ["quant_method 'hqq' is not"]),
        ("safeai", {"config": {"draft_vocab_size": 13}}, ["draft_vocab_size 13 is not the 12 rows"]),
        ("safeai", {"config": {"num_aux_hidden_states": 2}}, ["num_aux_hidden_states 2", "columns for 3"]),
        ("safeai", {"layer": {"intermediate_size": 25}}, ["mlp.gate_proj.weight", "shape [25, 16], found [24, 16]"]),
        ("safeai", {"layer": {"num_key_value_heads": 3}}, ["not a multiple of num_key_value_heads 3"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    layout: str, changes: dict[str, Any], parts: list[str], tmp_path: Path
) -> None:
    write_draft_layout(tmp_path, layout, **changes)
    refused(tmp_path, *parts)


@pytest.mark.parametrize(
    ("added", "dropped", "parts"),
    [
        ({"fc.bias": (16,)}, [], ["'fc.bias': a bias on fc is not implemented"]),
        ({"fc.bias": (16,)}, ["layers.0.hidden_norm.weight"], ["'fc.bias'", "EAGLE-1 and EAGLE-2 are not EAGLE3"]),
        ({}, ["layers.0.hidden_norm.weight"], ["'hidden_norm.weight' is missing", "EAGLE-2 are not EAGLE3"]),
        ({}, ["fc.weight"], ["'fc.weight' is missing", "use_aux_hidden_state false"]),
        ({}, ["norm.weight"], ["'norm.weight' is missing; expected shape [16]"]),
        ({"layers.0.self_attn.q_a_proj.weight": (4, 4)}, [], ["q_a_proj", "MLA"]),
        ({"layers.1.mlp.up_proj.weight": (4, 4)}, [], ["of draft layer 1", "num_hidden_layers is 1"]),
        ({"parallel_draft_heads.0.x.weight": (4, 4)}, [], ["parallel drafting"]),
        ({"mask_hidden": (1, 1, 48)}, [], ["'mask_hidden'", "P-EAGLE", "method must be 'peagle'"]),
        ({"medusa_head.0.linear.weight": (4, 4)}, [], ["Medusa heads are not an EAGLE3 draft model"]),
        ({"layers.0.mlp.experts.gate.weight": (4, 4)}, [], ["unexpected tensor 'layers.0.mlp.experts.gate.weight'"]),
        ({"fc_norm.3.weight": (16,)}, [], ["'fc_norm.0.weight' is missing"]),
    ],
)
def test_tensors_of_other_kinds_of_heads(
    added: dict[str, tuple[int, ...]], dropped: list[str], parts: list[str], tmp_path: Path
) -> None:
    tensors = {**draft_tensors(), **{name: torch.ones(shape) for name, shape in added.items()}}
    kept = {name: value for name, value in tensors.items() if name not in dropped}
    write_draft_layout(tmp_path, "modelopt", kept)
    refused(tmp_path, *parts)


def test_copies_that_trainers_leave_are_not_read(tmp_path: Path) -> None:
    tensors = draft_tensors()
    plain = dict(tensors)
    tensors["verifier_norm.weight"] = torch.full((16,), float("nan"))
    tensors["verifier_lm_head.weight"] = torch.ones(12, 16)
    tensors["rotary_emb.inv_freq"] = torch.ones(3)
    write_draft_layout(tmp_path, "speculators", tensors)
    assert_same(load_draft_model(tmp_path, TARGET).weights, expected_weights(plain))


def test_not_finite_and_flat_tensors(tmp_path: Path) -> None:
    tensors = draft_tensors()
    tensors["fc.weight"][2, 3] = float("inf")
    write_draft_layout(tmp_path, "specforge", tensors)
    refused(tmp_path, "tensor 'fc.weight': expected finite values, found inf at element 99 of 768")
    tensors["fc.weight"] = torch.ones(48)
    write_draft_layout(tmp_path, "specforge", tensors)
    refused(tmp_path, "'fc.weight': expected 2 dimensions, found [48]")


def test_progress_and_published_extras(tmp_path: Path) -> None:
    """truncated_vocab_size and a gpt-oss model_type stand in published configs; neither changes the head."""
    extras = {"truncated_vocab_size": 12, "model_type": "gpt_oss", "num_local_experts": 16, "experts_per_token": 4}
    tensors = write_draft_layout(tmp_path, "specforge", config=extras, layer={"rope_theta": 1e6, "rope_scaling": None})
    calls: list[tuple[int, int]] = []
    loaded = load_draft_model(tmp_path, TARGET, progress=lambda done, total: calls.append((done, total)))
    assert loaded.config.attention.rope.theta == 1e6
    total = sum(value.numel() * 4 for name, value in tensors.items() if name not in ("d2t", "t2d"))
    assert calls[-1] == (total, total) and len(calls) == 13


def test_heads_with_long_context_rope(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    write_draft_layout(tmp_path, "safeai", layer={"rope_scaling": scaling})
    assert read_draft_config(tmp_path, TARGET).attention.rope == RopeConfig(10000.0, "linear", factor=4.0)
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    write_draft_layout(tmp_path, "safeai", layer={"rope_scaling": scaling, "rope_theta": 150000})
    rope = read_draft_config(tmp_path, TARGET).attention.rope
    assert (rope.kind, rope.theta, rope.truncate, rope.original_max_position) == ("yarn", 150000.0, False, 4096)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("layout", ["modelopt", "speculators"])
@pytest.mark.second
def test_mutated_configs_load_or_are_refused(layout: str, tmp_path: Path, data: st.DataObject) -> None:
    """Whatever one key holds, nothing but ConfigError comes out, and what is accepted loads."""
    write_draft_layout(tmp_path, layout, eagle={IDS: [2, 4, 5]} if layout == "modelopt" else None)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    place = data.draw(st.sampled_from([key for key, value in fields.items() if isinstance(value, dict)] + [""]))
    inside = fields[place] if place else fields
    key = data.draw(st.sampled_from([*inside, "norm_output", IDS, "tie_word_embeddings", "rope_scaling", "odd"]))
    scalars = st.none() | st.booleans() | st.integers(-2, 50) | st.sampled_from([10**400, "eagle3", "yarn", 0.5])
    inside[key] = data.draw(scalars | st.lists(scalars, max_size=4) | st.dictionaries(st.text(max_size=3), scalars))
    path.write_text(json.dumps(fields))
    try:
        loaded = load_draft_model(tmp_path, TARGET)
    except ConfigError:
        return
    assert len(loaded.config.capture_boundaries) == (1 if loaded.config.final_hidden else 3)
    held = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in loaded.weights.items()}
    assert dict(draft_weight_plan(loaded.config, dtype="float32")) == held


def test_sharded_heads_load(tmp_path: Path) -> None:
    tensors = write_draft_layout(tmp_path, "specforge")
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in sorted(set(weight_map.values())):
        save_file({name: value for name, value in stored.items() if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    edit_json(tmp_path / "config.json", torch_dtype=...)
    assert_same(load_draft_model(tmp_path, TARGET).weights, expected_weights(tensors))
