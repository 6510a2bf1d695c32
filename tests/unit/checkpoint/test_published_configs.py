"""config.json as published models have it, by their keys: what they mean is read, and what means nothing is left."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lowlat.checkpoint.formats.linear import AwqLinear, Fp8Linear, GptqLinear
from lowlat.errors import ConfigError
from lowlat.models.rope import rope_tables
from lowlat.models.target import read_model_config
from lowlat.models.weight_plan import weight_plan

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
QWEN = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {**LLAMA, **QWEN, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {**LLAMA, **QWEN, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
CODER = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_window_layers": 28,
    "qkv_bias": False,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
    "use_sliding_window": False,
}
HYBRID = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}


def hybrid_kinds(count: int) -> dict[str, list[str]]:
    """layer_types of a hybrid."""
    return {"layer_types": [("linear" if (layer + 1) % 4 else "full") + "_attention" for layer in range(count)]}


def wrapper(kind: str, **text: Any) -> dict[str, Any]:
    """The config of a vision-language model."""
    return {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": kind.replace("Qwen3_5", "qwen3_5").replace("Moe", "_moe"),
        "text_config": HYBRID | text,
        "tie_word_embeddings": False,
        "transformers_version": "5.2.0",
        "video_token_id": 248057,
        "vision_config": {"deepstack_visual_indexes": [], "depth": 27, "hidden_size": 1152},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


QWEN35_9B = wrapper(
    "Qwen3_5",
    **hybrid_kinds(32),
    model_type="qwen3_5_text",
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=16,
    num_hidden_layers=32,
    num_key_value_heads=4,
)
QWEN36_27B = wrapper(
    "Qwen3_5",
    **hybrid_kinds(64),
    model_type="qwen3_5_text",
    hidden_size=5120,
    intermediate_size=17408,
    linear_num_value_heads=48,
    num_attention_heads=24,
    num_hidden_layers=64,
    num_key_value_heads=4,
    output_gate_type="swish",
)
QWEN36_35B = wrapper(
    "Qwen3_5Moe",
    **hybrid_kinds(40),
    model_type="qwen3_5_moe_text",
    hidden_size=2048,
    moe_intermediate_size=512,
    num_attention_heads=16,
    num_experts=256,
    num_experts_per_tok=8,
    num_hidden_layers=40,
    num_key_value_heads=2,
    router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512,
)
CODER_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 5000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LONG = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GPTQMODEL = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
    "checkpoint_format": "gptq",
    "format": "gptq",
    "pack_dtype": "int32",
    "pack_impl": "cpu",
    "meta": {"quantizer": ["gptqmodel:5.0.0"], "damp_percent": 0.05, "mse": 0.0},
}
ROUND = {
    "autoround_version": "0.6.0",
    "batch_size": 4,
    "bits": 4,
    "data_type": "int",
    "enable_quanted_input": True,
    "group_size": 128,
    "iters": 200,
    "low_gpu_mem_usage": True,
    "nsamples": 512,
    "seqlen": 2048,
    "sym": True,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def write(directory: Path, base: dict[str, Any], changes: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(base | changes))
    return directory


@pytest.mark.parametrize(
    ("config", "giga", "state_mb"),
    [
        pytest.param(QWEN35_9B, 8.95, 50.3, id="Qwen3.5-9B"),
        pytest.param(QWEN36_27B, 26.9, 151.0, id="Qwen3.6-27B"),
        pytest.param(QWEN36_35B, 34.66, 62.9, id="Qwen3.6-35B-A3B"),
        pytest.param(CODER_NEXT, 79.67, 75.5, id="Qwen3-Coder-Next"),
    ],
)
def test_hybrids(config: dict[str, Any], giga: float, state_mb: float, tmp_path: Path) -> None:
    """Parameters of the text model, and bytes of recurrent states S of a slot."""
    found = read_model_config(write(tmp_path, config, {}))
    assert sum(math.prod(shape) for shape, _ in weight_plan(found).values()) / 1e9 == pytest.approx(giga, abs=0.01)
    sizes = (spec.num_value_heads * spec.key_dim * spec.value_dim for spec in found.deltas.values())
    assert 4 * sum(sizes) / 1e6 == pytest.approx(state_mb, abs=0.1)
    assert found.max_position == 262144 and found.dtype == "bfloat16"
    assert [number for number in range(8) if number in found.attentions] == [3, 7]
    attention = found.attention
    assert attention.gated and attention.rotation.dims == 64 and attention.head_dim == 256
    assert attention.rope.theta == (5e6 if config is CODER_NEXT else 1e7)
    if found.experts is not None:
        assert found.experts.shared and found.experts.shared_ffn is None and not found.experts.shares_of_all
        assert found.experts.num_taken == (11 if config is CODER_NEXT else 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' is not implemented"),
        ({"attn_output_gate": False}, "attn_output_gate must be true"),
        ({"attn_output_gate": None}, "attn_output_gate must be true"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16' is not implemented"),
        ({"layer_types": ["linear_attention"] * 31 + ["sliding_attention"]}, "entry 'sliding_attention'"),
        ({"layer_types": ["linear_attention"] * 32}, "names no layer with full_attention"),
        ({"layer_types": ["full_attention"] * 31}, "31 entries, expected 32"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 is not a multiple of linear_num_key_heads 16"),
        ({"some_new_key": 3}, "'some_new_key'"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_hybrids_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    text = QWEN35_9B["text_config"] | changes
    with pytest.raises(ConfigError, match=message):
        read_model_config(write(tmp_path, QWEN35_9B, {"text_config": text}))


def test_quantised_hybrids_leave_projections_plain_by_their_names(tmp_path: Path) -> None:
    """FP8 by blocks: delta nets' small projections and routers stay as they are, queries and gates are taken apart."""
    few = {**QWEN36_35B, "text_config": QWEN36_35B["text_config"] | {"num_hidden_layers": 4} | hybrid_kinds(4)}
    plain = ["lm_head", "model.language_model.embed_tokens"]
    plain += [f"model.language_model.layers.{layer}.linear_attn.in_proj_{part}" for layer in range(4) for part in "ab"]
    plain += [f"model.language_model.layers.{layer}.mlp.{part}" for layer in range(4) for part in
              ("gate", "shared_expert_gate")]  # fmt: skip
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = read_model_config(write(tmp_path, few, {"quantization_config": fp8 | {
        "modules_to_not_convert": plain}}))  # fmt: skip
    plan = weight_plan(config)
    assert plan["layers.0.delta_in.fp8"][0] == (12288, 2048) and plan["layers.0.delta_in.fp8_scales"][0] == (12288, 16)
    assert plan["layers.0.delta_ba.weight"][0] == (64, 2048) and plan["layers.0.router.weight"][0] == (257, 2048)
    assert plan["layers.3.qkv.fp8"][0] == (4096 + 1024, 2048) and plan["layers.3.gate.fp8"][0] == (4096, 2048)
    assert plan["layers.3.experts.down.fp8"][0] == (257, 2048, 512)
    more = plain + [f"model.language_model.layers.{layer}.mlp.shared_expert" for layer in range(4)]
    write(tmp_path, few, {"quantization_config": fp8 | {"modules_to_not_convert": more}})
    plan = weight_plan(read_model_config(tmp_path))
    assert plan["layers.3.experts.down.fp8"][0] == (256, 2048, 512) and plan["layers.3.router.weight"][0][0] == 256
    assert plan["layers.3.shared.gate_up.weight"][0] == (1024, 2048)


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        pytest.param(CODER, {}, id="Qwen3-Coder-30B-A3B"),
        pytest.param(
            LLAMA,
            {
                "is_llama_config": True,
                "rope_interleaved": False,
                "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            },
            id="SmolLM2",
        ),
        pytest.param(LLAMA, {"activation": "swiglu", "head_dim": 256}, id="Falcon3"),
        pytest.param(LLAMA, {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, id="remote code next to"),
        pytest.param(QWEN2, {"use_sliding_window": True, "max_window_layers": 24}, id="windows from the last layer on"),
        pytest.param(LLAMA, {"is_causal": True, "scale_attn_weights": True}, id="what is so anyway"),
    ],
)
def test_keys_that_say_what_the_family_does(base: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, base, changes))
    assert config.family == base["model_type"] and config.dtype == "bfloat16"
    assert set(config.windows) == {None} and config.max_context == config.usual_context == 8192


