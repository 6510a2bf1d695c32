"""This module reads the common parts of all families' config.json: RoPE, windows, dtype, special tokens.

It follows the conventions of transformers 4 and 5. Each family reads its own keys.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.foreign import foreign_directory, foreign_files
from lowlat.checkpoint.json_file import read_object
from lowlat.checkpoint.tensors import QUANTISATION_FILE, Checkpoint
from lowlat.errors import ConfigError
from lowlat.models.geometry import ComputeDtype
from lowlat.models.layer_spec import RopeConfig

__all__ = [
    "FULL",
    "IMAGE_POSITIONS",
    "MAX_VOCABULARY",
    "SLIDING",
    "check_architecture",
    "check_head_counts",
    "dtype_error",
    "is_quantised",
    "layer_kinds",
    "layer_windows",
    "max_positions",
    "parse_rope",
    "parse_ropes",
    "partial_rotary_dims",
    "read_config",
    "resolve_dtype",
    "sliding_kinds",
    "special_tokens",
    "stored_dtype",
]

MAX_VOCABULARY = 1 << 24
SLIDING, FULL = "sliding_attention", "full_attention"  # entries of layer_types
MAX_EOS_TOKENS = 64

WRAPPERS = (
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "mistral3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)  # vision-language models whose text runs here
OUTER_KEYS = ("model_type", "architectures", "tie_word_embeddings")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
LONGROPE = ("longrope", "su")  # the second name is that of Phi-3's first files
IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")  # keys about positions of images, without effect on text
DTYPES = ("auto", "bfloat16", "float32")


def read_config(directory: Path) -> Fields:
    """Read a directory's config.json. Raises ConfigError when the directory or the file is missing or malformed."""
    if directory.is_file() and (why := foreign_files([directory.name])) is not None:
        raise ConfigError(f"{directory}: {why}")
    if directory.is_file():
        raise ConfigError(
            f"{directory}: is a file; expected a Hugging Face model directory, or ORG/NAME of a repository"
        )
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such directory; expected a Hugging Face model directory, or ORG/NAME of a repository"
        )
    path = directory / "config.json"
    if not path.exists() and (why := foreign_directory(directory)) is not None:
        raise ConfigError(f"{directory}: no config.json: {why}")
    # unsupported families' configs may hold Infinity, and errors must still name their model_type; each read checks
    # its number
    return Fields(_of_text(read_object(path, take_infinity=True)), str(path))


def _of_text(values: dict[str, Any]) -> dict[str, Any]:
    """Merge a vision-language model's `text_config` into the outer config; other configs stay as they are.

    The inner value of a key takes precedence, except for OUTER_KEYS such as model_type.
    """
    inner = values.get("text_config")
    if values.get("model_type") not in WRAPPERS or not isinstance(inner, dict):
        return values
    outer = {key: value for key, value in values.items() if key != "text_config" and value is not None}
    return {**outer, **inner, **{key: outer[key] for key in OUTER_KEYS if key in outer}}


