"""This module makes small random checkpoints: targets of transformers' own classes, and EAGLE3 draft models for them.

Targets are float32 and written by `save_pretrained`, so their files and their logits are transformers' own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stages import later
from tiny_gemma import GEMMA_FIELDS, GEMMAS

# What the names of transformers' classes of a config and of a model begin with. It is imported where a model is made:
# that takes 4 s, which workers that only collect need not spend.
FAMILIES = {
    "llama": ("Llama", "Llama"),
    "mistral": ("Mistral", "Mistral"),
    "qwen2": ("Qwen2", "Qwen2"),
    "qwen3": ("Qwen3", "Qwen3"),
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe"),
    "gpt_oss": ("GptOss", "GptOss"),
    "qwen3_5_text": ("Qwen3_5Text", "Qwen3_5"),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", "Qwen3_5Moe"),
    "qwen3_next": ("Qwen3Next", "Qwen3Next"),
    "gemma2": ("Gemma2", "Gemma2"),
    "gemma3_text": ("Gemma3Text", "Gemma3"),
    "gemma4_text": ("Gemma4Text", "Gemma4"),
    "gemma4_unified_text": ("Gemma4UnifiedText", "Gemma4Unified"),
}
ADDED_NORMS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "gemma2", "gemma3_text")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
DISTINCT_FAMILIES = (
    "llama",
    "qwen3",
    "gpt_oss",
    "qwen3_5_moe_text",
)  # the others' programs differ from these by biases alone
# the same as cases of a test: what lies between the plainest and the richest comes in the second stage
STAGED_FAMILIES = ("llama", later("qwen3"), "gpt_oss")
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_implementation": "eager",
}
GPT_OSS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "swiglu_limit": 2.0,  # low enough to clamp on random weights
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
QWEN3_MOE: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
# three layers of four are recurrent, of the least sizes that kernels take
KERNEL_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
HYBRID_MOE: dict[str, Any] = {**HYBRID, "num_experts": 5, "num_experts_per_tok": 3} | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID_MOE,
    "qwen3_next": HYBRID_MOE,
    "gpt_oss": GPT_OSS,
    "qwen3_moe": QWEN3_MOE,
    "mistral": {"sliding_window": None},
    **GEMMA_FIELDS,
}


def make_targets(
    tmp_path_factory: pytest.TempPathFactory, families: Mapping[str, Mapping[str, Any]]
) -> dict[str, Path]:
    """Make a random target of each family, in a folder of its own; options by family are those of `make_target`."""
    found = {}
    for family, options in families.items():
        found[family] = tmp_path_factory.mktemp(family)
        make_target(found[family], family, **options)
    return found


def make_target(directory: Path, family: str, *, seed: int = 0, gain: float = 0.8, **options: Any) -> Any:
    """Write a random target to `directory` and return it as transformers' model, float32.

    gain     scales what the layers add to the residual stream: if it is low, the next token depends mostly on the last
    options  fields of transformers' config; "legacy_config": True rewrites config.json in the older spelling
    """
    import transformers
    from transformers.utils.logging import disable_progress_bar

    legacy = options.pop("legacy_config", False)
    config_name, model_name = FAMILIES[family]
    make_config = getattr(transformers, f"{config_name}Config")
    make_model = getattr(transformers, f"{model_name}ForCausalLM")
    fields = {**COMMON, **OWN_FIELDS.get(family, {}), **options}
    if family == "qwen3_moe":
        fields.setdefault("moe_intermediate_size", fields["intermediate_size"])
    disable_progress_bar()
    torch.manual_seed(seed)
    model = make_model(make_config(**fields)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_values(name, parameter, gain, added_norms=family in ADDED_NORMS))
            if family in GEMMAS and "embed_tokens" in name:
                parameter /= 4 * math.sqrt(parameter.shape[-1])  # less than what layers add
            if family.startswith("gemma4") and name.endswith("q_norm.weight"):
                parameter /= math.sqrt(parameter.shape[-1])  # its scores have no scale of their own
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(1))
    model.requires_grad_(False)
    model.save_pretrained(directory)
    if legacy:
        _rewrite_config(directory / "config.json")
    return model


def _random_values(name: str, like: torch.Tensor, gain: float, *, added_norms: bool) -> torch.Tensor:
    noise: torch.Tensor = torch.randn_like(like)
    if "norm" in name or name.endswith("scale"):
        return 0.2 * noise if added_norms and "linear_attn" not in name else 1 + 0.2 * noise
    if name.endswith(("A_log", "dt_bias", "conv1d.weight")):
        return noise
    if name.endswith("sinks"):
        return noise
    if name.endswith("bias"):
        return 0.3 * gain * noise
    if "embed_tokens" in name:
        return noise
    if "lm_head" in name:
        return 3 * noise / math.sqrt(like.shape[-1])
    if "experts" in name:  # [E, in, out]
        return gain * noise / math.sqrt(like.shape[1])
    return gain * noise / math.sqrt(like.shape[-1])


def _rewrite_config(path: Path) -> None:
    """Rewrite `rope_parameters` and `dtype` as `rope_theta`, `rope_scaling` and `torch_dtype`."""
    fields = json.loads(path.read_text())
    rope = fields.pop("rope_parameters")
    fields["torch_dtype"] = fields.pop("dtype")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    path.write_text(json.dumps(fields))


def mxfp4_target(directory: Path, *, seed: int = 0, **options: Any) -> Any:
    """Make a gpt-oss target with MXFP4 experts; hidden and inner size must be multiples of 32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = make_target(directory, "gpt_oss", seed=seed, **{"hidden_size": 64, "intermediate_size": 32, **options})
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for layer, block in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            parameter = getattr(block.mlp.experts, part)  # [E, in, out]
            experts, inner, outer = parameter.shape
            shape = (experts, outer, inner // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            name = f"model.layers.{layer}.mlp.experts.{part}"
            del tensors[name]
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    path.write_text(json.dumps(fields))
    return model


@torch.no_grad()
def transformers_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Compute logits [n, V] after each token, in one forward pass without a cache."""
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def residual_streams(model: Any, tokens: list[int]) -> list[torch.Tensor]:
    """Return the input of each layer and the output of the last, [n, N] each, by hooks on transformers' layers."""
    streams: list[torch.Tensor] = []

    def before(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        streams.append((arguments[0] if arguments else keywords["hidden_states"])[0].clone())

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in model.model.layers]
    handles.append(model.model.norm.register_forward_pre_hook(before, with_kwargs=True))
    transformers_logits(model, tokens)
    for handle in handles:
        handle.remove()
    return streams


def random_draft_model(directory: Path, target: Any, *, seed: int = 0, **flags: Any) -> tuple[dict[str, Any], Any]:
    """Write a random EAGLE3 draft model in speculators' layout; returns its config.json and its tensors.

    flags  norm_before_fc, fc_norm, norm_output, norm_before_residual, qk_norm (a Qwen3 layer), attention_bias,
           mlp_bias, own_embedding, own_lm_head (True), draft_vocab_size, captures, final_hidden (no fc), windows (one
           for each layer, None: full attention), mask_token (a P-EAGLE head), and geometry: num_hidden_layers,
           hidden_size, num_attention_heads, num_key_value_heads, head_dim, intermediate_size, rope_theta
    """
    config = draft_config(target, **flags)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: random_draft_values(name, shape, generator) for name, shape in _head_shapes(config, flags).items()}
    vocab, draft_vocab = target.config.vocab_size, config["draft_vocab_size"]
    if draft_vocab < vocab:
        kept = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, kept, True)
    write_draft_model(directory, config, tensors)
    return config, tensors


