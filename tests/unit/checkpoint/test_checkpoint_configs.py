"""config.json of targets: what is not implemented is refused by name, and mutated configs never get through half."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import edit_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer_changes import with_changes
from stages import wide
from tiny_models import FAMILIES, make_target, mxfp4_target

from lowlat.errors import ConfigError
from lowlat.models.layer_spec import DenseSpec
from lowlat.models.target import read_model_config
from lowlat.models.weight_plan import weight_plan


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each family; only the JSON is read here."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_target(root / family, family)
    mxfp4_target(root / "mxfp4")
    return {path.name: path for path in root.iterdir()}


def edited(made: dict[str, Path], family: str, directory: Path, **changes: Any) -> Path:
    """A copy with changed keys; Ellipsis removes one."""
    for name in ("config.json", "generation_config.json"):
        if (made[family] / name).exists():
            shutil.copy(made[family] / name, directory / name)
    edit_json(directory / "config.json", **changes)
    return directory


def refuses(made: dict[str, Path], family: str, directory: Path, changes: dict[str, Any], *parts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model_config(edited(made, family, directory, **changes))
    named = () if "model_type" in changes else (f"model_type '{'gpt_oss' if family == 'mxfp4' else family}'",)
    for part in ("config.json", *named, *parts):
        assert part in str(caught.value), str(caught.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        (
            "llama",
            {"model_type": "olmo2"},
            ["model_type 'olmo2' is not implemented", "llama, mistral, ministral3, mistral3, mixtral, qwen2, "],
        ),
        ("llama", {"model_type": ...}, ["model_type None is not implemented"]),
        ("llama", {"model_type": ["llama"]}, ["model_type must be a string, found ['llama']"]),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, ["'LlamaForSequenceClassification'"]),
        ("llama", {"hidden_act": "gelu"}, ["hidden_act = 'gelu' is not implemented", "allowed: 'silu'"]),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, ["quantization_config", "not implemented"]),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, ["quant_method 'awq'", "'mxfp4'"]),
        ("mxfp4", {"quantization_config": {"quant_method": "mxfp4", "dequantize": True}}, ["'dequantize' = True"]),
        ("mxfp4", {"intermediate_size": 48}, ["intermediate_size must be a multiple of 32", "found 48"]),
        ("llama", {"use_sliding_window": True}, ["use_sliding_window = True", "the layers that layer_types names"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window must be an integer from 1", "found 0"]),
        ("llama", {"layer_types": ["chunked_attention"] * 3}, ["'chunked_attention'"]),
        ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, ["implemented: Qwen2ForCausalLM"]),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, ["sliding_window must be an integer from 1"]),
        ("mistral", {"attention_bias": True}, ["'attention_bias' = True"]),
        ("qwen3_moe", {"mlp_only_layers": [1]}, ["layers without experts", "mlp_only_layers [1]"]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, ["layers without experts (decoder_sparse_step 2"]),
        ("qwen3_moe", {"num_experts": 6}, ["num_experts 6 and num_local_experts 5 differ"]),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, ["shared_expert_intermediate_size = 8", "0"]),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, ["layer_types has 2 entries, expected 3"]),
        ("gpt_oss", {"num_experts_per_tok": 5}, ["num_experts_per_tok", "from 1 to 4, found 5"]),
        ("gpt_oss", {"experts_per_token": 1}, ["num_experts_per_tok 2 and experts_per_token 1 differ"]),
        ("gpt_oss", {"num_experts_per_tok": ...}, ["num_experts_per_tok is missing"]),
        ("gpt_oss", {"swiglu_limit": -1.0}, ["swiglu_limit must be a number from 0.001", "found -1.0"]),
        ("llama", {"logit_scale": 0.5}, ["'logit_scale' = 0.5", "may change what the model computes"]),
        *(("llama", {"is_causal": value}, [f"is_causal = {value}", "allowed: True"]) for value in (False, None, 0)),
        ("qwen3", {"use_qk_norm": False}, ["use_qk_norm = False is not implemented", "normed, as the family's are"]),
        ("llama", {"use_qk_norm": True}, ["use_qk_norm = True is not implemented", "are not normed"]),
        ("llama", {"scale_attn_weights": False}, ["scale_attn_weights = False"]),
        ("llama", {"rope_interleaved": True}, ["rope_interleaved = True"]),
        ("llama", {"activation": "geglu"}, ["activation = 'geglu'"]),
        ("llama", {"rms_norm_eps": float("inf")}, ["rms_norm_eps", "found inf"]),
        ("llama", {"model_type": "nemotron_h", "time_step_limit": [0.0, float("inf")]}, ["model_type 'nemotron_h'"]),
        ("llama", {"rope_parameters": {**YARN, "attn_factor": 1.0, "attention_factor": 1.0}}, ["are both given"]),
        ("llama", {"is_decoder": True, "add_cross_attention": True}, ["'is_decoder' = True"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5", "RoPE covers whole heads"]),
        ("llama", {"num_key_value_heads": 3}, ["num_attention_heads 4 is not a multiple of num_key_value_heads 3"]),
        ("llama", {"head_dim": 7}, ["head_dim must be even, found 7"]),
        ("llama", {"head_dim": None, "hidden_size": 30}, ["hidden_size", "num_attention_heads 4", "found 30"]),
        ("llama", {"hidden_size": -32}, ["hidden_size must be an integer from 1 to 1048576, found -32"]),
        ("llama", {"hidden_size": True}, ["hidden_size", "found True"]),
        ("llama", {"hidden_size": ...}, ["hidden_size is missing; expected an integer"]),
        ("llama", {"num_hidden_layers": 10**30}, ["num_hidden_layers", "from 1 to 1024, found 1000000"]),
        ("llama", {"rms_norm_eps": 10**400}, ["rms_norm_eps", "found 1000"]),
        ("llama", {"tie_word_embeddings": 1}, ["tie_word_embeddings must be true or false, found 1"]),
        ("llama", {"eos_token_id": 97}, ["eos_token_id", "from 0 to 96, found 97"]),
        ("llama", {"dtype": "float64"}, ["'float64'", "--dtype bfloat16", 'dtype="bfloat16"']),
        ("llama", {"dtype": 32}, ["dtype must be a string, found 32"]),
        ("llama", {"rope_parameters": {"rope_type": "dynamic"}}, ["factor is missing"]),
        (
            "llama",
            {"rope_parameters": {"type": "ntk", "factor": 2.0}},
            ["rope type 'ntk'", "default, linear, llama3, yarn, dynamic, longrope"],
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "type": "linear"}}, ["'yarn' and type 'linear' differ"]),
        ("llama", {"rope_parameters": {"mrope_section": [1, 2, 1]}}, ["rope_parameters: 'mrope_section'"]),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, ["'full_attention'"]),
        ("llama", {"rope_parameters": "yarn"}, ["rope_parameters must be an object, found 'yarn'"]),
        ("llama", {"rope_parameters": {"rope_theta": 1.0}}, ["rope_theta must be a number from 1.001", "found 1.0"]),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": 0.5}}, ["beta_fast 0.5 must not be below beta_slow 1"]),
        ("llama", {"rope_parameters": {**YARN, "truncate": 0}}, ["truncate must be true or false, found 0"]),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, ["high_freq_factor 4 must be above"]),
        ("llama", {"rope_scaling": {**YARN, "factor": 8.0}, "rope_parameters": YARN}, ["both given and differ"]),
        ("llama", {"original_max_position_embeddings": 64}, ["'original_max_position_embeddings' = 64"]),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    family: str, changes: dict[str, Any], parts: list[str], made: dict[str, Path], tmp_path: Path
) -> None:
    refuses(made, family, tmp_path, changes, *parts)


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "x", "_attn_implementation_autoset": True},
        {"transformers_version": "4.57.0", "use_cache": False, "initializer_range": 0.1, "pretraining_tp": 2},
        {"temperature": 0.6, "top_k": 20, "do_sample": True, "max_length": 20},
        {"some_future_switch": False, "some_future_option": None, "some_future_list": [], "some_future_map": {}},
        {"architectures": ..., "hidden_act": ..., "num_key_value_heads": 4},
        {"rope_scaling": None, "partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 3},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2},
    ],
)
def test_harmless_keys_change_nothing(changes: dict[str, Any], made: dict[str, Path], tmp_path: Path) -> None:
    plain = read_model_config(made["llama"])
    config = read_model_config(edited(made, "llama", tmp_path, **changes))
    kv_heads = changes.get("num_key_value_heads", plain.attention.num_kv_heads)
    assert config == with_changes(plain, num_kv_heads=kv_heads)


def test_defaults_are_the_classes_own(made: dict[str, Path], tmp_path: Path) -> None:
    keys = ("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_parameters")
    config = read_model_config(edited(made, "llama", tmp_path, **dict.fromkeys(keys, ...)))
    attention, ffn = config.attention, config.ffn
    assert (attention.num_kv_heads, attention.head_dim, attention.rope.theta) == (4, 8, 10000.0)
    assert isinstance(ffn, DenseSpec) and not (attention.qkv_bias or ffn.bias or config.tie_embeddings)
    config = read_model_config(
        edited(made, "qwen3", tmp_path, head_dim=..., sliding_window=4096, use_sliding_window=...)
    )
    assert config.attention.head_dim == 128 and config.windows == (None,) * 3
    keys = ("head_dim", "attention_bias", "rope_parameters", "layer_types", "sliding_window", "swiglu_limit")
    config = read_model_config(edited(made, "gpt_oss", tmp_path, **dict.fromkeys(keys, ...)))
    attention = config.attention
    assert attention.head_dim == 64 and attention.qkv_bias and attention.output_bias
    assert config.windows == (128, None, 128)
    rope = attention.rope
    assert rope.theta == 150000.0 and rope.factor == 32.0 and not rope.truncate


def test_the_plan_of_a_published_size() -> None:
    """Bytes of a model nobody has to download: Llama 3.1 8B is 8,030,261,248 parameters."""
    from checkpoint_files import target_geometry

    sizes = {"num_layers": 32, "hidden_size": 4096, "inner_size": 14336, "num_heads": 32, "num_kv_heads": 8}
    config = target_geometry(**sizes, head_dim=128, vocab_size=128256, dtype="bfloat16")
    total = 0
    for shape, dtype in weight_plan(config).values():
        count = dtype.itemsize
        for size in shape:
            count *= size
        total += count
    assert total == 2 * 8_030_261_248


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1 << 31, 1 << 62, 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["default", "linear", "llama3", "yarn", "silu", "bfloat16", "mxfp4", "sliding_attention"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def mutate(draw: Any, value: Any) -> Any:
    """Replace, remove or add one thing somewhere in a JSON value."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        action = draw(st.integers(0, 4))
        if action == 0:
            return {k: v for k, v in value.items() if k != key}
        if action == 1:
            return {**value, draw(st.text(max_size=8)): draw(VALUES)}
        return {**value, key: mutate(draw, value[key])}
    return draw(VALUES)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("family", ["llama", wide("mistral"), wide("qwen2"), "qwen3", wide("gpt_oss"), "mxfp4"])
@given(data=st.data())
@pytest.mark.second
def test_mutated_configs_load_or_are_refused(
    family: str, made: dict[str, Path], tmp_path: Path, data: st.DataObject
) -> None:
    """Nothing but ConfigError comes out, and what is accepted is coherent enough to plan its weights."""
    config = json.loads((made[family] / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        config = mutate(data.draw, config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        found = read_model_config(tmp_path)
    except ConfigError as error:
        assert "config.json" in str(error) or str(tmp_path) in str(error)
        return
    attention = found.attention
    assert attention.num_heads % attention.num_kv_heads == 0 and attention.head_dim % 2 == 0
    assert len(found.windows) == found.num_layers
    assert len(weight_plan(found)) >= 9