def check_architecture(fields: Fields, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError for an architecture that is not implemented."""
    names = fields.optional_strings("architectures", max_count=16) or ()
    for name in names:
        if name not in allowed:
            raise ConfigError(
                f"{fields.label}: architecture {name!r} is not implemented; implemented: {', '.join(allowed)}"
            )


def check_head_counts(fields: Fields, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ConfigError for head counts that do not divide, and for head sizes that RoPE cannot halve."""
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{fields.label}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim % 2:
        raise ConfigError(f"{fields.label}: head_dim must be even, found {head_dim}")


def layer_windows(
    fields: Fields, *, off_by_default: bool = False, default: int | None = None, default_first: int | None = None
) -> tuple[int | None, ...]:
    """Read the sliding window of each layer, its own row included; None: full attention.

    off_by_default  whether a size without use_sliding_window has no effect (Qwen2, Qwen3)
    default         the window of a config without the key (Mistral)
    default_first   the first layer with a window if max_window_layers is missing; None: that key has no effect
    If layer_types names sliding layers, it decides which layers have a window. Raises ConfigError.
    """
    uses, count = fields.optional_boolean("use_sliding_window"), fields.integer("num_hidden_layers", 1, 1 << 20)
    window = fields.optional_integer("sliding_window", 0, 1 << 30)
    if "sliding_window" not in fields.values:
        window = default
    kinds = sliding_kinds(fields, count)
    if SLIDING in kinds:
        has_window = [kind == SLIDING for kind in kinds]
    elif off_by_default:
        first = fields.integer("max_window_layers", 0, 1 << 20, default=default_first) if default_first else 0
        some = bool(uses) and window is not None and not kinds
        has_window = [some and layer >= first for layer in range(count)]
    else:
        has_window = [bool(uses) or (window is not None and uses is None)] * count
    if any(has_window) and not window:
        raise fields.error("sliding_window", "an integer from 1 where layers have a window")
    return tuple(window if each else None for each in has_window)


def sliding_kinds(fields: Fields, count: int) -> tuple[str, ...]:
    """Read the entries of layer_types, each FULL or SLIDING; () without the key. Raises ConfigError."""
    kinds = fields.optional_strings("layer_types", max_count=4096) or ()
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ConfigError(f"{fields.label}: layer_types entry {kind!r} is not implemented for this family")
    if kinds and len(kinds) != count:
        raise ConfigError(f"{fields.label}: layer_types has {len(kinds)} entries, expected {count}, one a layer")
    return kinds


def layer_kinds(fields: Fields, count: int, interval: int) -> tuple[str, ...]:
    """The kind of each layer, FULL or SLIDING: by layer_types, else FULL in the last of every `interval` layers."""
    named = sliding_kinds(fields, count)
    return named or tuple(SLIDING if (layer + 1) % interval else FULL for layer in range(count))


def is_quantised(fields: Fields, directory: Path) -> bool:
    """Whether a config, or ModelOpt's file in its directory, states that weights are quantised."""
    named = any(fields.values.get(key) for key in ("quantization_config", "compression_config"))
    return named or (directory / QUANTISATION_FILE).exists()


def stored_dtype(fields: Fields, checkpoint: Path) -> tuple[str, str]:
    """Return the dtype that the config names, else that of the largest stored tensor, and the source for messages."""
    named = fields.optional_string("dtype") or fields.optional_string("torch_dtype")
    name, source = Checkpoint.open(checkpoint).main_dtype() if named is None else (named, fields.label)
    return name.removeprefix("torch."), source


def resolve_dtype(fields: Fields, requested: str, checkpoint: Path) -> ComputeDtype:
    """Choose the compute dtype: the requested one, else the config's, else that of the stored weights.

    If a float16 model is quantised, it runs in bfloat16, since quantised weights do not depend on the compute dtype.
    Raises ConfigError, which names the dtype option, for plain float16 weights, which bfloat16 would round, and for
    other dtypes in which lowlat does not compute.
    """
    if requested not in DTYPES:
        raise ConfigError(f"dtype must be 'auto', 'bfloat16' or 'float32', got {requested!r}")
    for key in ("dtype", "torch_dtype"):
        fields.optional_string(key)
    if requested != "auto":
        return cast(ComputeDtype, requested)
    name, source = stored_dtype(fields, checkpoint)
    if name == "float16" and is_quantised(fields, checkpoint):
        return "bfloat16"
    if name not in DTYPES[1:]:
        raise dtype_error(name, source)
    return cast(ComputeDtype, name)


def dtype_error(name: str, source: str) -> ConfigError:
    """Make the error for a dtype in which lowlat does not compute."""
    return ConfigError(
        f"{source}: the model is stored in {name!r}, in which lowlat does not compute; choose one with "
        '--dtype bfloat16 or --dtype float32 (dtype="bfloat16", dtype="float32")'
    )


def special_tokens(directory: Path, fields: Fields, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """Read the end-of-sequence ids and the beginning id from generation_config.json, else from config.json."""
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
    fields: Fields,
    *,
    max_position: int,
    default_theta: float = 10000.0,
    absent: dict[str, Any] | None = None,
    partial: bool = False,
    known: Collection[str] = (),
    head_dim: int | None = None,
) -> RopeConfig:
    """Read RoPE from either spelling: rope_theta with rope_scaling, or rope_parameters.

    absent    the parameters of a config without either
    partial   whether heads may be rotated in part, see `partial_rotary_dims`
    known     keys of rope_parameters that the family has read
    head_dim  of targets that may have longrope or dynamic scaling; None: others. Dynamic scaling begins beyond the
              model's positions, so up to there it is plain RoPE
    A base inside rope_parameters overrides one outside, as in transformers. Raises ConfigError for kinds and keys that
    are not implemented.
    Source: transformers modeling_rope_utils; YaRN, arXiv 2309.00071; Llama 3.1.
    """
    rope = _rope_fields(fields, absent or {})
    for place in (fields, rope):
        if partial:
            place.raw("partial_rotary_factor")
        else:
            place.refuse_unless("partial_rotary_factor", (1.0, 1), "RoPE covers whole heads")
    if partial:
        known = (*known, *IMAGE_POSITIONS)
    outer = fields.number("rope_theta", 1.001, 1e15, default=default_theta)
    theta = rope.number("rope_theta", 1.001, 1e15, default=outer)
    kind = rope.optional_string("rope_type")
    older = rope.optional_string("type")
    if kind is not None and older is not None and kind != older:
        raise ConfigError(f"{rope.label}: rope_type {kind!r} and type {older!r} differ")
    kind = kind or older or "default"
    if kind == "mrope" and IMAGE_POSITIONS[0] in known:
        kind = "default"
    kinds = ROPE_KINDS if head_dim is None else (*ROPE_KINDS, "dynamic", *LONGROPE)
    if kind not in kinds:
        raise ConfigError(f"{rope.label}: rope type {kind!r} is not implemented; implemented: {', '.join(kinds)}")
    if kind == "default":
        result = RopeConfig(theta)
    elif kind == "dynamic":
        rope.number("factor", 1e-3, 1e6)
        result = RopeConfig(theta)
    elif kind in LONGROPE:
        dims = partial_rotary_dims(fields, head_dim or 0, default=1.0)
        result = _longrope(fields, rope, theta, max_position, dims // 2)
    elif kind == "linear":
        result = RopeConfig(theta, "linear", factor=rope.number("factor", 1e-3, 1e6))
    elif kind == "llama3":
        result = _llama3(rope, theta, _trained_positions(fields, rope, max_position))
    else:
        result = _yarn(rope, theta, _trained_positions(fields, rope, max_position))
    rope.refuse_unknown(known)
    return result


def parse_ropes(fields: Fields, max_position: int, absent: Mapping[str, dict[str, Any]]) -> dict[str, RopeConfig]:
    """Read the RoPE of each kind of layers from rope_parameters. absent: the default parameters, by kind."""
    given = fields.optional_object("rope_parameters")
    if given is None or not given.values:
        given = Fields(dict(absent), f"{fields.label}: rope_parameters")
    found = {}
    for kind, default in absent.items():
        own = given.optional_object(kind)
        values = default if own is None or not own.values else {"rope_theta": default["rope_theta"], **own.values}
        found[kind] = _rope_of_kind(Fields(values, f"{given.label}: {kind}"), max_position)
    given.refuse_unknown(())
    return found


def _rope_of_kind(rope: Fields, max_position: int) -> RopeConfig:
    if rope.values.get("rope_type") != "proportional":
        return parse_rope(Fields({"rope_parameters": rope.values}, rope.label), max_position=max_position)
    rope.raw("rope_type")
    made = RopeConfig(
        rope.number("rope_theta", 1.001, 1e15),
        "proportional",
        factor=rope.number("factor", 1e-3, 1e6, default=1.0),
        share=rope.number("partial_rotary_factor", 0.0, 1.0, default=1.0),
    )
    rope.refuse_unknown(())
    return made


def partial_rotary_dims(fields: Fields, head_dim: int, *, default: float) -> int:
    """The dimensions of a head that RoPE rotates, by partial_rotary_factor in either object. Raises ConfigError."""
    outer = fields.number("partial_rotary_factor", 0.0, 1.0, default=default)
    rope = _rope_fields(fields, {})
    dims = int(head_dim * rope.number("partial_rotary_factor", 0.0, 1.0, default=outer))
    if dims < 2 or dims % 2:
        raise ConfigError(
            f"{fields.label}: partial_rotary_factor turns {dims} of {head_dim} dimensions; "
            "expected an even number from 2"
        )
    return dims


def _llama3(rope: Fields, theta: float, trained: int) -> RopeConfig:
    low = rope.number("low_freq_factor", 1e-3, 1e6)
    high = rope.number("high_freq_factor", 1e-3, 1e6)
    if not low < high:
        raise ConfigError(f"{rope.label}: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    return RopeConfig(
        theta,
        "llama3",
        factor=rope.number("factor", 1e-3, 1e6),
        original_max_position=trained,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _trained_positions(fields: Fields, rope: Fields, max_position: int) -> int:
    """Read the positions of the training before RoPE was scaled; Phi-3's configs have them outside of RoPE's keys."""
    key = "original_max_position_embeddings"
    outer = fields.optional_integer(key, 1, 1 << 30)
    trained = rope.integer(key, 1, 1 << 30, default=outer or max_position)
    if outer not in (None, trained):
        raise ConfigError(f"{rope.label}: {key} is {trained}, and {outer} next to it")
    return trained


def _longrope(fields: Fields, rope: Fields, theta: float, max_position: int, pairs: int) -> RopeConfig:
    """Read a factor for each rotated pair of a head's dimensions, for contexts up to the trained one, and longer ones.

    The factor of cos and sin depends on the ratio of the model's positions to the trained ones, in both cases.
    """
    trained = _trained_positions(fields, rope, max_position)
    factor = rope.number("factor", 1e-3, 1e6, default=max_position / trained)
    scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0
    short, long = (
        rope.numbers(key, 1e-6, 1e6, count=pairs, what="pair of dimensions that turns")
        for key in ("short_factor", "long_factor")
    )
    return RopeConfig(
        theta,
        "longrope",
        original_max_position=trained,
        attention_factor=rope.number("attention_factor", 1e-3, 1e3, default=scale),
        factors=short,
        long_factors=long,
    )


def max_positions(rope: RopeConfig, stated: int) -> int:
    """The positions of a model: those of its config, or the trained ones times YaRN's factor, if these are more.

    The usual recipe for long contexts adds YaRN to a config without changing max_position_embeddings.
    """
    return max(stated, int(rope.original_max_position * rope.factor)) if rope.kind == "yarn" else stated


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _yarn(rope: Fields, theta: float, trained: int) -> RopeConfig:
    factor = rope.number("factor", 1e-3, 1e6)
    attention_factor = rope.optional_number("attention_factor", 1e-3, 1e3)
    further = rope.optional_number("attn_factor", 1e-3, 1e3)  # vLLM's, multiplied with the one that YaRN's factor gives
    if attention_factor is not None and further is not None:
        raise ConfigError(f"{rope.label}: attention_factor and attn_factor are both given; one of them says the factor")
    mscale = rope.optional_number("mscale", 0.0, 1e3)
    mscale_all = rope.optional_number("mscale_all_dim", 0.0, 1e3)
    if attention_factor is None:
        attention_factor = _mscale(factor, 1.0)
        if mscale and mscale_all:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        attention_factor *= 1.0 if further is None else further
    fast = rope.number("beta_fast", 1e-3, 1e6, default=32.0)
    slow = rope.number("beta_slow", 1e-3, 1e6, default=1.0)
    if fast < slow:
        raise ConfigError(f"{rope.label}: beta_fast {fast:g} must not be below beta_slow {slow:g}")
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_max_position=trained,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.boolean("truncate", True),
        attention_factor=attention_factor,
    )
