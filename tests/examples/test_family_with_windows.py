"""This example adds a family with sliding windows in some layers: it maps config.json to layer specs, no more.

Its tensors have Llama's names, so the plain decoder's recipes make its weights. Programs, caches and kernels follow
from the specs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Pair

from lowlat import Runtime, SamplingParams
from lowlat.checkpoint.fields import Fields
from lowlat.models.families import FAMILIES, Family
from lowlat.models.families.dense import parse_sizes
from lowlat.models.families.known_keys import HARMLESS_KEYS
from lowlat.models.geometry import ComputeDtype, ModelConfig
from lowlat.models.hf_config import parse_rope
from lowlat.models.layer_spec import DenseSpec, LayerSpec

KINDS = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 64, "num_hidden_layers": 4, "sliding_window": 24}


def parse(fields: Fields, directory: Path, dtype: ComputeDtype) -> ModelConfig:
    """Map config.json to a ModelConfig: each layer is attention, with a window if `layer_types` says so, and an FFN."""
    fields.refuse_unless("hidden_act", ("silu",), "only the SiLU gate")
    sizes = parse_sizes(fields)
    mixer = sizes.attention(parse_rope(fields, max_position=sizes.max_position))
    window = fields.integer("sliding_window", 1, 1 << 20)
    windows = {"sliding_attention": window, "full_attention": None}
    kinds = fields.optional_strings("layer_types", max_count=sizes.num_layers) or ()
    ffn = DenseSpec(inner_size=sizes.intermediate_size)
    config = ModelConfig(
        family="ministral",
        **sizes.model(),
        max_position=sizes.max_position,
        layers=tuple(LayerSpec(mixer=replace(mixer, window=windows[kind]), ffn=ffn) for kind in kinds),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=dtype,
    )
    fields.refuse_unknown(HARMLESS_KEYS)  # a key that was not read might change the forward pass
    return config


FAMILY = Family(parse)


def test_a_family_with_windows_runs_and_lowers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import MinistralConfig, MinistralForCausalLM

    monkeypatch.setitem(FAMILIES, "ministral", FAMILY)
    torch.manual_seed(0)
    model = MinistralForCausalLM(MinistralConfig(**SIZES, layer_types=list(KINDS))).float().eval()
    model.save_pretrained(tmp_path)
    prompt = torch.randint(0, 97, (71,)).tolist()
    with Runtime.load(tmp_path, device="cpu", dtype="float32", max_context=128) as runtime:
        assert runtime.model_config.windows == (24, None, 24, None)
        request = runtime.submit(prompt, SamplingParams(max_tokens=24))
        tokens = [token for _ in range(64) for output in runtime.step() for token in output.token_ids]
        assert runtime.metrics(request) is not None
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    assert len(tokens) == 24 and tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()

    lowered = Pair(tmp_path).lower(depth=0, batch=1)  # for an H200, in bfloat16; lowering needs no GPU
    attention = [op.params["window"] for group in lowered.groups for op in group.ops if op.kind == "attention"]
    assert attention == [24, None, 24, None] and len(lowered.calls) >= 4
