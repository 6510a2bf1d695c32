"""Small MTP layers, written next to the weights of a target that is there already."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["add_mtp"]

NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def add_mtp(
    directory: Path, *, seed: int = 0, copies: bool = False, by_expert: bool = False
) -> dict[str, torch.Tensor]:
    """Add a random MTP layer, like the target's last layer, to its only file and its config; return its tensors.

    copies     it answers mostly what the target's embedding and LM head alone would: a good part of its drafts is
               accepted over a target made with a low gain
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
