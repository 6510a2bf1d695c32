"""Families of which lowlat has all operations: parity with transformers, and their published configs."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import check_parity
from safetensors.torch import load_file, save_file
from tiny_models import COMMON

from lowlat import Runtime
from lowlat.errors import ConfigError
from lowlat.models.target import load_target, read_model_config

PROMPT, COMPLETION = 71, 8
OPTIONS: dict[str, Any] = {"max_batch": 2, "max_context": 87, "block_size": 8, "prefill_chunk": 32} | {
    "device": "cpu",
    "dtype": "float32",
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 128} | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
SCALED = YARN | {"llama_4_scaling_beta": 0.1, "max_position_embeddings": 2048}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1} | {
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
}
MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
MELLUM = {**MOE, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} | {
    "rope_parameters": {
        "full_attention": {
            **YARN,
            "rope_theta": 500000.0,
            "attention_factor": 1.3,
            "mscale": None,
            "mscale_all_dim": None,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "max_position_embeddings": 2048,
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
GRANITE4 = {"layer_types": ["full_attention"] * COMMON["num_hidden_layers"], "num_local_experts": 0} | {
    "shared_intermediate_size": 40,
    "position_embedding_type": "rope",
    "mamba_n_heads": 4,
}


@dataclass(frozen=True)
class Case:
    """A model of one of transformers' classes; text: the config is inside a vision-language model's."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] | None = None

    def make(self, directory: Path) -> Any:
        """Write a random model; transformers' own of it."""
        import transformers

        config = getattr(transformers, f"{self.name}Config")
        common = COMMON | self.options
        torch.manual_seed(0)
        if self.vision is None:
            model = getattr(transformers, f"{self.name}ForCausalLM")(config(**common))
        else:
            made = config(text_config=common, vision_config=self.vision, tie_word_embeddings=False)
            made._attn_implementation = "eager"
            model = getattr(transformers, f"{self.name}ForConditionalGeneration")(made)
        model = model.float().eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_((3 if "lm_head" in name else 1) * noise / parameter.shape[-1] ** 0.5)
        model.save_pretrained(directory)
        return model


PUBLISHED_GRANITE4 = {"rope_theta": 10000.0, "rope_scaling": None, "normalization_function": "rmsnorm"} | {
    "init_method": "mup",
    "num_experts_per_tok": 0,
    "router_aux_loss_coef": 0.01,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 1,
    "mamba_proj_bias": False,
    "time_step_limit": [0.0, float("inf")],
}

CASES = {
    "ministral3": Case("Ministral3", {"rope_parameters": SCALED, "max_position_embeddings": 2048}),
    "mistral3": Case("Mistral3", {"model_type": "mistral", "sliding_window": None}, PIXTRAL),
    "mistral3-ministral3": Case(
        "Mistral3", {"model_type": "ministral3", "rope_parameters": SCALED, "max_position_embeddings": 2048}, PIXTRAL
    ),
    "mixtral": Case("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mellum": Case("Mellum", MELLUM),
    "mellum-without-windows": Case("Mellum", {**MOE, "norm_topk_prob": False, "num_nextn_predict_layers": 1}),
    "qwen2_5_vl": Case("Qwen2_5_VL", {"model_type": "qwen2_5_vl_text", **MROPE}, VISION),
    "qwen2_vl": Case("Qwen2VL", {"model_type": "qwen2_vl_text", **MROPE}, VISION | {"embed_dim": 16}),
    "qwen3_vl": Case("Qwen3VL", {"model_type": "qwen3_vl_text", **MROPE}, VISION),
    "qwen3_vl_moe": Case("Qwen3VLMoe", {"model_type": "qwen3_vl_moe_text", **MROPE, **MOE}, VISION),
    "phi3": Case("Phi3", {"pad_token_id": 0}),
    "phi3-partial": Case("Phi3", {"pad_token_id": 0, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 4.0]}, "original_max_position_embeddings": 64}),
    "glm": Case("Glm", {"pad_token_id": 0, "eos_token_id": 96}),
    "glm4": Case("Glm4", {"pad_token_id": 0, "eos_token_id": 96}),
    "granite": Case("Granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.3,
        "residual_multiplier": 0.22, "logits_scaling": 8.0, "tie_word_embeddings": True}),
    "granite-thirds": Case("Granite", {"residual_multiplier": 0.22, "logits_scaling": 6.0}),
    "granite-plain": Case("Granite"),
    "granitemoehybrid": Case("GraniteMoeHybrid", GRANITE4 | {"embedding_multiplier": 12.0, "logits_scaling": 10.0,
        "attention_multiplier": 0.3, "residual_multiplier": 0.22, "tie_word_embeddings": True}),
    "granitemoehybrid-still": Case("GraniteMoeHybrid", GRANITE4 | {"position_embedding_type": None}),
    "seed_oss": Case("SeedOss"),
    "smollm3": Case("SmolLM3", {"num_hidden_layers": 5, "pad_token_id": 0}),
    "ernie4_5": Case("Ernie4_5", {"head_dim": 12}),
    "ernie4_5-biased": Case("Ernie4_5", {"use_bias": True, "tie_word_embeddings": False}),
}  # fmt: skip