@pytest.mark.parametrize(
    ("quantisation", "stored", "plain"),
    [
        pytest.param(GPTQMODEL, GptqLinear(128, True, True), [], id="GPTQModel 5"),
        pytest.param({**GPTQMODEL, "format": "gptq_v2", "checkpoint_format": "gptq_v2"},
                     GptqLinear(128, False, True), [], id="GPTQ of version 2"),
        pytest.param({key: value for key, value in GPTQMODEL.items() if key != "checkpoint_format"},
                     GptqLinear(128, True, True), [], id="format alone"),
        pytest.param({**ROUND, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq",
                      "block_name_to_quantize": "model.layers",
                      "extra_config": {"model.layers.0.mlp.down_proj": {"bits": 16, "data_type": "float"},
                                       ".*layers\\.1\\.mlp.*": {"bits": 16, "data_type": "float"}}},
                     GptqLinear(128, True, True), ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"],
                     id="AutoRound as GPTQ"),
        pytest.param({**ROUND, "quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "sym": False},
                     AwqLinear(128), [], id="AutoRound as AWQ"),
        pytest.param({**ROUND, "quant_method": "intel/auto-round", "backend": "auto_round:gptq:exllamav2"},
                     GptqLinear(128, True, True), [], id="AutoRound of 2024"),
        pytest.param({**ROUND, "quant_method": "gptq", "provider": "auto-round", "damp_percent": 0.01,
                      "true_sequential": False}, GptqLinear(128, True, True), [], id="AutoRound's export to GPTQ"),
        pytest.param({**ROUND, **AWQ, "zero_point": False, "provider": "auto-round", "modules_to_not_convert": None},
                     AwqLinear(128), [], id="AutoRound's export to AWQ"),
        pytest.param(AUTO_FP8, Fp8Linear("tensor"), [], id="AutoFP8 of 2024"),
        pytest.param({**AUTO_FP8, "activation_scheme": "dynamic", "kv_cache_scheme": "static"}, Fp8Linear("tensor"), [],
                     id="AutoFP8, dynamic"),
    ],
)  # fmt: skip
def test_quantised_files(quantisation: dict[str, Any], stored: Any, plain: list[str], tmp_path: Path) -> None:
    """float16 next to quantised weights runs in bfloat16: that is what most of them say."""
    changes = {"torch_dtype": "float16", "quantization_config": quantisation}
    config = read_model_config(write(tmp_path, QWEN3, changes))
    assert config.dtype == "bfloat16" and config.quantisation is not None
    assert config.quantisation.stored("model.layers.2.mlp.up_proj") == stored
    for module in ("lm_head", *plain):
        assert config.quantisation.stored(module) is None, module


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({**GPTQMODEL, "format": "gptq_v2"}, "checkpoint_format 'gptq' and format 'gptq_v2' differ"),
        ({**GPTQMODEL, "format": "marlin"}, "format must be 'gptq' or 'gptq_v2', found 'marlin'"),
        (
            {**ROUND, "quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "packing_format must be",
        ),
        ({**ROUND, "quant_method": "auto-round", "extra_config": {"a.b": {"bits": 8}}}, "a.b: bits = 8"),
        ({**ROUND, "quant_method": "auto-round", "data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        ({**ROUND, "quant_method": "auto-round", "rotation_config": {"x": 1}}, "'rotation_config'"),
        ({**AUTO_FP8, "weight_block_size": [64, 64]}, r"weight_block_size must be \[128, 128\], or absent"),
    ],
)
def test_quantised_files_that_are_refused(quantisation: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config(write(tmp_path, QWEN3, {"quantization_config": quantisation}))


def test_plain_float16_is_the_callers_choice(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, {"torch_dtype": "float16"})
    with pytest.raises(ConfigError, match=r"stored in 'float16'.*--dtype bfloat16 or --dtype float32"):
        read_model_config(tmp_path)
    assert read_model_config(tmp_path, dtype="float32").dtype == "float32"
    cache = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}, "config_groups": {}}
    write(tmp_path, LLAMA, {"torch_dtype": "float16", "quantization_config": cache})  # no weight is quantised
    with pytest.raises(ConfigError, match=r"stored in 'float16'.*--dtype bfloat16"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("further", "factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attn_factor": 0.8782488562869419}, 1.0),  # DeepSeek-R1-0528-Qwen3-8B: YaRN's own factor is taken back
        ({"attn_factor": 1.5}, 1.5 * (0.1 * math.log(4) + 1)),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attn_factor": 0.5}, 0.5),
    ],
)
def test_the_factor_of_yarn(further: dict[str, float], factor: float, tmp_path: Path) -> None:
    rope = read_model_config(write(tmp_path, QWEN3, {"rope_scaling": LONG | further})).attention.rope
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    cosines, _ = rope_tables(rope, 128, 2)
    assert float(cosines[0, 0]) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize(("stated", "limit"), [(40960, 131072), (32768, 131072), (131072, 131072), (262144, 262144)])
