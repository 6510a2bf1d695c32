"""Tiny DFlash and DSpark draft models on disk, and the same in plain torch, from the equations; no lowlat code.

A draft model's keys and values of a position that the target has run are made of the target's residual streams; the
block's rows are the last token and masks. DSpark's logits get a bias by the token drafted before. Every call computes
the whole sequence afresh.
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
    flags   num_attention_heads, num_key_value_heads, num_hidden_layers, hidden_size, head_dim, intermediate_size,
            captures (boundaries), draft_vocab_size, own_embedding, own_lm_head, qk_norm (True), attention_bias,
            block_size, anchor (the first row drafts, too); markov_rank, with which it is DSpark's, markov_head_type,
            confidence ("markov", "states" or "")
    """
    config = target.config
    if copies:
        heads = flags.get("num_attention_heads", 1)
        flags |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": config.hidden_size}
        flags |= {"qk_norm": False, "attention_bias": True, "own_embedding": True, "own_lm_head": True}
    width, captures = (
        flags.get("hidden_size", config.hidden_size),
        list(flags.get("captures", (1,) if copies else (1, 2))),
    )
    layer = {
        "model_type": "qwen3" if flags.get("qk_norm", True) else "llama",
        "hidden_size": width,
        "intermediate_size": flags.get("intermediate_size", 40),
        "num_hidden_layers": flags.get("num_hidden_layers", 2),
        "num_attention_heads": flags.get("num_attention_heads", 4),
        "num_key_value_heads": flags.get("num_key_value_heads", 2),
        "head_dim": flags.get("head_dim", 8),
        "hidden_act": flags.get("hidden_act", "silu"),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
    method = "dspark" if "markov_rank" in flags else "dflash"
    anchor = bool(flags.get("anchor", method == "dspark"))
    shared = {
        "speculators_model_type": method,
        "sample_from_anchor": anchor,
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
        _copy(tensors, target, layer["num_hidden_layers"], flags["num_attention_heads"])
    heads = _heads(flags) if method == "dspark" else {}
    block = {"block_size": flags.get("block_size", 8), "draft_vocab_size": drafted, **heads}
    ids = {"target_layer_ids": [boundary - 1 for boundary in captures], "mask_token_id": MASK}
    target_layers = {"num_target_layers": config.num_hidden_layers}
    if layout == "speculators":
        named = "DSparkSpeculator" if heads else "DFlashSpeculator"
        own = {"architectures": [named], "target_hidden_size": config.hidden_size, **block}
        write_draft_model(directory, {**shared, **own}, tensors)
    elif layout == "deepspec":
        own = {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, **target_layers, **ids, **block}
        write_draft_model(directory, {**layer, **own}, tensors)
    else:
        own = {"architectures": ["DFlashDraftModel"], "dflash_config": ids, **target_layers, **block}
        write_draft_model(directory, {**layer, **own}, tensors)
    return {**shared, "heads": heads}, tensors


def _heads(flags: dict[str, Any]) -> dict[str, Any]:
    confidence = flags.get("confidence", "markov")
    return {
        "markov_rank": flags["markov_rank"],
        "markov_head_type": flags.get("markov_head_type", "vanilla"),
        "enable_confidence_head": bool(confidence),
        "confidence_head_with_markov": confidence == "markov",
    }


def _copy(tensors: dict[str, torch.Tensor], target: Any, num_layers: int, heads: int) -> None:
    """Keys that are the same everywhere, and queries that RoPE turns to the position before; values are the input."""
    width = target.config.hidden_size
    key, turned = torch.full((width,), 7.0), 10000.0 ** (-torch.arange(width // 2) / (width // 2))
    query = torch.cat((7 * (turned.cos() + turned.sin()), 7 * (turned.cos() - turned.sin())))
    for layer in range(num_layers):
        own = f"layers.{layer}"
        for part, bias in (("q", query), ("k", key), ("v", torch.zeros(width))):
            tensors[f"{own}.self_attn.{part}_proj.weight"].zero_()
            tensors[f"{own}.self_attn.{part}_proj.bias"] = bias.repeat(heads)
        tensors[f"{own}.self_attn.v_proj.weight"] = torch.eye(width).repeat(heads, 1)
        tensors[f"{own}.self_attn.o_proj.weight"] = torch.eye(width).repeat(1, heads) * (0.1 if layer else 1) / heads
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
    return shapes | (_head_shapes(target.vocab_size, width, flags) if "markov_rank" in flags else {})


def _head_shapes(vocabulary: int, width: int, flags: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, shapes = _heads(flags), dict[str, tuple[int, ...]]()
    rank = heads["markov_rank"]
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocabulary, rank)
        shapes["markov_head.markov_w2.weight"] = (flags.get("draft_vocab_size", vocabulary), rank)
    if rank and heads["markov_head_type"] == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, width + rank), "markov_head.gate_proj.bias": (rank,)}
    if heads["enable_confidence_head"]:
        reads = width + (rank if heads["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, reads), "confidence_head.proj.bias": (1,)}
    return shapes


class PaperDflash(PaperDraftModel):
    """One DFlash draft model over one target; what a block drafts depends on how long it is."""

    def features(self, captured: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's residual streams, each [n, Ht], low to high -> what keys and values are made of, [n, H]."""
        return self._norm(torch.cat(list(captured), dim=-1) @ self.tensors["fc.weight"].T, "hidden_norm")

    def draft_logits(self, tokens: Sequence[int], features: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Logits [d + 1, Vd] of a block of d + 1 drafts after x[n], whatever the d drafts were."""
        return F.linear(self.block_states(tokens, features, len(drafted) + 1), self.lm_head)

    def block_states(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> torch.Tensor:
        """The normed states [count, H] of the rows of a block that make `count` drafts after x[n]."""
        first = int(not self.config["sample_from_anchor"])
        masks = [self.config["mask_token_id"]] * (count - 1 + first)
        h = self.embedding[torch.tensor([tokens[-1], *masks])]
        for layer in range(self.layer["num_hidden_layers"]):
            h = h + self._attend_block(self._norm(h, f"layers.{layer}.input_layernorm"), features, layer)
            m = self._norm(h, f"layers.{layer}.post_attention_layernorm")
            gated = self.activated(self._linear(m, layer, "mlp.gate_proj")) * self._linear(m, layer, "mlp.up_proj")
            h = h + self._linear(gated, layer, "mlp.down_proj")
        normed: torch.Tensor = self._norm(h, "norm")
        return normed[first:]

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


class PaperDspark(PaperDflash):
    """One DSpark draft model over one target: each draft's logits have a bias by the token before it."""

    def draft_logits(self, tokens: Sequence[int], features: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Logits [d + 1, Vd] after x[n] and after each of the d drafted ones."""
        states = self.block_states(tokens, features, len(drafted) + 1)
        return F.linear(states, self.lm_head) + self._bias(states, [tokens[-1], *drafted])

    def draft_chain(self, tokens: Sequence[int], features: torch.Tensor, depth: int) -> list[int]:
        """The likeliest token of each row after the likeliest of the row before."""
        states, chain = self.block_states(tokens, features, depth), [tokens[-1]]
        for row in states:
            logits = row @ self.lm_head.T + self._bias(row[None], chain[-1:])[0]
            chain += self.target_ids(logits, 1)
        return chain[1:]

    def _bias(self, states: torch.Tensor, before: Sequence[int]) -> torch.Tensor:
        if not self.config["heads"]["markov_rank"]:
            return torch.zeros(len(states), 1)
        known = self.tensors["markov_head.markov_w1.weight"][torch.tensor(list(before))]
        if self.config["heads"]["markov_head_type"] == "gated":
            weight, bias = (self.tensors[f"markov_head.gate_proj.{part}"] for part in ("weight", "bias"))
            known = torch.sigmoid(F.linear(torch.cat((states, known), dim=-1), weight, bias)) * known
        return F.linear(known, self.tensors["markov_head.markov_w2.weight"])
