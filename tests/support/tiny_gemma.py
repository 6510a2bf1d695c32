"""Fields of small Gemmas: of each published size, what sets its layers apart."""

from typing import Any

__all__ = ["E2B", "E4B", "GEMMAS", "GEMMA_3_27B", "GEMMA_31B", "GEMMA_FIELDS", "MOE"]

GEMMAS = ("gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text")
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW: dict[str, Any] = {"sliding_window": 16, "pad_token_id": None}
GEMMA_31B: dict[str, Any] = {
    **WINDOW,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}
MOE = GEMMA_31B | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
E4B: dict[str, Any] = {
    **WINDOW,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "final_logit_softcapping": 3.0,
}
E2B = E4B | {"use_double_wide_mlp": True, "num_kv_shared_layers": 3}
GEMMA_3_27B: dict[str, Any] = {
    "query_pre_attn_scalar": 12,
    "rope_parameters": {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    },
}
# what a small model of the family has where a test says nothing
GEMMA_FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 48},
    "gemma3_text": {**WINDOW, "layer_types": [SLIDING, SLIDING, FULL]},
    "gemma4_text": GEMMA_31B,
    "gemma4_unified_text": {name: value for name, value in GEMMA_31B.items() if "per_layer" not in name},
}
