"""Common parts of the Gemma families: keys with one meaning, and the recipes of a layer.

Layers have norms on both sides and a GELU gate; embeddings are multiplied by the root of their width; the LM head is
the embedding. Each family's own keys are in its own module.
"""

from pathlib import Path
from typing import Any

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.formats import read_quantisation
from lowlat.checkpoint.recipes import Piece, Recipe
from lowlat.models.families.dense import Sizes, dense_recipes, outer_recipes, plus_one_norm
from lowlat.models.families.known_keys import HARMLESS_KEYS, check_settled
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import special_tokens
from lowlat.models.layer_spec import LayerSpec
from lowlat.models.layers import TORCH_DTYPES, rounded_scale

__all__ = [
    "HARMLESS",
    "gemma_config",
    "gemma_recipes",
    "refuse_others",
    "with_defaults",
]

NORMS = {
    "attn_norm": "input_layernorm",
    "post_attn_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262144,
}
# keys of tokens for images and sounds, of the models that encode these, and of other programs' caches
HARMLESS = HARMLESS_KEYS | {
    *("vision_config", "audio_config", "mm_tokens_per_image", "cache_implementation", "vision_soft_tokens_per_image"),
    *(
        f"{name}_token_{key}"
        for name in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")
        for key in ("id", "index")
    ),
}


def with_defaults(fields: Fields, **others: Any) -> Fields:
    """Fill a config's missing sizes with the defaults of the family's classes; others: those unlike Gemma 4's."""
    return fields.with_defaults({**DEFAULTS, **others})


def refuse_others(fields: Fields, *, qk_norm: bool, bidirectional: tuple[Any, ...] = (False,)) -> None:
    """Refuse, by name, keys that ask for another forward pass. bidirectional: values with which text stays causal."""
    check_settled(fields, qk_norm=qk_norm)
    for key in ("hidden_act", "hidden_activation"):
        fields.refuse_unless(key, ("gelu_pytorch_tanh",), "only GELU's tanh formula")
    fields.refuse_unless("attention_bias", (False,), "attention without biases")
    fields.refuse_unless("use_bidirectional_attention", bidirectional, "each token sees those before it alone")


def gemma_config(
    fields: Fields,
    directory: Path,
    dtype: ComputeDtype,
    sizes: Sizes,
    layers: tuple[LayerSpec, ...],
    **default_softcap: float,
) -> ModelConfig:
    """Make the geometry of these layers. The family's own keys must have been read before: other keys are refused.

    default_softcap  `default`: the logits' softcap of a config without the key; left out: none
    """
    quantisation = read_quantisation(fields, directory)
    ends, begin = special_tokens(directory, fields, sizes.vocab_size)
    named = "final_logit_softcapping" in fields.values
    softcap = fields.optional_number("final_logit_softcapping", 1e-3, 1e6)
    config = ModelConfig(
        family=str(fields.values["model_type"]),
        **sizes.model(),
        max_position=sizes.max_position,
        layers=layers,
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        dtype=dtype,
        embedding_scale=rounded_scale(sizes.hidden_size**0.5, dtype),
        logit_softcap=softcap if named else default_softcap.get("default"),
        eos_token_ids=ends,
        bos_token_id=begin,
        quantisation=quantisation,
    )
    fields.refuse_unknown(HARMLESS)
    return config


def norm_recipe(config: ModelConfig, weight: str, tensor: str, size: int, *, plus_one: bool) -> Recipe:
    """The recipe of a norm's weight: as it is stored, or 1 more."""
    if plus_one:
        return plus_one_norm(weight, tensor, size)
    return Recipe(weight, (Piece(tensor, (size,)),), TORCH_DTYPES[config.dtype])


def gemma_recipes(config: ModelConfig, *, plus_one: bool) -> list[Recipe]:
    """The recipes of embedding, norms, attention and dense FFNs. plus_one: norms multiply by 1 + the stored weight."""
    dtype, hidden = TORCH_DTYPES[config.dtype], config.hidden_size
    made = [recipe for recipe in outer_recipes(config) if recipe.weight != "norm.weight"]
    made.append(norm_recipe(config, "norm.weight", "model.norm.weight", hidden, plus_one=plus_one))
    for layer, spec in config.attentions.items():
        of, canonical = f"model.layers.{layer}", f"layers.{layer}"
        rows = {"q": spec.query_size, "k": spec.kv_size, "v": spec.kv_size}
        pieces = tuple(Piece(f"{of}.self_attn.{part}_proj.weight", (rows[part], hidden)) for part in spec.projected)
        output = Piece(f"{of}.self_attn.o_proj.weight", (hidden, spec.query_size))
        norms = {f"{own}.weight": (f"{name}.weight", hidden) for own, name in NORMS.items()}
        if spec.qk_norm:
            norms |= {
                f"{part}_norm.weight": (f"self_attn.{part}_norm.weight", spec.head_dim)
                for part in spec.projected.replace("v", "")
            }
        made += [
            norm_recipe(config, f"{canonical}.{own}", f"{of}.{name}", size, plus_one=plus_one)
            for own, (name, size) in norms.items()
        ]
        made.append(Recipe(f"{canonical}.{spec.projected}.weight", pieces, dtype))
        made.append(Recipe(f"{canonical}.o.weight", (output,), dtype))
        made += dense_recipes(config, layer)
    return made
