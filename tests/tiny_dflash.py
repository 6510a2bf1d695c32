"""Tiny DFlash draft models on disk, and the same in plain torch, from the equations; no lowlat code.

A draft model's keys and values of a position that the target has run are made of the target's residual streams; the
block's rows are the last token and masks. Every call computes the whole sequence afresh.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from paper_draft_model import PaperDraftModel
from tiny_models import random_draft_values, write_draft_model

MASK = 11


def dflash_draft_model(
    directory: Path, target: Any, *, seed: int = 0, layout: str = "z-lab", copies: bool = False, **flags: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Write a DFlash draft model; returns what `PaperDflash` takes: its config in speculators' form, and its tensors.

    copies  its first mask attends to the token before alone, and answers what the target's embedding, final norm and
            LM head would: of a target made with a low gain, a part of its drafts is accepted
    flags   num_hidden_layers, hidden_size, head_dim, num_key_value_heads, captures (boundaries), draft_vocab_size,
            own_embedding, own_lm_head, qk_norm (True), attention_bias, block_size
    """
    config = target.config
    if copies:
        flags |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": config.hidden_size}
        flags |= {"qk_norm": False, "attention_bias": True, "own_embedding": True, "own_lm_head": True}
    width, captures = (
        flags.get("hidden_size", config.hidden_size),
        list(flags.get("captures", (1,) if copies else (1, 2))),
    )
    layer = {
        "model_type": "qwen3" if flags.get("qk_norm", True) else "llama",
        "hidden_size": width,
        "intermediate_size": 40,
        "num_hidden_layers": flags.get("num_hidden_layers", 2),
        "num_attention_heads": flags.get("num_attention_heads", 4),
        "num_key_value_heads": flags.get("num_key_value_heads", 2),
        "head_dim": flags.get("head_dim", 8),
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    shared = {
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": captures,
        "mask_token_id": MASK,
        "transformer_layer_config": layer,
    }
    generator = torch.Generator().manual_seed(seed)
    shapes = _shapes(config, layer, captures, flags)
    tensors = {name: random_draft_values(name, shape, generator) for name, shape in shapes.items()}
    drafted = flags.get("draft_vocab_size", config.vocab_size)
    if drafted < config.vocab_size:
        kept = torch.randperm(config.vocab_size, generator=generator)[:drafted].sort().values
        tensors["d2t"] = kept - torch.arange(drafted)
    if copies:
        _copy(tensors, target, layer["num_hidden_layers"])
    if layout == "speculators":
        block = {"block_size": flags.get("block_size", 8), "draft_vocab_size": drafted, "sample_from_anchor": False}
        own = {"architectures": ["DFlashSpeculator"], "target_hidden_size": config.hidden_size, **block}
        write_draft_model(directory, {**shared, **own}, tensors)
    else:
        ids = {"target_layer_ids": [boundary - 1 for boundary in captures], "mask_token_id": MASK}
        own = {"architectures": ["DFlashDraftModel"], "num_target_layers": config.num_hidden_layers}
        own |= {"block_size": flags.get("block_size", 8), "dflash_config": ids, "draft_vocab_size": drafted}
        write_draft_model(directory, {**layer, **own}, tensors)
    return shared, tensors


def _copy(tensors: dict[str, torch.Tensor], target: Any, num_layers: int) -> None:
    """Keys that are the same everywhere, and queries that RoPE turns to the position before; values are the input."""
    width = target.config.hidden_size
    key, turned = torch.full((width,), 7.0), 10000.0 ** (-torch.arange(width // 2) / (width // 2))
    query = torch.cat((7 * (turned.cos() + turned.sin()), 7 * (turned.cos() - turned.sin())))
    for layer in range(num_layers):
        own = f"layers.{layer}"
        for part, bias in (("q", query), ("k", key), ("v", torch.zeros(width))):
            tensors[f"{own}.self_attn.{part}_proj.weight"].zero_()
            tensors[f"{own}.self_attn.{part}_proj.bias"] = bias.clone()
        tensors[f"{own}.self_attn.v_proj.weight"] = torch.eye(width)
        tensors[f"{own}.self_attn.o_proj.weight"] = torch.eye(width) * (0.1 if layer else 1)
        tensors[f"{own}.mlp.down_proj.weight"] *= 0.1
        tensors[f"{own}.input_layernorm.weight"] = torch.ones(width)
    tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach().clone()
    tensors["embed_tokens.weight"][MASK] *= 0.1
    tensors["lm_head.weight"] = target.lm_head.weight.detach().clone()
    tensors["norm.weight"] = target.model.norm.weight.detach().clone()


def _shapes(
    target: Any, layer: dict[str, Any], captures: list[int], flags: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    width, inner, head = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * head, layer["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, len(captures) * target.hidden_size)}
    shapes |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    for number in range(layer["num_hidden_layers"]):
        own = f"layers.{number}"
        shapes |= {f"{own}.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{own}.self_attn.{part}_proj.weight"] = (rows, width)
            if flags.get("attention_bias"):
                shapes[f"{own}.self_attn.{part}_proj.bias"] = (rows,)
        shapes[f"{own}.self_attn.o_proj.weight"] = (width, queries)
        shapes |= {f"{own}.mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        shapes[f"{own}.mlp.down_proj.weight"] = (width, inner)
        if flags.get("qk_norm", True):
            shapes |= {f"{own}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
    if flags.get("own_embedding"):
        shapes["embed_tokens.weight"] = (target.vocab_size, width)
    if flags.get("own_lm_head"):
        shapes["lm_head.weight"] = (flags.get("draft_vocab_size", target.vocab_size), width)
    return shapes


class PaperDflash(PaperDraftModel):
    """One DFlash draft model over one target; what a block drafts depends on how long it is."""

    def features(self, captured: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's residual streams, each [n, Ht], low to high -> what keys and values are made of, [n, H]."""
        return self._norm(torch.cat(list(captured), dim=-1) @ self.tensors["fc.weight"].T, "hidden_norm")

    def draft_logits(self, tokens: Sequence[int], features: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Logits [d + 1, Vd] of a block with d + 1 masks behind x[n], whatever the d drafts were."""
        masks = [self.config["mask_token_id"]] * (len(drafted) + 1)
        h = self.embedding[torch.tensor([tokens[-1], *masks])]
        for layer in range(self.layer["num_hidden_layers"]):
            h = h + self._attend_block(self._norm(h, f"layers.{layer}.input_layernorm"), features, layer)
            m = self._norm(h, f"layers.{layer}.post_attention_layernorm")
            gated = F.silu(self._linear(m, layer, "mlp.gate_proj")) * self._linear(m, layer, "mlp.up_proj")
            h = h + self._linear(gated, layer, "mlp.down_proj")
        logits: torch.Tensor = self._norm(h, "norm") @ self.lm_head.T
        return logits[1:]

    def draft_chain(self, tokens: Sequence[int], features: torch.Tensor, depth: int) -> list[int]:
        """The likeliest token of each mask, as target ids."""
        rows = self.draft_logits(tokens, features, [0] * (depth - 1))
        return [token for row in rows for token in self.target_ids(row, 1)]

    def _attend_block(self, a: torch.Tensor, context: torch.Tensor, layer: int) -> torch.Tensor:
        width, heads, kv_heads = (self.layer[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        both, own = torch.cat((context, a)), f"layers.{layer}.self_attn"
        q = self._linear(a, layer, "self_attn.q_proj").view(-1, heads, width)
        k = self._linear(both, layer, "self_attn.k_proj").view(-1, kv_heads, width)
        v = self._linear(both, layer, "self_attn.v_proj").view(-1, kv_heads, width)
        if f"{own}.q_norm.weight" in self.tensors:
            q, k = self._norm(q, f"{own}.q_norm"), self._norm(k, f"{own}.k_norm")
        before = torch.zeros(context.shape[0], heads, width)
        q, k = self._rotate(torch.cat((before, q)))[context.shape[0] :], self._rotate(k)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / width**0.5
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(a.shape[0], heads * width)
        return self._linear(mixed, layer, "self_attn.o_proj")
