"""Common parts of all families' config.json: harmless keys, RoPE in both spellings, dtype, special tokens.

It knows transformers' conventions as of versions 4 and 5 and no family's own keys.
"""

import math
from pathlib import Path
from typing import Any, cast

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.json_file import read_object
from lowlat.checkpoint.tensors import Checkpoint
from lowlat.errors import ConfigError
from lowlat.models.geometry import ComputeDtype, RopeConfig

__all__ = [
    "HARMLESS_KEYS",
    "MAX_VOCABULARY",
    "check_architecture",
    "check_head_counts",
    "parse_rope",
    "read_config",
    "refuse_windows",
    "resolve_dtype",
    "special_tokens",
]

MAX_VOCABULARY = 1 << 24
MAX_EOS_TOKENS = 64

# Keys that describe training, generation defaults or file handling, and never what a forward pass computes.
HARMLESS_KEYS = frozenset(
    """
    architectures attention_dropout attn_implementation bad_words_ids base_model_ep_plan
    base_model_name_or_path base_model_pp_plan base_model_tp_plan begin_suppress_tokens bos_token_id
    chunk_size_feed_forward decoder_start_token_id diversity_penalty do_sample dropout early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing has_no_defaults_at_init id2label
    initial_context_length initializer_range label2id length_penalty max_length max_new_tokens
    max_window_layers min_length min_new_tokens model_type name_or_path no_repeat_ngram_size
    num_beam_groups num_beams num_labels num_return_sequences output_attentions output_hidden_states
    output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef
    sep_token_id suppress_tokens task_specific_params temperature tokenizer_class top_k top_p torchscript
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905  a line a key would be three pages
)

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("auto", "bfloat16", "float32")


def read_config(directory: Path) -> Fields:
    """The directory's config.json. Raises ConfigError when the directory or the file is missing or malformed."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory; expected a Hugging Face model directory, or ORG/NAME of a repository"
        )
    path = directory / "config.json"
    return Fields(read_object(path), str(path))


def check_architecture(fields: Fields, allowed: tuple[str, ...]) -> None:
    """Refuse every architecture that is not implemented, and code that the directory brings along."""
    names = fields.optional_strings("architectures", max_count=16) or ()
    for name in names:
        if name not in allowed:
            raise ConfigError(
                f"{fields.label}: architecture {name!r} is not implemented; implemented: {', '.join(allowed)}"
            )


