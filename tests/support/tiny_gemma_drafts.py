"""Tiny draft models of Gemma 4's layers on disk, in DeepSpec's form, and the same in plain torch; no lowlat code.

Layers have norms on both sides, scores that are not scaled, values that are the keys before their norm, normed without
a weight, and a number that scales what they give; embeddings are scaled, logits capped.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from paper_draft_model import PaperDraftModel
from tiny_dflash import MASK, PaperDspark
from tiny_models import random_draft_values, write_draft_model

__all__ = ["PaperGemmaDspark", "PaperGemmaEagle3", "gemma_draft_model"]

SHARE, THETA, CAP = 0.25, 1e6, 5.0


def gemma_draft_model(
    directory: Path,
    target: Any,
    *,
    block: bool,
    rank: int = 0,
    keys_as_values: bool = True,
    layers: int = 1,
    head: int = 16,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Write a draft model; returns what the paper's classes take: its config in speculators' form, and its tensors.

    block  whether it fills a block: DSpark's, of a Markov head of this rank, 0: DFlash's. Else it is EAGLE3's
    head   the size of its heads
    """
    width, vocabulary, captures = target.config.hidden_size, target.config.vocab_size, [0, 2] if block else [1, 1, 2]
    heads = {"num_attention_heads": 4, "num_global_key_value_heads": 1, "num_key_value_heads": 2}
    layer = {
        "model_type": "gemma4_unified_text",
        "hidden_size": width,
        "intermediate_size": 40,
        "head_dim": 8,
        **heads,
        "global_head_dim": head,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": target.config.max_position_embeddings,
        "final_logit_softcapping": CAP,
        "attention_k_eq_v": keys_as_values,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 16,
        "layer_types": ["full_attention"] * layers,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_bidirectional_attention": "vision",
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": SHARE, "rope_theta": THETA},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    own = {"target_layer_ids": [each - 1 for each in captures], "num_target_layers": target.config.num_hidden_layers}
    own |= {"target_model_type": "gemma4_unified", "target_text_model_type": "gemma4_unified_text"}
    markov = {"markov_rank": rank, **({"markov_head_type": "vanilla"} if rank else {}), "enable_confidence_head": False}
    if block:
        own |= {"architectures": ["Gemma4DSparkModel"], "block_size": 7, "mask_token_id": MASK, "num_anchors": 512}
        own |= markov
    else:
        own |= {"architectures": ["Gemma4Eagle3Model"], "ttt_length": 7, "step_loss_decay": 0.8}
    generator = torch.Generator().manual_seed(3)
    shapes = _shapes(layer, len(captures), block=block, rank=rank)
    tensors = {name: random_draft_values(name, shape, generator) for name, shape in shapes.items()}
    tensors |= {name: torch.full((1,), 0.7 + 0.1 * n) for n, name in enumerate(shapes) if name.endswith("scalar")}
    write_draft_model(directory, {**layer, **own, "dtype": "float32"}, tensors)
    own_keys = {"transformer_layer_config": layer, "speculators_model_type": "dspark" if block else "eagle3"}
    shared = {**own_keys, "mask_token_id": MASK, "sample_from_anchor": True, "heads": markov, "norm_output": False}
    captured = {"aux_hidden_state_layer_ids": captures, "eagle_aux_hidden_state_layer_ids": captures}
    return {**shared, **captured, "fc_norm": False, "norm_before_fc": False}, tensors


def _shapes(layer: dict[str, Any], features: int, *, block: bool, rank: int) -> dict[str, tuple[int, ...]]:
    width, inner, head = layer["hidden_size"], layer["intermediate_size"], layer["global_head_dim"]
    same = layer["attention_k_eq_v"]
    queries, keys = 4 * head, (1 if same else 2) * head
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, features * width), "norm.weight": (width,)}
    shapes |= {f"{name}.weight": (layer["vocab_size"], width) for name in ("embed_tokens", "lm_head")}
    for number in range(layer["num_hidden_layers"]):
        own, columns = f"layers.{number}", width if block else 2 * width
        shapes |= {f"{own}.{norm}.weight": (width,) for norm in norms + ([] if block else ["hidden_norm"])}
        shapes |= {f"{own}.self_attn.q_proj.weight": (queries, columns)}
        shapes |= {f"{own}.self_attn.{part}_proj.weight": (keys, columns) for part in ("k" if same else "kv")}
        shapes |= {f"{own}.self_attn.{part}_norm.weight": (head,) for part in "qk"}
        shapes |= {f"{own}.self_attn.o_proj.weight": (width, queries), f"{own}.layer_scalar": (1,)}
        shapes |= {f"{own}.mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        shapes |= {f"{own}.mlp.down_proj.weight": (width, inner)}
    if block:
        shapes["hidden_norm.weight"] = (width,)
    if rank:
        shapes |= {f"markov_head.markov_w{each}.weight": (layer["vocab_size"], rank) for each in (1, 2)}
    return shapes


class _Layers:
    """Gemma 4's layers of full attention."""

    tensors: dict[str, torch.Tensor]
    layer: dict[str, Any]
    embedding: torch.Tensor
    _norm: Any
    _linear: Any

    def scale_embedding(self) -> None:
        """Embeddings are multiplied by the root of their width."""
        self.embedding = self.embedding * self.layer["hidden_size"] ** 0.5

    def after(self, h: torch.Tensor, mixed: torch.Tensor, layer: int) -> torch.Tensor:
        """The residual stream after a layer, from that before it and what its attention gives."""
        own = f"layers.{layer}"
        h = h + self._norm(mixed, f"{own}.post_attention_layernorm")
        m = self._norm(h, f"{own}.pre_feedforward_layernorm")
        gate = F.gelu(self._linear(m, layer, "mlp.gate_proj"), approximate="tanh")
        given = self._linear(gate * self._linear(m, layer, "mlp.up_proj"), layer, "mlp.down_proj")
        h = h + self._norm(given, f"{own}.post_feedforward_layernorm")
        return h * self.tensors[f"{own}.layer_scalar"]

    def mix(self, own: torch.Tensor, both: torch.Tensor, layer: int, sees: torch.Tensor) -> torch.Tensor:
        """Attention of the rows `own`, the last of `both`, which keys are made of; sees: which keys, [n, m]."""
        head, name = self.layer["global_head_dim"], f"layers.{layer}.self_attn"
        q = self._norm(self._linear(own, layer, "self_attn.q_proj").view(len(own), -1, head), f"{name}.q_norm")
        k = self._linear(both, layer, "self_attn.k_proj").view(len(both), -1, head)
        v = k if self.layer["attention_k_eq_v"] else self._linear(both, layer, "self_attn.v_proj").view(k.shape)
        v = F.rms_norm(v, (head,), None, self.layer["rms_norm_eps"])
        k = self.turned(self._norm(k, f"{name}.k_norm"))
        q = self.turned(torch.cat((torch.zeros(len(both) - len(own), q.shape[1], head), q)))[-len(own) :]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k).masked_fill(~sees, -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(len(own), -1)
        given: torch.Tensor = self._linear(mixed, layer, "self_attn.o_proj")
        return given

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding [n, heads, D] of which the first pairs turn alone."""
        half = x.shape[-1] // 2
        frequencies = THETA ** (-torch.arange(half) / half)
        frequencies[int(SHARE * half) :] = 0
        angles = torch.arange(x.shape[0])[:, None, None] * frequencies
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1)

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the softcap."""
        return CAP * torch.tanh(logits / CAP)


class PaperGemmaEagle3(_Layers, PaperDraftModel):
    """EAGLE3's row, of Gemma 4's layer."""

    def _forward(self, tokens: Sequence[int], g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        e = self.embedding[torch.tensor(list(tokens))]
        a = torch.cat((self._norm(e, "layers.0.input_layernorm"), self._norm(g, "layers.0.hidden_norm")), dim=-1)
        h = self.after(g, self.mix(a, a, 0, torch.ones(len(a), len(a)).tril().bool()), 0)
        return h, self.capped(self._norm(h, "norm") @ self.lm_head.T)


class PaperGemmaDspark(_Layers, PaperDspark):
    """DSpark's block, of Gemma 4's layers."""

    def block_states(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> torch.Tensor:
        """The normed states [count, H] of the rows of a block that make `count` drafts after x[n]."""
        h = self.embedding[torch.tensor([tokens[-1], *[MASK] * (count - 1)])]
        for layer in range(self.layer["num_hidden_layers"]):
            a = self._norm(h, f"layers.{layer}.input_layernorm")
            both = torch.cat((features, a))
            h = self.after(h, self.mix(a, both, layer, torch.ones(len(a), len(both)).bool()), layer)
        normed: torch.Tensor = self._norm(h, "norm")
        return normed

    def draft_logits(self, tokens: Sequence[int], features: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Logits [d + 1, V] after x[n] and after each of the d drafted ones: capped before their bias."""
        states = self.block_states(tokens, features, len(drafted) + 1)
        return self.capped(states @ self.lm_head.T) + self._bias(states, [tokens[-1], *drafted])

    def draft_chain(self, tokens: Sequence[int], features: torch.Tensor, depth: int) -> list[int]:
        """The likeliest token of each row after the likeliest of the row before."""
        chain: list[int] = []
        for _ in range(depth):
            states = self.block_states(tokens, features, depth)[len(chain)][None]
            logits = self.capped(states @ self.lm_head.T) + self._bias(states, [(tokens[-1], *chain)[-1]])
            chain += self.target_ids(logits[0], 1)
        return chain