def test_yarn_stretches_the_positions(stated: int, limit: int, tmp_path: Path) -> None:
    write(tmp_path, QWEN3, {"max_position_embeddings": stated, "rope_scaling": LONG})
    assert read_model_config(tmp_path).max_position == limit


@pytest.mark.parametrize(
    ("base", "changes", "windows"),
    [
        pytest.param(MISTRAL, {"sliding_window": 4096}, [4096] * 24, id="Mistral-7B-v0.1"),
        pytest.param(MISTRAL, {}, [4096] * 24, id="Mistral without the key"),
        pytest.param(MISTRAL, {"sliding_window": None}, [None] * 24, id="Mistral-7B-v0.3"),
        pytest.param(LLAMA, {"sliding_window": 4096}, [None] * 24, id="Llama, whose class knows no windows"),
        pytest.param(QWEN2, {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 12},
                     [None] * 12 + [1024] * 12, id="Qwen2 with windows"),
        pytest.param(QWEN2, {"use_sliding_window": False, "sliding_window": 1024}, [None] * 24, id="Qwen2.5"),
        pytest.param(QWEN2, {"layer_types": ["full_attention", "sliding_attention"] * 12, "sliding_window": 512},
                     [None, 512] * 12, id="by layer"),
        pytest.param(CODER, {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 99}, [512] * 24,
                     id="Qwen3-MoE, of which every layer has it"),
    ],
)  # fmt: skip
def test_windows_of_layers(
    base: dict[str, Any], changes: dict[str, Any], windows: list[int | None], tmp_path: Path
) -> None:
    """Contexts that a window holds run without it."""
    config = read_model_config(write(tmp_path, base, changes))
    usual = min([8192, *(window for window in windows if window is not None)])
    assert list(config.windows) == windows
    assert config.usual_context == usual and config.max_context == config.max_position == 8192
    assert set(config.for_context(usual).windows) == {None} and list(config.for_context(8192).windows) == windows
    with pytest.raises(ConfigError, match=r"max_context 8193 exceeds the model's max_position.*--max-context"):
        config.check_context(8193, "config.json")