def change_config(directory: Path, changed: dict[str, Any]) -> None:
    """Give keys of a config.json other values."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = CASES[name].make(tmp_path)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(0, COMMON["vocab_size"], (PROMPT,), generator=generator).tolist()
    check_parity(tmp_path, model, prompt, COMPLETION, **OPTIONS)


def test_queries_scaled_by_position_limit_the_context(tmp_path: Path) -> None:
    CASES["ministral3"].make(tmp_path)
    with pytest.raises(ConfigError, match="original_max_position_embeddings 128"):
        Runtime.load(tmp_path, **{**OPTIONS, "max_context": 129})
    assert read_model_config(tmp_path).max_context == 128


@pytest.mark.parametrize("divisor", [8.0, 10.0])
def test_logits_are_divided_by_the_final_norm_without_a_rounding_more(divisor: float, tmp_path: Path) -> None:
    """A quotient by a power of two is a bfloat16 number; others are kept in float32."""
    CASES["granite"].make(tmp_path)
    change_config(tmp_path, {"logits_scaling": divisor})
    stored = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    norm = load_target(tmp_path, dtype="bfloat16").weights["norm.weight"]
    assert norm.dtype == (torch.bfloat16 if divisor == 8.0 else torch.float32)
    expected = stored / divisor
    assert torch.equal(norm, expected.to(norm.dtype))


def test_a_granite_4_as_it_is_published_is_read_like_one_of_transformers(tmp_path: Path) -> None:
    """Its files are of transformers 4: other names of layers' kinds, RoPE's base next to it, keys of absent layers."""
    CASES["granitemoehybrid"].make(tmp_path)
    before = load_target(tmp_path)
    kinds = ["attention"] * COMMON["num_hidden_layers"]
    change_config(tmp_path, PUBLISHED_GRANITE4 | {"layer_types": kinds, "rope_parameters": None})
    after = load_target(tmp_path)
    assert after.config == before.config
    assert all(torch.equal(after.weights[each], before.weights[each]) for each in before.weights)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layer_types": ["mamba", "attention", "mamba"]}, "Granite 4.0's layers of mamba are not implemented"),
        ({"layer_types": ["linear_attention"] * 3}, "Granite 4.0's layers of linear_attention are not implemented"),
        ({"layer_types": None}, "Granite 4.0's layers of mamba are not implemented"),
        ({"layer_types": ["attention"] * 2}, "layer_types must be a list of 3 names"),
        ({"num_local_experts": 64}, "num_local_experts must be 0: Granite 4.0's experts are not implemented"),
        ({"num_local_experts": None}, "num_local_experts must be 0: Granite 4.0's experts are not implemented"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type must be 'rope' or 'nope'"),
        ({"normalization_function": "layernorm"}, "normalization_function = 'layernorm' is not implemented"),
    ],
)
def test_a_granite_4_with_other_layers_is_refused_by_name(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    CASES["granitemoehybrid"].make(tmp_path)
    change_config(tmp_path, changed)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, "layers without experts are not implemented"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 2 entries, expected 3"),
        ({"layer_types": ["linear_attention"] * 3}, "'linear_attention' is not implemented for this family"),
        ({"rope_parameters": {"full_attention": {"rope_type": "spiral"}}}, "rope type 'spiral' is not implemented"),
        ({"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "not a key that lowlat knows"),
    ],
)
def test_a_mellum_with_other_layers_is_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    CASES["mellum"].make(tmp_path)
    change_config(tmp_path, changed)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path)


def test_a_mellum_has_windows_and_rope_by_kind_and_its_mtp_layer_is_skipped(tmp_path: Path) -> None:
    CASES["mellum"].make(tmp_path)
    path = tmp_path / "model.safetensors"
    before = load_target(tmp_path)
    extra = {"mtp.layers.0.input_layernorm.weight": torch.ones(32), "mtp.norm.weight": torch.ones(32)}
    save_file({**load_file(path), **extra}, path, metadata={"format": "pt"})
    changed = {"num_nextn_predict_layers": 1, "use_sliding_window": True, "max_window_layers": 0, "rope_theta": 3e4}
    change_config(tmp_path, changed)
    after = load_target(tmp_path)
    assert after.config == before.config and after.config.windows == (24, None, 24)
    ropes = [mixer.rope for mixer in after.config.attentions.values()]
    assert [(rope.kind, rope.theta) for rope in ropes] == [("default", 1e4), ("yarn", 5e5), ("default", 1e4)]
    assert after.config.max_context == 2048 and ropes[1].attention_factor == 1.3
    assert all(torch.equal(after.weights[each], before.weights[each]) for each in before.weights)


def test_published_experts_are_transposed(tmp_path: Path) -> None:
    CASES["qwen3_vl_moe"].make(tmp_path)
    before, path = load_target(tmp_path).weights, tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in [each for each in tensors if ".experts." in each]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    after = load_target(tmp_path).weights
    assert all(torch.equal(after[each], before[each]) for each in before)


@pytest.mark.parametrize(
    ("name", "stem", "lm_head"),
    [
        ("qwen2_5_vl", "model", "lm_head"),
        ("mistral3", "model.language_model", "lm_head"),
        ("mistral3", "language_model.model", "language_model.lm_head"),
    ],
)
def test_files_of_other_versions_have_other_names(name: str, stem: str, lm_head: str, tmp_path: Path) -> None:
    CASES[name].make(tmp_path)
    before = load_target(tmp_path).weights
    path = tmp_path / "model.safetensors"

    def renamed(old: str) -> str:
        for start in ("model.language_model.", "language_model.model."):
            if old.startswith(start):
                return f"{stem}.{old.removeprefix(start)}"
        return f"{lm_head}.weight" if old.endswith("lm_head.weight") else old

    save_file({renamed(old): tensor for old, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    after = load_target(tmp_path).weights
    assert after.keys() == before.keys() and all(torch.equal(after[each], before[each]) for each in before)
