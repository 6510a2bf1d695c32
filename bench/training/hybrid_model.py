"""A small hybrid of gated delta nets and gated attention with an MTP layer, as torch modules for training.

Parameters have the names of Qwen3.5's files. Norms multiply by 1 + w, but for those of delta nets. The MTP layer's
draft steps are simulated in parallel, as `eagle3.py` says.

Source: Qwen3.5's text model (transformers models/qwen3_5); DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from bench.training.eagle3 import RmsNorm, attend_steps, rotate
from bench.training.gated_delta import chunked_delta_rule

__all__ = ["Hybrid", "HybridSizes", "load_hybrid", "save_hybrid"]

INTERVAL = 4  # the last of so many layers has attention
TAPS = 4  # inputs of the convolution
ROTARY_SHARE = 0.25  # of a head's dimensions


@dataclass(frozen=True)
class HybridSizes:
    """Sizes of the target; its MTP layer has those of an attention layer."""

    vocabulary: int
    hidden: int = 128
    ffn: int = 352
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 64
    context: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def rotary_dims(self) -> int:
        """The dimensions of a head that RoPE turns."""
        return int(ROTARY_SHARE * self.head_dim)

    @property
    def channels(self) -> int:
        """The channels of a delta net's convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class AddedNorm(RmsNorm):
    """Root-mean-square norm in fp32 that multiplies by 1 + w."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class GatedDeltaNet(nn.Module):
    """The mixer of three layers in four."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.sizes = sizes
        values = sizes.value_heads * sizes.value_dim
        self.in_proj_qkv = _linear(sizes.hidden, sizes.channels)
        self.in_proj_z = _linear(sizes.hidden, values)
        self.in_proj_b = _linear(sizes.hidden, sizes.value_heads)
        self.in_proj_a = _linear(sizes.hidden, sizes.value_heads)
        self.conv1d = nn.Conv1d(sizes.channels, sizes.channels, TAPS, groups=sizes.channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads).uniform_(1, 16).log())
        steps = torch.empty(sizes.value_heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # softplus of it is the step
        self.norm = RmsNorm(sizes.value_dim, sizes.rms_norm_eps)
        self.out_proj = _linear(values, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Mix rows [rows, length, N], each with those before it."""
        sizes = self.sizes
        rows, length, _ = x.shape
        mixed = functional.pad(self.in_proj_qkv(x), (0, 0, TAPS - 1, 0))
        taps = self.conv1d.weight[:, 0].to(mixed.dtype)
        shifted = torch.stack([mixed[:, tap : tap + length] * taps[:, tap] for tap in range(TAPS)])
        mixed = functional.silu(shifted.sum(0))
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        q, k, v = (each.float() for each in mixed.split((keys, keys, values), dim=-1))
        q, k = (_unit(each.view(rows, length, sizes.key_heads, sizes.key_dim)) for each in (q, k))
        group = sizes.value_heads // sizes.key_heads
        q, k = (each.repeat_interleave(group, dim=2) for each in (q / sizes.key_dim**0.5, k))
        v = v.view(rows, length, sizes.value_heads, sizes.value_dim)
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.exp() * functional.softplus(self.in_proj_a(x).float() + self.dt_bias)
        out = self.norm(chunked_delta_rule(q, k, v, g, beta))
        gated = out * functional.silu(self.in_proj_z(x).float()).view_as(out)
        result: Tensor = self.out_proj(gated.reshape(rows, length, values))
        return result


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedAttention(nn.Module):
    """The mixer of one layer in four and of the MTP layer: queries and gates by head, RoPE on a part of a head."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.q_proj = _linear(sizes.hidden, 2 * sizes.heads * sizes.head_dim)
        self.k_proj = _linear(sizes.hidden, sizes.kv_heads * sizes.head_dim)
        self.v_proj = _linear(sizes.hidden, sizes.kv_heads * sizes.head_dim)
        self.o_proj = _linear(sizes.heads * sizes.head_dim, sizes.hidden)
        self.q_norm = AddedNorm(sizes.head_dim, sizes.rms_norm_eps)
        self.k_norm = AddedNorm(sizes.head_dim, sizes.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        """Mix rows [rows, length, N], each with those before it."""
        return self.step(x, [], [])

    def step(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Mix rows as a draft step does, after those whose keys and values are given; its own are added to them."""
        sizes = self.sizes
        rows, length, _ = x.shape
        q, gate = self.q_proj(x).view(rows, length, sizes.heads, 2, sizes.head_dim).unbind(3)
        k, v = (part(x).view(rows, length, sizes.kv_heads, sizes.head_dim) for part in (self.k_proj, self.v_proj))
        q, k = (_turned(norm(each).transpose(1, 2), sizes) for norm, each in ((self.q_norm, q), (self.k_norm, k)))
        group = sizes.heads // sizes.kv_heads
        keys.append(k.repeat_interleave(group, dim=1))
        values.append(v.transpose(1, 2).repeat_interleave(group, dim=1))
        mixed = attend_steps(q, keys, values, None).transpose(1, 2)
        result: Tensor = self.o_proj((mixed * gate.sigmoid()).reshape(rows, length, -1))
        return result


def _turned(x: Tensor, sizes: HybridSizes) -> Tensor:
    """Rotary embedding of the first dimensions of [rows, heads, length, D]."""
    dims = sizes.rotary_dims
    steps = torch.arange(0, dims, 2, device=x.device, dtype=torch.float32) / dims
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * sizes.rope_theta**-steps
    angles = torch.cat((angles, angles), dim=-1)
    return torch.cat((rotate(x[..., :dims], (angles.cos(), angles.sin())), x[..., dims:]), dim=-1)


class Mlp(nn.Module):
    """A gated FFN."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.gate_proj = _linear(sizes.hidden, sizes.ffn)
        self.up_proj = _linear(sizes.hidden, sizes.ffn)
        self.down_proj = _linear(sizes.ffn, sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """The FFN's output, [.., N]."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class DeltaLayer(nn.Module):
    """A layer whose mixer is a gated delta net."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.input_layernorm = AddedNorm(sizes.hidden, sizes.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(sizes)
        self.post_attention_layernorm = AddedNorm(sizes.hidden, sizes.rms_norm_eps)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the layer, [rows, length, N]."""
        x = x + self.linear_attn(self.input_layernorm(x))
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class AttentionLayer(nn.Module):
    """A layer whose mixer is gated attention."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.input_layernorm = AddedNorm(sizes.hidden, sizes.rms_norm_eps)
        self.self_attn = GatedAttention(sizes)
        self.post_attention_layernorm = AddedNorm(sizes.hidden, sizes.rms_norm_eps)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the layer, [rows, length, N]."""
        return self.step(x, [], [])

    def step(self, x: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The layer in a draft step: see `GatedAttention.step`."""
        x = x + self.self_attn.step(self.input_layernorm(x), keys, values)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        kinds = (AttentionLayer if (layer + 1) % INTERVAL == 0 else DeltaLayer for layer in range(sizes.layers))
        self.layers = nn.ModuleList(kind(sizes) for kind in kinds)
        self.norm = AddedNorm(sizes.hidden, sizes.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """The normed states [rows, length, N] of tokens [rows, length] int64."""
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        result: Tensor = self.norm(hidden)
        return result


class Mtp(nn.Module):
    """The multi-token prediction layer: fc of (embedding, state), an attention layer, a norm."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.fc = _linear(2 * sizes.hidden, sizes.hidden)
        self.pre_fc_norm_embedding = AddedNorm(sizes.hidden, sizes.rms_norm_eps)
        self.pre_fc_norm_hidden = AddedNorm(sizes.hidden, sizes.rms_norm_eps)
        self.layers = nn.ModuleList([AttentionLayer(sizes)])
        self.norm = AddedNorm(sizes.hidden, sizes.rms_norm_eps)

    def steps(self, embeddings: Tensor, states: Tensor, num_steps: int) -> Iterator[Tensor]:
        """Yield what the LM head reads in draft steps 0, 1, ..; rows j < k of step k have no meaning.

        embeddings  [rows, length, N]  of the token after each position
        states      [rows, length, N]  the target's normed states
        """
        embedded, layer = self.pre_fc_norm_embedding(embeddings), self.layers[0]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(num_steps):
            if step:
                states = functional.pad(states[:, :-1], (0, 0, 1, 0))
            both = torch.cat((embedded, self.pre_fc_norm_hidden(states)), dim=-1)
            states = self.norm(layer.step(self.fc(both), keys, values))  # type: ignore[operator]
            yield states


class Hybrid(nn.Module):
    """The target and its MTP layer; the LM head is the embedding."""

    def __init__(self, sizes: HybridSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = Decoder(sizes)
        self.mtp = Mtp(sizes)
        deep = 1 / math.sqrt(2 * sizes.layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 2:
                    scale = deep if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.0
                    nn.init.normal_(parameter, std=scale / math.sqrt(sizes.hidden))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [.., N] of ids [..] int64."""
        result: Tensor = self.model.embed_tokens(tokens)
        return result

    def logits(self, states: Tensor) -> Tensor:
        """Logits [.., V] float32 of normed states [.., N]."""
        return functional.linear(states, self.model.embed_tokens.weight).float()


def _config(sizes: HybridSizes, end_of_text: int) -> dict[str, Any]:
    kinds = ["full_attention" if (layer + 1) % INTERVAL == 0 else "linear_attention" for layer in range(sizes.layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": TAPS,
        "layer_types": kinds,
        "attn_output_gate": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.rms_norm_eps,
        "max_position_embeddings": sizes.context,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": sizes.rope_theta,
            "partial_rotary_factor": ROTARY_SHARE,
        },
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "mamba_ssm_dtype": "float32",
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "bfloat16",
    }


def save_hybrid(model: Hybrid, directory: str | Path, end_of_text: int) -> None:
    """Write config.json and model.safetensors: bf16, but for A_log, which is fp32 as in published files."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_config(model.sizes, end_of_text), indent=1) + "\n")
    ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
    (directory / "generation_config.json").write_text(json.dumps(ends) + "\n")


def load_hybrid(directory: str | Path) -> Hybrid:
    """Read what `save_hybrid` wrote; fp32, on the CPU."""
    directory = Path(directory)
    config = json.loads((directory / "config.json").read_text())
    model = Hybrid(
        HybridSizes(
            vocabulary=config["vocab_size"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            key_heads=config["linear_num_key_heads"],
            value_heads=config["linear_num_value_heads"],
            key_dim=config["linear_key_head_dim"],
            value_dim=config["linear_value_head_dim"],
            context=config["max_position_embeddings"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            rms_norm_eps=config["rms_norm_eps"],
        )
    )
    model.load_state_dict({k: v.float() for k, v in load_file(directory / "model.safetensors").items()})
    return model