LONG_FACTORS = {"short_factor": [1.0, 1.5] * 24, "long_factor": [2.0] * 48}
PHI = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 4096} | {
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,  # Phi-4-mini's
}


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_chooses_its_factors_by_the_context(kind: str, tmp_path: Path) -> None:
    """The trained context's, or those of longer ones for all positions; cos and sin have one factor in both."""
    config = read_model_config(write(tmp_path, PHI, {"rope_scaling": {"type": kind, **LONG_FACTORS}}))
    assert config.usual_context == 4096 and config.max_context == 131072 and config.attention.rotation.dims == 96
    short, long = (config.for_context(size).attention.rope for size in (4096, 4097))
    assert (short.factors, long.factors) == ((1.0, 1.5) * 24, (2.0,) * 48)
    assert short.attention_factor == long.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    for changes, message in (
        ({"long_factor": [2.0] * 47}, "long_factor must be a list of 48 numbers .*found 47 entries"),
        ({"short_factor": [0.0] * 48}, "short_factor must be a list of 48 numbers from 1e-06 to 1e.06, .*found 0.0"),
        ({"original_max_position_embeddings": 2048}, "original_max_position_embeddings is 2048, and 4096 next to it"),
    ):
        write(tmp_path, PHI, {"rope_scaling": {"type": kind, **LONG_FACTORS, **changes}})
        with pytest.raises(ConfigError, match=message):
            read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="full_attn_mod = 2 is not implemented"):
        read_model_config(write(tmp_path, PHI, {"full_attn_mod": 2}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model-Q4_K_M.gguf": "x"}, "no config.json: found 'model-Q4_K_M.gguf': GGUF is not read"),
        ({"config.json": json.dumps(LLAMA), "a.gguf": "x"}, "expected model.safetensors .*: found 'a.gguf'"),
        (
            {"adapter_config.json": '{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": "x"},
            r"it is an adapter \(LoRA\), .*merge it .*\(it is for 'org/base'\)",
        ),
        ({"params.json": "{}", "consolidated.safetensors": "x"}, "'consolidated.safetensors', Mistral's own layout"),
        ({"config.json": json.dumps(LLAMA), "consolidated.safetensors": "x"}, "Mistral's own layout"),
        ({"config.json": "{}", "adapter_config.json": "{}"}, r"model_type None is not implemented.*\(it is an adapter"),
        ({"config.json": json.dumps(LLAMA), "pytorch_model.bin": "x"}, "pickles are never read"),
        ({"README.md": "x"}, "config.json: no such file"),
    ],
)
def test_other_forms_of_models_are_told_by_name(files: dict[str, str], message: str, tmp_path: Path) -> None:
    from lowlat.models.target import open_target

    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_target(tmp_path)
    for name in files:
        if name.endswith(".gguf"):
            with pytest.raises(ConfigError, match="GGUF is not read"):
                open_target(tmp_path / name)
