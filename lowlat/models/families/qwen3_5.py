"""Qwen3.5, 3.6 and 3.8, dense and MoE, and Qwen3-Next: hybrids of gated delta nets and gated attention.

Norms multiply by 1 + w, but for those of delta nets. Files of vision-language models hold the same decoder under
another name; what sees images is skipped, and so are MTP layers, which are a draft model's.
Source: transformers models/qwen3_5, qwen3_5_moe, qwen3_next.
"""

from dataclasses import replace
from pathlib import Path

import torch

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats import Quantisation, read_quantisation
from lowlat.checkpoint.recipes import Piece, Recipe, picked_piece, reshaped_piece
from lowlat.errors import ConfigError
from lowlat.models.families.dense import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_WIDTH,
    dense_recipes,
    outer_recipes,
    parse_sizes,
    plus_one_norm,
)
from lowlat.models.families.known_keys import HARMLESS_KEYS, check_settled
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import (
    check_architecture,
    max_positions,
    parse_rope,
    partial_rotary_dims,
    special_tokens,
)
from lowlat.models.layer_spec import AttentionSpec, DeltaSpec, DenseSpec, ExpertsSpec, LayerSpec, Mixer
from lowlat.models.layers import TORCH_DTYPES

__all__ = ["SKIPPED", "WRAPPED", "parse", "recipes"]

ARCHITECTURES = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
    "qwen3_next": ("Qwen3NextForCausalLM",),
}
NEXT = "qwen3_next"
WRAPPED = ("qwen3_5", "qwen3_5_moe")  # their config and tensors are part of a vision-language model's
SKIPPED = ("model.visual.", "mtp.")
LAYER_KINDS = ("linear_attention", "full_attention")
# keys of tokens for images, of the vision model, and of MTP layers
HARMLESS = frozenset(
    {
        *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
        *("language_model_only", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "num_nextn_predict_layers"),
    }
)
Span = tuple[int, int]


def _refuse(fields: Fields) -> None:
    """Refuse, by name, keys that ask for another forward pass."""
    check_settled(fields, qk_norm=True, shared_expert=True)
    fields.refuse_unless("hidden_act", ("silu",), "only the SiLU gate")
    fields.refuse_unless("output_gate_type", ("swish", "silu"), "delta nets whose gate is a SiLU")
    fields.refuse_unless("mamba_ssm_dtype", ("float32",), "states in float32")
    fields.refuse_unless("qkv_bias", (False,), "biases by attention_bias")
    gate = fields.raw("attn_output_gate")
    if "attn_output_gate" in fields.values and gate is not True:
        raise fields.error("attn_output_gate", "true: attention has an output gate")


def _delta(fields: Fields) -> DeltaSpec:
    keys = fields.integer("linear_num_key_heads", 1, MAX_HEADS, default=16)
    values = fields.integer("linear_num_value_heads", 1, MAX_HEADS, default=32)
    if values % keys:
        raise ConfigError(
            f"{fields.label}: linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}"
        )
    return DeltaSpec(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_HEAD_DIM, default=128),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_HEAD_DIM, default=128),
        conv_size=fields.integer("linear_conv_kernel_dim", 2, 16, default=4),
    )


def _kinds(fields: Fields, count: int) -> tuple[str, ...]:
    """The kind of each layer: by layer_types, else each interval's last layer has full attention."""
    kinds = fields.optional_strings("layer_types", max_count=count)
    interval = fields.integer("full_attention_interval", 1, 1 << 20, default=4)
    if kinds is None:
        return tuple(LAYER_KINDS[(layer + 1) % interval == 0] for layer in range(count))
    if len(kinds) != count:
        raise ConfigError(f"{fields.label}: layer_types has {len(kinds)} entries, expected {count}, one a layer")
    for kind in kinds:
        if kind not in LAYER_KINDS:
            raise ConfigError(f"{fields.label}: layer_types entry {kind!r} is not implemented for this family")
    if LAYER_KINDS[1] not in kinds:
        raise ConfigError(f"{fields.label}: layer_types names no layer with full_attention; one at least is needed")
    return kinds


