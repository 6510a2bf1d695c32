"""This module lists published models by name: the shapes of their config.json, and public draft models for them.

A shape has the keys that decide a geometry, as the model's own file spells them, without weights and tokenizers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PUBLISHED", "Published"]

KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)


@dataclass(frozen=True)
class Published:
    """A published model.

    name    ORG/NAME of its repository
    family  the model_type of its config.json
    shape   hidden, inner, layers, query heads, KV heads, vocabulary, positions
    keys    the config's other keys
    drafts  draft models by ORG/NAME; "mtp": a layer in its own files
    inside  the model_type in `text_config`, which has these keys; "": they are at the top level
    """

    name: str
    family: str
    shape: tuple[int, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    drafts: tuple[str, ...] = ()
    inside: str = ""

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        text: dict[str, Any] = {"rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
        text |= {**dict(zip(KEYS, self.shape, strict=True)), **self.keys}
        if not self.inside:
            return {**text, "model_type": self.family}
        return {"model_type": self.family, "text_config": {**text, "model_type": self.inside}, "vision_config": {}}


def _llama3_rope() -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_theta": 5e5, "rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}


HEADS_OF_128 = {"head_dim": 128}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "tie_word_embeddings": True}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16384,
}
FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "dequantize": False,
    "weight_block_size": None,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}
MINISTRAL = {"head_dim": 128, "rope_parameters": MINISTRAL_ROPE, "sliding_window": None, "quantization_config": FP8}
LONGROPE = ("short_factor", "long_factor")  # the files' numbers are left out, since they change no size
QWEN3 = {"head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3_MOE = {**QWEN3, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768} | {
    "norm_topk_prob": True
}
MELLUM_ROPE = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 16.0, "original_max_position_embeddings": 8192} | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.2772588722239782,
}
MELLUM = {"head_dim": 128, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "sliding_window": 1024} | {
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7,
    "mlp_layer_types": ["sparse"] * 28,
    "rope_parameters": {
        "full_attention": MELLUM_ROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    },
}
QWEN35 = {"head_dim": 256, "rms_norm_eps": 1e-6, "linear_num_key_heads": 16, "full_attention_interval": 4} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
}
QWEN35_MOE = {**QWEN35, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8} | {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
MROPE = {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}}
GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0} | {
    "quantization_config": {"quant_method": "mxfp4"}
}
GEMMA3 = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window_pattern": 6, "rms_norm_eps": 1e-6} | {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
GEMMA3_IMAGES = {**GEMMA3, "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
GEMMA4 = {"head_dim": 256, "global_head_dim": 512, "final_logit_softcapping": 30.0, "rms_norm_eps": 1e-6}
GEMMA4_LARGE = {**GEMMA4, "sliding_window": 1024, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
GEMMA4_SMALL = {**GEMMA4, "sliding_window": 512, "hidden_size_per_layer_input": 256}

PUBLISHED = (
    Published(
        "meta-llama/Llama-3.1-8B-Instruct",
        "llama",
        (4096, 14336, 32, 32, 8, 128256, 131072),
        _llama3_rope(),
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
         "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat", "meta-llama/Llama-3.2-1B-Instruct"),
    ),
    Published(
        "meta-llama/Llama-3.3-70B-Instruct", "llama", (8192, 28672, 80, 64, 8, 128256, 131072), _llama3_rope(),
        ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3",
         "meta-llama/Llama-3.2-1B-Instruct"),
    ),
    Published(
        "Qwen/Qwen2.5-7B-Instruct", "qwen2", (3584, 18944, 28, 28, 4, 152064, 32768), {"rope_theta": 1e6},
        ("Qwen/Qwen2.5-0.5B-Instruct",),
    ),
    Published(
        "Qwen/Qwen3-8B", "qwen3", (4096, 12288, 36, 32, 8, 151936, 40960), QWEN3,
        ("RedHatAI/Qwen3-8B-speculator.eagle3", "z-lab/Qwen3-8B-DFlash-b16", "deepseek-ai/dspark_qwen3_8b_block7",
         "Qwen/Qwen3-0.6B"),
    ),
    Published(
        "Qwen/Qwen3-32B", "qwen3", (5120, 25600, 64, 64, 8, 151936, 40960), QWEN3,
        ("RedHatAI/Qwen3-32B-speculator.eagle3", "Qwen/Qwen3-0.6B"),
    ),
    Published(
        "Qwen/Qwen3-30B-A3B", "qwen3_moe", (2048, 6144, 48, 32, 4, 151936, 40960), QWEN3_MOE, ("Qwen/Qwen3-0.6B",),
    ),
    Published(
        "Qwen/Qwen3-VL-8B-Instruct", "qwen3_vl", (4096, 12288, 36, 32, 8, 151936, 262144),
        {**QWEN3, "rope_theta": 5e6, **MROPE}, inside="qwen3_vl_text",
    ),
    Published(
        "Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe", (2048, 6144, 48, 32, 4, 151936, 262144),
        {**QWEN3_MOE, "rope_theta": 5e6, **MROPE}, inside="qwen3_vl_moe_text",
    ),
    Published(
        "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_5_vl", (3584, 18944, 28, 28, 4, 152064, 128000),
        {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rms_norm_eps": 1e-6,
         "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28, "vision_config": {}},
    ),
    Published(
        "Qwen/Qwen3.6-27B", "qwen3_5", (5120, 17408, 64, 24, 4, 248320, 262144),
        {**QWEN35, "linear_num_value_heads": 48}, ("mtp",), "qwen3_5_text",
    ),
    Published(
        "Qwen/Qwen3.6-35B-A3B", "qwen3_5_moe", (2048, 1, 40, 16, 2, 248320, 262144), QWEN35_MOE, ("mtp",),
        "qwen3_5_moe_text",
    ),
    Published(
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral3", (5120, 32768, 40, 32, 8, 131072, 131072),
        {**HEADS_OF_128, "rope_theta": 1e9, "sliding_window": None}, inside="mistral",
    ),
    Published(
        "mistralai/Ministral-3-8B-Instruct-2512", "mistral3", (4096, 14336, 34, 32, 8, 131072, 262144),
        MINISTRAL, inside="ministral3",
    ),
    Published(
        "mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral", (4096, 14336, 32, 32, 8, 32000, 32768),
        {"rope_theta": 1e6, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2,
         "router_aux_loss_coef": 0.02},
    ),
    Published(
        "microsoft/phi-4", "phi3", (5120, 17920, 40, 40, 10, 100352, 16384),
        {"rope_theta": 250000.0, "rope_scaling": None, "original_max_position_embeddings": 16384, "embd_pdrop": 0.0,
         "resid_pdrop": 0.0, "sliding_window": None, "attention_bias": False},
    ),
    Published(
        "microsoft/Phi-4-mini-instruct", "phi3", (3072, 8192, 32, 24, 8, 200064, 131072),
        {"rope_theta": 10000.0, "rope_scaling": {"type": "longrope", **dict.fromkeys(LONGROPE, [1.0] * 48)},
         "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "sliding_window": 262144,
         "attention_bias": False, "mlp_bias": False, "lm_head_bias": False, "full_attn_mod": 1,
         "interpolate_factor": 1, "tie_word_embeddings": True},
    ),
    Published(
        "zai-org/GLM-4-9B-0414", "glm4", (4096, 13696, 40, 32, 2, 151552, 32768),
        {**HEADS_OF_128, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    ),
    Published(
        "ibm-granite/granite-3.3-8b-instruct", "granite", (4096, 12800, 40, 32, 8, 49159, 131072),
        {**MULTIPLIERS, "attention_multiplier": 0.0078125, "logits_scaling": 16.0, "rope_theta": 1e7},
    ),
    Published(
        "ibm-granite/granite-4.1-8b", "granite", (4096, 12800, 40, 32, 8, 100352, 131072),
        {**MULTIPLIERS, "attention_multiplier": 0.0078125, "logits_scaling": 16.0, "rope_theta": 1e7},
    ),
    Published(
        "ibm-granite/granite-4.1-3b", "granite", (2560, 8192, 40, 40, 8, 100352, 131072),
        {**MULTIPLIERS, "attention_multiplier": 0.015625, "logits_scaling": 10.0, "rope_theta": 1e7},
    ),
    Published(
        "ibm-granite/granite-4.0-micro", "granitemoehybrid", (2560, 8192, 40, 40, 8, 100352, 131072),
        {**MULTIPLIERS, "attention_multiplier": 0.015625, "logits_scaling": 10.0, "rope_theta": 1e7,
         "layer_types": ["attention"] * 40, "num_local_experts": 0, "shared_intermediate_size": 8192,
         "position_embedding_type": "rope"},
    ),
    Published(
        "JetBrains/Mellum2-12B-A2.5B-Instruct", "mellum", (2304, 7168, 28, 32, 4, 98304, 131072),
        {**MELLUM, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896},
    ),
    Published(
        "ByteDance-Seed/Seed-OSS-36B-Instruct", "seed_oss", (5120, 27648, 64, 80, 8, 155136, 524288),
        {**HEADS_OF_128, "attention_bias": True, "attention_out_bias": False, "residual_dropout": 0.1,
         "mlp_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}},
    ),
    Published(
        "HuggingFaceTB/SmolLM3-3B", "smollm3", (2048, 11008, 36, 16, 4, 128256, 65536),
        {"rope_theta": 5e6, "no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "rms_norm_eps": 1e-6,
         "use_sliding_window": False, "sliding_window": None, "mlp_bias": False},
    ),
    Published(
        "baidu/ERNIE-4.5-0.3B-PT", "ernie4_5", (1024, 3072, 18, 16, 2, 103424, 131072),
        {**HEADS_OF_128, "use_bias": False, "tie_word_embeddings": True, "rope_theta": 500000.0},
    ),
    Published(
        "google/gemma-3-1b-it", "gemma3_text", (1152, 6912, 26, 4, 1, 262144, 32768), {**GEMMA3, "sliding_window": 512}
    ),
    Published(
        "google/gemma-3-4b-it", "gemma3", (2560, 10240, 34, 8, 4, 262208, 131072), GEMMA3_IMAGES, inside="gemma3_text"
    ),
    Published(
        "google/gemma-3-12b-it", "gemma3", (3840, 15360, 48, 16, 8, 262208, 131072), GEMMA3_IMAGES,
        ("google/gemma-3-1b-it",), "gemma3_text",
    ),
    Published(
        "google/gemma-3-27b-it", "gemma3", (5376, 21504, 62, 32, 16, 262208, 131072),
        {**GEMMA3_IMAGES, **HEADS_OF_128, "query_pre_attn_scalar": 168}, ("google/gemma-3-1b-it",), "gemma3_text",
    ),
    Published(
        "google/gemma-4-E2B-it", "gemma4", (1536, 6144, 35, 8, 1, 262144, 131072),
        {**GEMMA4_SMALL, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
         "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7},
        inside="gemma4_text",
    ),
    Published(
        "google/gemma-4-E4B-it", "gemma4", (2560, 10240, 42, 8, 2, 262144, 131072),
        {**GEMMA4_SMALL, "num_kv_shared_layers": 18}, inside="gemma4_text",
    ),
    Published(
        "google/gemma-4-12B-it", "gemma4_unified", (3840, 15360, 48, 16, 8, 262144, 262144),
        {**GEMMA4_LARGE, "num_global_key_value_heads": 1},
        ("deepseek-ai/eagle3_gemma4_12b_ttt7", "deepseek-ai/dflash_gemma4_12b_block7",
         "deepseek-ai/dspark_gemma4_12b_block7"),
        "gemma4_unified_text",
    ),
    Published(
        "google/gemma-4-26B-A4B-it", "gemma4", (2816, 2112, 30, 16, 8, 262144, 262144),
        {**GEMMA4_LARGE, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
         "top_k_experts": 8, "moe_intermediate_size": 704},
        ("RedHatAI/gemma-4-26B-A4B-it-speculator.eagle3",), "gemma4_text",
    ),
    Published(
        "google/gemma-4-31B-it", "gemma4", (5376, 21504, 60, 32, 16, 262144, 262144),
        {**GEMMA4_LARGE, "num_global_key_value_heads": 4},
        ("RedHatAI/gemma-4-31B-it-speculator.eagle3", "RedHatAI/gemma-4-31B-it-speculator.dflash",
         "RedHatAI/gemma-4-31B-it-speculator.dspark", "google/gemma-4-E2B-it"),
        "gemma4_text",
    ),
    Published(
        "openai/gpt-oss-20b", "gpt_oss", (2880, 2880, 24, 64, 8, 201088, 131072), {**GPT_OSS, "num_local_experts": 32},
        ("RedHatAI/gpt-oss-20b-speculator.eagle3", "z-lab/gpt-oss-20b-DFlash", "amazon/GPT-OSS-20B-P-EAGLE"),
    ),
    Published(
        "openai/gpt-oss-120b", "gpt_oss", (2880, 2880, 36, 64, 8, 201088, 131072),
        {**GPT_OSS, "num_local_experts": 128},
        ("nvidia/gpt-oss-120b-Eagle3-v3", "lmsys/EAGLE3-gpt-oss-120b-bf16", "RedHatAI/gpt-oss-120b-speculator.eagle3",
         "z-lab/gpt-oss-120b-DFlash", "amazon/gpt-oss-120b-p-eagle"),
    ),
)  # fmt: skip