def check_head_counts(fields: Fields, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Refuse head counts that do not divide, and head sizes that RoPE cannot halve."""
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.label}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"{fields.label}: head_dim must be even, found {head_dim}")


def refuse_windows(fields: Fields, *, off_by_default: bool) -> None:
    """Refuse sliding windows in families that lowlat runs with full attention.

    off_by_default: without use_sliding_window the size alone asks for nothing (Qwen2, Qwen3).
    """
    uses = fields.optional_boolean("use_sliding_window")
    window = fields.optional_integer("sliding_window", 0, 1 << 30)
    if uses or (window and uses is None and not off_by_default):
        raise ConfigError(
            f"{fields.label}: sliding window attention (use_sliding_window {uses}, sliding_window {window}) is not "
            f"implemented for this family"
        )
    kinds = fields.optional_strings("layer_types", max_count=4096) or ()
    for kind in kinds:
        if kind != "full_attention":
            raise ConfigError(f"{fields.label}: layer_types entry {kind!r} is not implemented for this family")


def resolve_dtype(fields: Fields, requested: str, checkpoint: Path) -> ComputeDtype:
    """The compute dtype: the one asked for, else the one the config names, else that of the stored weights.

    Raises ConfigError for float16 and other dtypes that lowlat does not compute in, naming the dtype option.
    """
    stored = fields.optional_string("dtype")
    older = fields.optional_string("torch_dtype")
    if requested not in DTYPES:
        raise ConfigError(f"dtype must be 'auto', 'bfloat16' or 'float32', got {requested!r}")
    if requested != "auto":
        return cast(ComputeDtype, requested)
    name, source = stored or older, fields.label
    if name is None:
        name, source = Checkpoint.open(checkpoint).main_dtype()
    name = name.removeprefix("torch.")
    if name not in DTYPES[1:]:
        raise ConfigError(
            f"{source}: the model is stored in {name!r}, in which lowlat does not compute; choose one with "
            f'dtype="bfloat16" or dtype="float32"'
        )
    return cast(ComputeDtype, name)


def special_tokens(directory: Path, fields: Fields, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """End-of-sequence ids and the beginning id: generation_config.json's, else config.json's."""
    sources = [fields]
    path = directory / "generation_config.json"
    if path.exists():
        sources.insert(0, Fields(read_object(path), str(path)))
    ends: tuple[int, ...] = ()
    begin: int | None = None
    for source in sources:
        ends = ends or _token_ids(source, "eos_token_id", vocab_size)
        found = _token_ids(source, "bos_token_id", vocab_size)
        begin = found[0] if begin is None and found else begin
    return ends, begin


def _token_ids(fields: Fields, key: str, vocab_size: int) -> tuple[int, ...]:
    if isinstance(fields.raw(key), list):
        values = fields.optional_integers(key, 0, vocab_size - 1, max_count=MAX_EOS_TOKENS) or ()
        return tuple(dict.fromkeys(values))
    value = fields.optional_integer(key, 0, vocab_size - 1)
    return () if value is None else (value,)


def _rope_fields(fields: Fields, absent: dict[str, Any]) -> Fields:
    parameters, scaling = fields.optional_object("rope_parameters"), fields.optional_object("rope_scaling")
    if parameters and scaling and parameters.values and scaling.values and parameters.values != scaling.values:
        raise ConfigError(f"{fields.label}: rope_parameters and rope_scaling are both given and differ")
    for found in (parameters, scaling):
        if found is not None and found.values:
            return found
    return Fields(absent, f"{fields.label}: rope_parameters")


def parse_rope(
    fields: Fields, *, max_position: int, default_theta: float = 10000.0, absent: dict[str, Any] | None = None
) -> RopeConfig:
    """RoPE from either spelling: rope_theta with rope_scaling, or rope_parameters.

    absent is what a config without either means. A base inside rope_parameters wins over one beside it, as in
    transformers. Raises ConfigError for kinds and keys that are not implemented.
    Source: transformers modeling_rope_utils; YaRN, arXiv 2309.00071; Llama 3.1.
    """
    rope = _rope_fields(fields, absent or {})
    for place in (fields, rope):
        place.refuse_unless("partial_rotary_factor", (1.0, 1), "RoPE covers whole heads")
    outer = fields.number("rope_theta", 1.001, 1e15, default=default_theta)
    theta = rope.number("rope_theta", 1.001, 1e15, default=outer)
    kind = rope.optional_string("rope_type")
    older = rope.optional_string("type")
    if kind is not None and older is not None and kind != older:
        raise ConfigError(f"{rope.label}: rope_type {kind!r} and type {older!r} differ")
    kind = kind or older or "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(f"{rope.label}: rope type {kind!r} is not implemented; implemented: {', '.join(ROPE_KINDS)}")
    if kind == "default":
        result = RopeConfig(theta)
    elif kind == "linear":
        result = RopeConfig(theta, "linear", factor=rope.number("factor", 1e-3, 1e6))
    elif kind == "llama3":
        result = _llama3(rope, theta, max_position)
    else:
        result = _yarn(rope, theta, max_position)
    rope.refuse_unknown(())
    return result


def _llama3(rope: Fields, theta: float, max_position: int) -> RopeConfig:
    low = rope.number("low_freq_factor", 1e-3, 1e6)
    high = rope.number("high_freq_factor", 1e-3, 1e6)
    if not low < high:
        raise ConfigError(f"{rope.label}: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    return RopeConfig(
        theta,
        "llama3",
        factor=rope.number("factor", 1e-3, 1e6),
        original_max_position=rope.integer("original_max_position_embeddings", 1, 1 << 30, default=max_position),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(rope: Fields, theta: float, max_position: int) -> RopeConfig:
    factor = rope.number("factor", 1e-3, 1e6)
    attention_factor = rope.optional_number("attention_factor", 1e-3, 1e3)
    mscale = rope.optional_number("mscale", 0.0, 1e3)
    mscale_all = rope.optional_number("mscale_all_dim", 0.0, 1e3)
    if attention_factor is None:
        attention_factor = _mscale(factor, 1.0)
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
    fast = rope.number("beta_fast", 1e-3, 1e6, default=32.0)
    slow = rope.number("beta_slow", 1e-3, 1e6, default=1.0)
    if fast < slow:
        raise ConfigError(f"{rope.label}: beta_fast {fast:g} must not be below beta_slow {slow:g}")
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position=rope.integer("original_max_position_embeddings", 1, 1 << 30, default=max_position),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.boolean("truncate", True),
        attention_factor=attention_factor,
    )