def _has_experts(fields: Fields, family: str, count: int) -> tuple[bool, ...]:
    """Whether each layer is MoE. Only Qwen3-Next's configs may mix dense and MoE layers."""
    if family not in (NEXT, "qwen3_5_moe", "qwen3_5_moe_text"):
        return (False,) * count
    step = fields.integer("decoder_sparse_step", 1, 1 << 20, default=1)
    dense = fields.optional_integers("mlp_only_layers", 0, 1 << 20, max_count=1 << 12) or ()
    if family != NEXT and (step != 1 or dense):
        raise ConfigError(
            f"{fields.label}: layers without experts (decoder_sparse_step {step}, mlp_only_layers {list(dense)}) "
            "are not implemented for this family"
        )
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(count))


def _experts(fields: Fields, family: str) -> ExpertsSpec:
    count = fields.integer("num_experts", 1, MAX_EXPERTS, default=512 if family == NEXT else 256)
    if family != NEXT:
        fields.refuse_unless("norm_topk_prob", (True,), "shares that sum to 1")
    shared = fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH, default=512)
    return ExpertsSpec(
        inner_size=fields.integer("moe_intermediate_size", 1, MAX_WIDTH, default=512),
        num_experts=count,
        num_experts_per_token=fields.integer("num_experts_per_tok", 1, count, default=10 if family == NEXT else 8),
        shares_of_all=family == NEXT and not fields.boolean("norm_topk_prob", True),
        shared_ffn=DenseSpec(inner_size=shared),
    )


def _settled_experts(experts: ExpertsSpec, quantisation: Quantisation | None, mlp: str) -> ExpertsSpec:
    """Join the shared expert with the experts if it has their size and storage format."""
    shared = experts.shared_ffn
    alike = shared is not None and shared.inner_size == experts.inner_size
    if quantisation is not None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            one, other = (quantisation.stored(f"{mlp}.{of}.{part}") for of in ("experts.0", "shared_expert"))
            alike = alike and one == other
    if not alike:
        return experts
    return replace(experts, shared=True, shared_ffn=None)


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Read the geometry of a hybrid. Raises ConfigError for features that lowlat does not implement."""
    family = fields.optional_string("model_type") or NEXT
    check_architecture(fields, ARCHITECTURES[family])
    _refuse(fields)
    quantisation = read_quantisation(fields, directory)
    sizes = parse_sizes(fields, default_head_dim=256, default_inner_size=1)
    ends, begin = special_tokens(directory, fields, sizes.vocab_size)
    rope = parse_rope(fields, max_position=sizes.max_position, partial=True)
    rotary = partial_rotary_dims(fields, sizes.head_dim, default=0.25)
    biased = fields.boolean("attention_bias", False)
    mixers: dict[str, Mixer] = {
        LAYER_KINDS[0]: _delta(fields),
        LAYER_KINDS[1]: sizes.attention(
            rope, qkv_bias=biased, output_bias=biased, qk_norm=True, gated=True, rotary_dims=rotary
        ),
    }
    has_experts = _has_experts(fields, family, sizes.num_layers)
    experts = _experts(fields, family) if any(has_experts) else None
    if not all(has_experts):
        fields.integer("intermediate_size", 1, MAX_WIDTH)
    stem = "model.language_model" if family in WRAPPED else "model"
    layers = tuple(
        LayerSpec(
            mixer=mixers[kind],
            ffn=_settled_experts(experts, quantisation, f"{stem}.layers.{layer}.mlp")
            if moe and experts is not None
            else DenseSpec(inner_size=sizes.intermediate_size),
        )
        for layer, (kind, moe) in enumerate(zip(_kinds(fields, sizes.num_layers), has_experts, strict=True))
    )
    config = ModelConfig(
        family=family,
        **sizes.model(),
        max_position=max_positions(rope, sizes.max_position),
        layers=layers,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=dtype,
        eos_token_ids=ends,
        bos_token_id=begin,
        quantisation=quantisation,
    )
    fields.refuse_unknown(HARMLESS_KEYS | HARMLESS)
    return config


def _attention_recipes(config: ModelConfig, layer: int, spec: AttentionSpec) -> list[Recipe]:
    """The recipes of gated attention's projections; files store queries and gates in one matrix, by head."""
    dtype, hidden, size = TORCH_DTYPES[config.dtype], config.hidden_size, spec.head_dim
    of, canonical = f"model.layers.{layer}.self_attn", f"layers.{layer}"

    def halves(first: int, part: str, *columns: int) -> Piece:
        spans = tuple((2 * head * size + first, 2 * head * size + first + size) for head in range(spec.num_heads))
        return picked_piece(Piece(f"{of}.q_proj.{part}", (2 * spec.query_size, *columns)), spans)

    def projections(part: str, *columns: int) -> list[Recipe]:
        """The recipes of queries, keys and values, and of gates: their weights or biases."""
        keys = tuple(Piece(f"{of}.{letter}_proj.{part}", (spec.kv_size, *columns)) for letter in "kv")
        return [
            Recipe(f"{canonical}.qkv.{part}", (halves(0, part, *columns), *keys), dtype),
            Recipe(f"{canonical}.gate.{part}", (halves(size, part, *columns),), dtype),
        ]

    return [
        *projections("weight", hidden),
        Recipe(f"{canonical}.o.weight", (Piece(f"{of}.o_proj.weight", (hidden, spec.query_size)),), dtype),
        *(projections("bias") if spec.qkv_bias else ()),
        *([Recipe(f"{canonical}.o.bias", (Piece(f"{of}.o_proj.bias", (hidden,)),), dtype)] if spec.output_bias else ()),
        *(plus_one_norm(f"{canonical}.{part}_norm.weight", f"{of}.{part}_norm.weight", size) for part in "qk"),
    ]


