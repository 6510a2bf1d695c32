"""This example adds a family unlike Llama: norms on both sides, 1 + w norm weights, softcaps, scales, a GELU gate.

It is Gemma 2, written anew in place of lowlat's own. The reference executor runs it, and it lowers to kernels.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Pair
from parity import check_parity

from lowlat.checkpoint.fields import Fields
from lowlat.checkpoint.recipes import Recipe
from lowlat.models.families import FAMILIES, Family
from lowlat.models.families.dense import decoder_recipes, parse_sizes, plus_one_norm
from lowlat.models.families.known_keys import HARMLESS_KEYS
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import parse_rope
from lowlat.models.layer_spec import DenseSpec, LayerSpec
from lowlat.models.layers import TORCH_DTYPES

NORMS = {"attn_norm": "input_layernorm", "post_attn_norm": "post_attention_layernorm"}
NORMS |= {"ffn_norm": "pre_feedforward_layernorm", "post_ffn_norm": "post_feedforward_layernorm"}
SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 4, "sliding_window": 24}
SIZES |= {"query_pre_attn_scalar": 48, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Map config.json to a ModelConfig; softcaps and scales are fields of its specs."""
    for key in ("hidden_act", "hidden_activation"):
        fields.refuse_unless(key, ("gelu_pytorch_tanh",), "only GELU's tanh formula")
    sizes = parse_sizes(fields)
    mixer = sizes.attention(
        parse_rope(fields, max_position=sizes.max_position),
        scale=fields.number("query_pre_attn_scalar", 1, 1 << 20) ** -0.5,
        softcap=fields.optional_number("attn_logit_softcapping", 1e-3, 1e6),
    )
    windows = {"sliding_attention": fields.integer("sliding_window", 1, 1 << 20), "full_attention": None}
    kinds = fields.optional_strings("layer_types", max_count=sizes.num_layers) or ()
    ffn = DenseSpec(inner_size=sizes.intermediate_size, activation="gelu_tanh")
    config = ModelConfig(
        family="gemma2",
        **sizes.model(),
        max_position=sizes.max_position,
        layers=tuple(LayerSpec(mixer=replace(mixer, window=windows[each]), ffn=ffn, sandwich=True) for each in kinds),
        tie_embeddings=fields.boolean("tie_word_embeddings", True),
        dtype=dtype,
        embedding_scale=torch.tensor(sizes.hidden_size**0.5, dtype=TORCH_DTYPES[dtype]).item(),
        logit_softcap=fields.optional_number("final_logit_softcapping", 1e-3, 1e6),
    )
    for key in ("attention_bias", "use_bidirectional_attention"):
        fields.refuse_unless(key, (False,), "causal attention without biases")
    fields.refuse_unknown(HARMLESS_KEYS)
    return config


def recipes(config: ModelConfig) -> list[Recipe]:
    """Return the plain decoder's recipes, with norms of other names, to whose weights 1 is added."""
    norms = {"norm": "model.norm"}
    for layer in range(config.num_layers):
        norms |= {f"layers.{layer}.{own}": f"model.layers.{layer}.{stored}" for own, stored in NORMS.items()}
    plain = [recipe for recipe in decoder_recipes(config) if not recipe.weight.endswith("norm.weight")]
    made = [plus_one_norm(f"{own}.weight", f"{stored}.weight", config.hidden_size) for own, stored in norms.items()]
    return plain + made


FAMILY = Family(parse, recipes)


def test_the_reference_agrees_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    monkeypatch.setitem(FAMILIES, "gemma2", FAMILY)
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, attn_implementation="eager")).float().eval()
    for name, weight in model.named_parameters():
        weight.data = torch.randn_like(weight) * (0.02 if "embed" in name else 0.3)
    model.save_pretrained(tmp_path)
    prompt = torch.randint(0, 97, (71,)).tolist()
    tokens = check_parity(tmp_path, model, prompt, 24, device="cpu", dtype="float32", max_context=128)
    assert len(set(tokens)) > 3

    assert all(group.calls for group in Pair(tmp_path).lower(depth=0, batch=1).groups)
