"""This module adds small MTP layers to the files of an existing target."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from paper_draft_model import PaperDraftModel
from safetensors.torch import load_file, save_file

__all__ = ["PaperMtp", "add_mtp"]

NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def add_mtp(
    directory: Path, *, seed: int = 0, copies: bool = False, by_expert: bool = False
) -> dict[str, torch.Tensor]:
    """Add a random MTP layer, like the target's last layer, to its only file and its config; return its tensors.

    copies     it drafts mostly what the target's embedding and LM head alone would give, so that many drafts are
               accepted over a target with a low gain
    by_expert  experts that are fused in the target are stored one by one
    """
    path = directory / "model.safetensors"
    stored = load_file(path)
    last = max((name for name in stored if ".self_attn.q_proj" in name), key=_number)
    prefix = last.partition("self_attn.")[0]
    generator = torch.Generator().manual_seed(seed)
    like = {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
    made = {
        f"mtp.layers.0.{name}": _random(name, tensor, generator) for name, tensor in _split(like, by_expert).items()
    }
    embedding = next(tensor for name, tensor in stored.items() if name.endswith("embed_tokens.weight"))
    width = embedding.shape[1]
    norm = next(tensor for name, tensor in stored.items() if name.endswith("model.norm.weight"))
    for name in NORMS:
        made[f"mtp.{name}.weight"] = 0.2 * torch.randn(width, generator=generator) + norm.mean().round()
    made["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=generator) / math.sqrt(2 * width)
    if copies:
        made["mtp.fc.weight"] = torch.cat((torch.eye(width), 0.1 * torch.eye(width)), dim=1)
        made["mtp.pre_fc_norm_embedding.weight"] = torch.full((width,), float(norm.mean().round()))
        made["mtp.norm.weight"] = norm.clone()
        for name in made:
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                made[name] = 0.1 * made[name]
    made = {name: tensor.to(embedding.dtype).contiguous() for name, tensor in made.items()}
    save_file({**stored, **made}, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    place: dict[str, Any] = config.get("text_config", config)
    place["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    return made


def _number(name: str) -> int:
    return int(name.partition("layers.")[2].partition(".")[0])


def _split(like: dict[str, torch.Tensor], by_expert: bool) -> dict[str, torch.Tensor]:
    """A layer's tensors, its fused experts one by one where that is asked for."""
    if not by_expert or "mlp.experts.gate_up_proj" not in like:
        return like
    found = {name: tensor for name, tensor in like.items() if not name.startswith("mlp.experts.")}
    for number, (both, down) in enumerate(
        zip(like["mlp.experts.gate_up_proj"], like["mlp.experts.down_proj"], strict=True)
    ):
        gate, up = both.chunk(2)
        parts = {"gate": gate, "up": up, "down": down}
        found |= {f"mlp.experts.{number}.{part}_proj.weight": tensor for part, tensor in parts.items()}
    return found


def _random(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(like.shape, generator=generator)
    if "norm" in name:
        return 0.2 * noise + like.float().mean().round()
    return noise / math.sqrt(like.shape[-1])


class PaperMtp(PaperDraftModel):
    """An MTP layer over one target in plain torch, from the equations and the checkpoint's own tensors.

    target  transformers' text model
    """

    def __init__(self, tensors: dict[str, torch.Tensor], target: Any) -> None:
        super().__init__({"transformer_layer_config": {}}, {}, target)
        self.mtp, self.target = {name.removeprefix("mtp."): tensor for name, tensor in tensors.items()}, target.config

    def _forward(self, tokens: Sequence[int], g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows: the states to feed back [n, H] and the logits [n, V]."""
        e = self._norm(self.embedding[torch.tensor(list(tokens))], "pre_fc_norm_embedding")
        u = torch.cat((e, self._norm(g, "pre_fc_norm_hidden")), dim=-1) @ self.mtp["fc.weight"].T
        h = u + self._mix(self._norm(u, "layers.0.input_layernorm"))
        h = h + self._ffn(self._norm(h, "layers.0.post_attention_layernorm"))
        z = self._norm(h, "norm")
        return z, z @ self.lm_head.T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.mtp[f"{name}.weight"], self.target.rms_norm_eps)

    def _own(self, name: str) -> torch.Tensor:
        return self.mtp[f"layers.0.{name}.weight"]

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        """Gated attention: queries and gates by head, RoPE on a head's first dimensions."""
        count, size, heads = x.shape[0], self.target.head_dim, self.target.num_attention_heads
        q, gate = (x @ self._own("self_attn.q_proj").T).view(count, heads, 2, size).unbind(2)
        k, v = ((x @ self._own(f"self_attn.{part}_proj").T).view(count, -1, size) for part in "kv")
        q, k = (
            self._turn(self._norm(q, "layers.0.self_attn.q_norm")),
            self._turn(self._norm(k, "layers.0.self_attn.k_norm")),
        )
        k, v = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / size**0.5
        hidden = torch.ones(count, count).triu(1).bool()
        mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
        return (mixed * gate.sigmoid()).reshape(count, -1) @ self._own("self_attn.o_proj").T

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        rope = self.target.rope_parameters
        dims = int(x.shape[-1] * rope["partial_rotary_factor"])
        half = dims // 2
        angles = torch.arange(x.shape[0])[:, None] * rope["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x[..., :half], x[..., half:dims]
        return torch.cat((low * cos - high * sin, high * cos + low * sin, x[..., dims:]), dim=-1)

    def _ffn(self, x: torch.Tensor) -> torch.Tensor:
        if "layers.0.mlp.gate.weight" not in self.mtp:
            return self._dense(x, "mlp")
        shares, chosen = (x @ self._own("mlp.gate").T).softmax(-1).topk(self.target.num_experts_per_tok)
        shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for row in range(x.shape[0]):
            for share, number in zip(shares[row], chosen[row].tolist(), strict=True):
                out[row] += share * self._expert(x[row], number)
        shared = self._dense(x, "mlp.shared_expert")
        return out + (x @ self._own("mlp.shared_expert_gate").T).sigmoid() * shared

    def _dense(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (x @ self._own(f"{name}.{part}_proj").T for part in ("gate", "up"))
        return (F.silu(gate) * up) @ self._own(f"{name}.down_proj").T

    def _expert(self, x: torch.Tensor, number: int) -> torch.Tensor:
        if "layers.0.mlp.experts.gate_up_proj" not in self.mtp:
            return self._dense(x, f"mlp.experts.{number}")
        gate, up = (self.mtp["layers.0.mlp.experts.gate_up_proj"][number] @ x).chunk(2)
        return self.mtp["layers.0.mlp.experts.down_proj"][number] @ (F.silu(gate) * up)