def _grouped(sizes: tuple[int, ...], groups: int) -> tuple[Span, ...]:
    """Spans of rows that files store by group, [groups, sizes..], reordered: those of the first size come first."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    whole = sum(sizes)
    return tuple(
        (group * whole + start, group * whole + start + size)
        for start, size in zip(starts, sizes, strict=True)
        for group in range(groups)
    )


def _projections(config: ModelConfig, of: str, spec: DeltaSpec) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The stored matrices of q, k, v and z, and of b and a."""
    hidden, heads, values = config.hidden_size, spec.num_value_heads, spec.value_size
    if config.family != NEXT:
        big = {"qkv": spec.num_channels, "z": values}
        return tuple(Piece(f"{of}.in_proj_{part}.weight", (rows, hidden)) for part, rows in big.items()), tuple(
            Piece(f"{of}.in_proj_{part}.weight", (heads, hidden)) for part in "ba"
        )
    groups, each = spec.num_key_heads, heads // spec.num_key_heads
    parts = (spec.key_dim, spec.key_dim, each * spec.value_dim, each * spec.value_dim)
    qkvz = Piece(f"{of}.in_proj_qkvz.weight", (spec.num_channels + values, hidden))
    ba = Piece(f"{of}.in_proj_ba.weight", (2 * heads, hidden))
    return (picked_piece(qkvz, _grouped(parts, groups)),), (picked_piece(ba, _grouped((each, each), groups)),)