def draft_config(target: Any, **flags: Any) -> dict[str, Any]:
    """Return a draft model's config.json in speculators' layout."""
    config = target.config
    layer = {
        "model_type": "qwen3" if flags.get("qk_norm") else "llama",
        "hidden_size": flags.get("hidden_size", config.hidden_size),
        "intermediate_size": flags.get("intermediate_size", 40),
        "num_hidden_layers": flags.get("num_hidden_layers", 1),
        "num_attention_heads": flags.get("num_attention_heads", 4),
        "num_key_value_heads": flags.get("num_key_value_heads", 2),
        "head_dim": flags.get("head_dim", 8),
        "hidden_act": flags.get("hidden_act", "silu"),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": flags.get("rope_theta", 10000.0),
        "attention_bias": flags.get("attention_bias", False),
        "mlp_bias": flags.get("mlp_bias", False),
        **({"rope_scaling": flags["rope_scaling"]} if "rope_scaling" in flags else {}),
    }
    windows = flags.get("windows", (None,))
    if any(windows):
        layer["sliding_window"] = max(window or 0 for window in windows)
        layer["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    features = () if flags.get("final_hidden") else flags.get("captures", (0, 2, config.num_hidden_layers))
    switches = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
    parallel = flags.get("mask_token") is not None
    return {
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
        "speculators_model_type": "peagle" if parallel else "eagle3",
        **({"mask_token_id": flags["mask_token"]} if parallel else {}),
        "draft_vocab_size": flags.get("draft_vocab_size", config.vocab_size),
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(features),
        "use_aux_hidden_state": not flags.get("final_hidden"),
        "transformer_layer_config": layer,
        **{name: bool(flags.get(name)) for name in switches},
        "dtype": "float32",
    }


def _head_shapes(config: dict[str, Any], flags: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    layer = config["transformer_layer_config"]
    width, inner, target = layer["hidden_size"], layer["intermediate_size"], config["target_hidden_size"]
    count = len(config["eagle_aux_hidden_state_layer_ids"])
    queries = layer["num_attention_heads"] * layer["head_dim"]
    keys = layer["num_key_value_heads"] * layer["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (width,)}
    if count:
        shapes["fc.weight"] = (width, count * target)
    if flags.get("mask_token") is not None:
        shapes["mask_hidden"] = (1, 1, count * target)
    for number in range(layer["num_hidden_layers"]):
        own, read = f"layers.{number}", width if number else 2 * width
        for name in ("input_layernorm", "post_attention_layernorm", *(() if number else ("hidden_norm",))):
            shapes[f"{own}.{name}.weight"] = (width,)
        for name, rows, columns, biased in (
            ("self_attn.q_proj", queries, read, "attention_bias"),
            ("self_attn.k_proj", keys, read, "attention_bias"),
            ("self_attn.v_proj", keys, read, "attention_bias"),
            ("self_attn.o_proj", width, queries, "output_bias" if flags.get("qk_norm") else "attention_bias"),
            ("mlp.gate_proj", inner, width, "mlp_bias"),
            ("mlp.up_proj", inner, width, "mlp_bias"),
            ("mlp.down_proj", width, inner, "mlp_bias"),
        ):
            shapes[f"{own}.{name}.weight"] = (rows, columns)
            if layer.get(biased):
                shapes[f"{own}.{name}.bias"] = (rows,)
        if flags.get("qk_norm"):
            shapes[f"{own}.self_attn.q_norm.weight"] = (layer["head_dim"],)
            shapes[f"{own}.self_attn.k_norm.weight"] = (layer["head_dim"],)
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (count * target,)
    if flags.get("fc_norm"):
        shapes.update({f"fc_norm.{k}.weight": (target,) for k in range(count)})
    if flags.get("own_embedding"):
        shapes["embed_tokens.weight"] = (layer["vocab_size"], width)
    if flags.get("own_lm_head", True):
        shapes["lm_head.weight"] = (config["draft_vocab_size"], width)
    return shapes


def random_draft_values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw a draft model's tensor, scaled so that activations keep their size."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if "embed_tokens" in name or name == "mask_hidden":
        return noise
    return (3 if "lm_head" in name else 1) * noise / math.sqrt(shape[-1])


def copying_draft_model(
    directory: Path, target: Any, *, draft_vocab_size: int | None = None, seed: int = 0, heads: int = 1, **flags: Any
) -> None:
    """Write a draft model that drafts what the target's embedding, final norm and LM head alone would give.

    Its attention heads are wide and alike, and each row attends to itself. Over a target with a low gain, many of its
    drafts are accepted, and many are not. Later layers, if `flags` ask for some, add little.
    heads  its attention heads; ranks can share 8
    """
    width, vocab = target.config.hidden_size, target.config.vocab_size
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width}
    shape["norm_before_residual"] = True
    config, tensors = random_draft_model(
        directory, target, seed=seed, draft_vocab_size=draft_vocab_size or vocab, **{**shape, **flags}
    )
    left = torch.cat((torch.eye(width), torch.zeros(width, width)), dim=1)
    for part, gain in (("q", 1.5), ("k", 1.5), ("v", 1.0)):
        tensors[f"layers.0.self_attn.{part}_proj.weight"] = gain * left.repeat(heads, 1)
    tensors["layers.0.self_attn.o_proj.weight"] = torch.eye(width).repeat(1, heads) / heads
    tensors["layers.0.input_layernorm.weight"] = torch.ones(width)
    tensors["layers.0.hidden_norm.weight"] = torch.full((width,), 0.1)
    for layer in range(config["transformer_layer_config"]["num_hidden_layers"]):
        tensors[f"layers.{layer}.mlp.down_proj.weight"] *= 0.1
        if layer:
            tensors[f"layers.{layer}.self_attn.o_proj.weight"] *= 0.1
    added = 1.0 if target.config.model_type in HYBRIDS else 0.0  # whose norms multiply by 1 + w
    tensors["norm.weight"] = added + target.model.norm.weight
    kept = torch.arange(vocab)[tensors["t2d"]] if "t2d" in tensors else torch.arange(vocab)
    tensors["lm_head.weight"] = target.lm_head.weight[kept].clone()
    write_draft_model(directory, config, tensors)


def write_draft_model(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class PairPaths:
    """The directories of a target and its draft model."""

    target: Path
    head: Path


def make_pair(directory: Path, family: str, *, gain: float = 0.45, **options: Any) -> PairPaths:
    """Make a small target and a draft model with many accepted drafts; it cannot draft some of the target's tokens."""
    paths = PairPaths(directory / "target", directory / "head")
    target = make_target(paths.target, family, gain=gain, **{"num_hidden_layers": 2, **options})
    copying_draft_model(paths.head, target, draft_vocab_size=80)
    return paths
