"""Checkpoint directories written by hand: EAGLE3 heads in every public layout, and safetensors files that lie."""

import json
from pathlib import Path
from typing import Any

import torch
from layer_changes import with_changes
from safetensors.torch import save_file

from lowlat.models.geometry import ModelConfig
from lowlat.models.layer_spec import AttentionSpec, DenseSpec, LayerSpec, RopeConfig

HEAD_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "vocab_size": 40,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
MODELOPT_FLAGS = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}


def target_geometry(**changes: Any) -> ModelConfig:
    """A target of 8 layers, hidden size 16, 40 tokens, for heads of HEAD_SIZES; changes: see `with_changes`."""
    mixer = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, rope=RopeConfig(10000.0))
    layer = LayerSpec(mixer=mixer, ffn=DenseSpec(inner_size=24))
    config = ModelConfig(
        family="llama",
        hidden_size=16,
        vocab_size=40,
        max_position=512,
        rms_norm_eps=1e-5,
        layers=(layer,) * changes.pop("num_layers", 8),
        tie_embeddings=False,
        dtype="float32",
    )
    return with_changes(config, **changes)


def draft_tensors(num_features: int = 3, draft_vocab: int = 12) -> dict[str, torch.Tensor]:
    """A plain EAGLE3 head's tensors by normalised name, float32, with d2t and t2d."""
    torch.manual_seed(5)
    kept = torch.randperm(40)[:draft_vocab].sort().values
    shapes = {
        "fc.weight": (16, num_features * 16),
        "norm.weight": (16,),
        "lm_head.weight": (draft_vocab, 16),
        "layers.0.input_layernorm.weight": (16,),
        "layers.0.hidden_norm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (16,),
        "layers.0.self_attn.q_proj.weight": (24, 32),
        "layers.0.self_attn.k_proj.weight": (12, 32),
        "layers.0.self_attn.v_proj.weight": (12, 32),
        "layers.0.self_attn.o_proj.weight": (16, 24),
        "layers.0.mlp.gate_proj.weight": (24, 16),
        "layers.0.mlp.up_proj.weight": (24, 16),
        "layers.0.mlp.down_proj.weight": (16, 24),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors["d2t"] = kept - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(40, dtype=torch.bool).index_fill_(0, kept, True)
    return tensors


def _config(layout: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    vocab = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else None
    if layout == "speculators":
        return {
            "architectures": ["Eagle3DraftModel"],
            "auto_map": {"": "config.Eagle3SpeculatorConfig"},
            "speculators_model_type": "eagle3",
            "speculators_version": "0.5.0",
            "speculators_config": {"algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy"}]},
            "transformer_layer_config": {**HEAD_SIZES, "model_type": "llama", "rope_theta": 500000.0},
            "draft_vocab_size": vocab,
            "target_hidden_size": None,
            "norm_before_residual": True,
            "embed_requires_grad": False,
            "dtype": "bfloat16",
        }
    config = {**HEAD_SIZES, "model_type": "llama", "torch_dtype": "float16", "draft_vocab_size": vocab}
    if layout == "safeai":
        return {**config, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    if layout == "modelopt":
        config["eagle_config"] = dict(MODELOPT_FLAGS)
    return config


def write_draft_layout(
    directory: Path,
    layout: str,
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    config: dict[str, Any] | None = None,
    layer: dict[str, Any] | None = None,
    eagle: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a head as one producer does; returns its tensors by normalised name.

    config, layer and eagle change keys of the top level, of the layer's sizes and of eagle_config.
    """
    tensors = draft_tensors() if tensors is None else tensors
    fields = _config(layout, tensors)
    nested = fields["transformer_layer_config"] if layout == "speculators" else fields
    nested.update(layer or {})
    if eagle is not None:
        fields["eagle_config"] = {**fields.get("eagle_config", {}), **eagle}
    fields.update(config or {})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    stored = tensors
    if layout in ("safeai", "specforge"):
        stored = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if layout == "modelopt":
        stored = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    save_file(stored, directory / "model.safetensors")
    return tensors


def edit_json(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object; a value of Ellipsis removes the key."""
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}))


def read_header_bytes(path: Path) -> tuple[bytes, bytes]:
    """The header and the tensor bytes of a safetensors file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def write_raw(path: Path, header: bytes, data: bytes, *, length: int | None = None) -> None:
    """A safetensors file of these very bytes; length is what its first eight bytes claim of the header."""
    path.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)