def _delta_recipes(config: ModelConfig, layer: int, spec: DeltaSpec) -> list[Recipe]:
    dtype, hidden = TORCH_DTYPES[config.dtype], config.hidden_size
    of, canonical = f"model.layers.{layer}.linear_attn", f"layers.{layer}"
    big, small = _projections(config, of, spec)
    taps = (spec.num_channels, 1, spec.conv_size)

    def one(weight: str, piece: Piece, as_dtype: torch.dtype = dtype) -> Recipe:
        return Recipe(f"{canonical}.{weight}.weight", (piece,), as_dtype)

    return [
        Recipe(f"{canonical}.delta_in.weight", big, dtype),
        Recipe(f"{canonical}.delta_ba.weight", small, dtype),
        one("delta_conv", reshaped_piece(f"{of}.conv1d.weight", taps, (taps[0], taps[2]))),
        one("delta_a", Piece(f"{of}.A_log", (spec.num_value_heads,)), torch.float32),
        one("delta_dt", Piece(f"{of}.dt_bias", (spec.num_value_heads,)), torch.float32),
        one("delta_norm", Piece(f"{of}.norm.weight", (spec.value_dim,))),
        one("delta_out", Piece(f"{of}.out_proj.weight", (hidden, spec.value_size))),
    ]


def _expert_recipes(config: ModelConfig, layer: int, experts: ExpertsSpec) -> list[Recipe]:
    """The recipes of router, experts, stored in one tensor or one by one, and the shared expert."""
    dtype, hidden = TORCH_DTYPES[config.dtype], config.hidden_size
    mlp, canonical = f"model.layers.{layer}.mlp", f"layers.{layer}"
    count, inner, own = experts.num_experts, experts.inner_size, experts.shared_ffn
    shapes = {"gate_up": (("gate", "up"), (inner, hidden)), "down": (("down",), (hidden, inner))}
    gate = Piece(f"{mlp}.shared_expert_gate.weight", (1, hidden))

    def pieces(of: str, parts: tuple[str, ...], shape: tuple[int, int]) -> tuple[Piece, ...]:
        return tuple(Piece(f"{mlp}.{of}.{part}_proj.weight", shape) for part in parts)

    made = []
    for weight, (parts, shape) in shapes.items():
        shared = pieces("shared_expert", parts, shape) if experts.shared else ()
        rows = len(parts) * shape[0]
        fused = reshaped_piece(f"{mlp}.experts.{weight}_proj", (count, rows, shape[1]), (count * rows, shape[1]))
        alone = tuple(piece for number in range(count) for piece in pieces(f"experts.{number}", parts, shape))
        name, matrices = f"{canonical}.experts.{weight}.weight", experts.num_matrices
        other = Recipe(name, (*alone, *shared), dtype, count=matrices)
        made.append(Recipe(name, (fused, *shared), dtype, count=matrices, other=other))
    router = (Piece(f"{mlp}.gate.weight", (count, hidden)), *([gate] if experts.shared else []))
    made.append(Recipe(f"{canonical}.router.weight", router, dtype))
    if own is not None:
        ups = pieces("shared_expert", ("gate", "up"), (own.inner_size, hidden))
        downs = pieces("shared_expert", ("down",), (hidden, own.inner_size))
        made += [
            Recipe(f"{canonical}.shared.gate_up.weight", ups, dtype),
            Recipe(f"{canonical}.shared.down.weight", downs, dtype),
            Recipe(f"{canonical}.shared_gate.weight", (gate,), dtype),
        ]
    return made


def recipes(config: ModelConfig) -> list[Recipe]:
    """The recipes of all canonical weights of a hybrid."""
    hidden = config.hidden_size
    made = [recipe for recipe in outer_recipes(config) if recipe.weight != "norm.weight"]
    made.append(plus_one_norm("norm.weight", "model.norm.weight", hidden))
    norms = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    for layer, spec in enumerate(config.layers):
        for weight, name in norms.items():
            made.append(plus_one_norm(f"layers.{layer}.{weight}.weight", f"model.layers.{layer}.{name}.weight", hidden))
        if isinstance(spec.mixer, DeltaSpec):
            made += _delta_recipes(config, layer, spec.mixer)
        else:
            made += _attention_recipes(config, layer, spec.mixer)
        if isinstance(spec.ffn, ExpertsSpec):
            made += _expert_recipes(config, layer, spec.ffn)
        else:
            made += dense_recipes(config, layer)
    return made
