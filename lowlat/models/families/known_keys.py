"""This module lists keys of config.json without effect, and keys of which every family here supports one meaning.

A key in neither list that no family reads is refused if it is on (see `Fields.refuse_unknown`).
"""

from collections.abc import Mapping
from typing import Any

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.json_file import shown
from lowlat.errors import ConfigError

__all__ = ["HARMLESS_KEYS", "IMAGE_KEYS", "check_settled"]

# Keys that describe training, generation defaults or file handling, and never change the forward pass.
# auto_map names code for other loaders. It is never run: the model_type decides the forward pass.
HARMLESS_KEYS = frozenset(
    """
    architectures attention_dropout attn_implementation auto_map bad_words_ids base_model_ep_plan
    base_model_name_or_path base_model_pp_plan base_model_tp_plan begin_suppress_tokens bos_token_id
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dropout early_stopping embd_pdrop
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing has_no_defaults_at_init id2label
    initial_context_length initializer_range is_llama_config label2id length_penalty max_length max_new_tokens
    max_window_layers min_length min_new_tokens model_type name_or_path no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values resid_pdrop residual_dropout repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef router_jitter_noise
    sep_token_id suppress_tokens task_specific_params temperature tokenizer_class top_k top_p torchscript
    transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16
    use_cache
    """.split()  # noqa: SIM905  a line a key would be three pages
)

# Keys of vision-language models about how images become tokens.
IMAGE_KEYS = frozenset(
    {
        *("vision_config", "image_token_id", "image_token_index", "video_token_id", "vision_token_id"),
        *("vision_start_token_id", "vision_end_token_id", "spatial_merge_size", "multimodal_projector_bias"),
        *("projector_hidden_act", "vision_feature_layer"),
    }
)

# Keys that could change the forward pass: the values that every family supports, and their meaning.
SETTLED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "activation": (("swiglu", "silu"), "only the SiLU gate"),
    "rope_interleaved": ((False,), "RoPE that turns the halves of a head against each other"),
    "scale_attn_weights": ((True,), "attention that is scaled"),
    "shared_expert_intermediate_size": ((0,), "experts without a shared one"),
}


def check_settled(fields: Fields, *, qk_norm: bool, shared_expert: bool = False) -> None:
    """Refuse, by name, a key whose value asks for a forward pass that no family here has.

    qk_norm        whether the family norms queries and keys
    shared_expert  whether its MoE layers have a shared expert
    `false` and `null` do not always mean off: of `is_causal` both let each token see those after it. Raises
    ConfigError.
    """
    for key, (allowed, why) in SETTLED.items():
        if not (shared_expert and key.startswith("shared_expert")):
            fields.refuse_unless(key, allowed, why)
    for key in ("use_qk_norm", "qk_norm"):
        kind = "normed" if qk_norm else "not normed"
        fields.refuse_unless(key, (qk_norm,), f"queries and keys that are {kind}, as the family's are")
    causal = fields.raw("is_causal")
    if "is_causal" in fields.values and causal is not True:
        raise ConfigError(
            f"{fields.label}: is_causal = {shown(causal)} is not implemented (each token sees those before it alone); "
            "allowed: True"
        )
