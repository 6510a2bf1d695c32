"""The EAGLE3 head in plain torch, from the paper's equations and the checkpoint's own tensors; no lowlat code.

A row j of the head takes the token after position j and the feature of position j: the fc of the target's captured
residual streams where the target has run, its own fed-back state where it has not. Every call computes the whole
sequence afresh: no cache, no rows laid out in advance.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

WINDOW_SINKS = 4  # rows that a windowed head keeps seeing


class PaperDraftModel:
    """One head over one target, from config.json and tensors in the speculators' names."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Any, window: int | None = None
    ) -> None:
        self.config, self.layer, self.tensors = config, config["transformer_layer_config"], tensors
        self.embedding = tensors.get("embed_tokens.weight", target.model.embed_tokens.weight)
        self.lm_head = tensors.get("lm_head.weight", target.lm_head.weight)
        self.offsets = tensors.get("d2t", torch.zeros(self.lm_head.shape[0], dtype=torch.int64))
        self.window = window
        self.final_norm = target.model.norm

    def features(self, captured: Sequence[torch.Tensor]) -> torch.Tensor:
        """The target's residual streams, each [n, Ht], low to high -> g [n, H]; without fc, normed as the target's."""
        if "fc.weight" not in self.tensors:
            normed: torch.Tensor = self.final_norm(captured[0])
            return normed
        if self.config["fc_norm"]:
            captured = [self._norm(x, f"fc_norm.{k}") for k, x in enumerate(captured)]
        joined = torch.cat(list(captured), dim=-1)
        if self.config["norm_before_fc"]:
            joined = self._norm(joined, "input_norm")
        return joined @ self.tensors["fc.weight"].T

    def draft_logits(self, tokens: Sequence[int], features: torch.Tensor, drafted: Sequence[int]) -> torch.Tensor:
        """Draft logits [d + 1, Vd] after the tokens x[0..n], and after each of the d drafted ones.

        features are g [n, H] of x[0..n-1]; the head's own states stand in for those of x[n] and of the drafts.
        """
        if "mask_hidden" in self.tensors:
            return self._parallel_logits(tokens, features, len(drafted))
        following, states, logits = list(tokens[1:]), features, []
        for token in (*drafted, None):
            feedback, rows = self._forward(following, states)
            logits.append(rows[-1])
            states = torch.cat((states, feedback[-1:]))
            following += [] if token is None else [token]
        return torch.stack(logits)

    def _parallel_logits(self, tokens: Sequence[int], features: torch.Tensor, num_masks: int) -> torch.Tensor:
        """P-EAGLE's: after the rows of the tokens those of the mask, all in one pass; whatever was drafted."""
        hidden = self.tensors["mask_hidden"].reshape(1, -1)
        state = self.features(hidden.chunk(len(self.config["eagle_aux_hidden_state_layer_ids"]), dim=-1))
        following = [*tokens[1:], *[self.config["mask_token_id"]] * num_masks]
        rows = self._forward(following, torch.cat((features, state.expand(num_masks, -1))))[1]
        return rows[-num_masks - 1 :]

    def draft_chain(self, tokens: Sequence[int], features: torch.Tensor, depth: int) -> list[int]:
        """The greedy chain of `depth` drafts, as target ids; arguments as in `draft_logits`."""
        chain: list[int] = []
        for _ in range(depth):
            chain += self.target_ids(self.draft_logits(tokens, features, chain)[-1], 1)
        return chain

    def target_ids(self, logits: torch.Tensor, count: int) -> list[int]:
        """The target's ids of the likeliest draft ids [Vd], likeliest first."""
        best = logits.topk(count).indices
        return (best + self.offsets[best]).tolist()

    def _forward(self, tokens: Sequence[int], g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows: the states to feed back [n, H] and the logits [n, Vd]."""
        e = self.embedding[torch.tensor(list(tokens))]
        normed = self._norm(g, "layers.0.hidden_norm")
        a = torch.cat((self._norm(e, "layers.0.input_layernorm"), normed), dim=-1)
        h = normed if self.config["norm_before_residual"] else g
        for layer in range(self.layer["num_hidden_layers"]):
            a = self._norm(h, f"layers.{layer}.input_layernorm") if layer else a
            h = h + self._attend(a, layer)
            m = self._norm(h, f"layers.{layer}.post_attention_layernorm")
            gated = self.activated(self._linear(m, layer, "mlp.gate_proj")) * self._linear(m, layer, "mlp.up_proj")
            h = h + self._linear(gated, layer, "mlp.down_proj")
        z = self._norm(h, "norm")
        return z if self.config["norm_output"] else h, z @ self.lm_head.T

    def activated(self, gate: torch.Tensor) -> torch.Tensor:
        """The function of gates."""
        return F.silu(gate) if self.layer["hidden_act"] == "silu" else F.gelu(gate, approximate="tanh")

    def _attend(self, a: torch.Tensor, layer: int) -> torch.Tensor:
        count, width = a.shape[0], self.layer["head_dim"]
        heads, kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        q = self._linear(a, layer, "self_attn.q_proj").view(count, heads, width)
        k = self._linear(a, layer, "self_attn.k_proj").view(count, kv_heads, width)
        v = self._linear(a, layer, "self_attn.v_proj").view(count, kv_heads, width)
        if f"layers.{layer}.self_attn.q_norm.weight" in self.tensors:
            q = self._norm(q, f"layers.{layer}.self_attn.q_norm")
            k = self._norm(k, f"layers.{layer}.self_attn.k_norm")
        q, k = self._rotate(q), self._rotate(k)
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / width**0.5
        weights = scores.masked_fill(~self._visible(count, layer), -torch.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(count, heads * width)
        return self._linear(mixed, layer, "self_attn.o_proj")

    def _visible(self, count: int, layer: int) -> torch.Tensor:
        """Which rows j a row i sees: those of its window, the smaller of the layer's own and the one asked for."""
        i, j = torch.arange(count)[:, None], torch.arange(count)[None]
        slides = self.layer.get("layer_types", ["full_attention"] * (layer + 1))[layer] == "sliding_attention"
        given = [self.window] if self.window is not None else []
        windows = [*given, self.layer["sliding_window"]] if slides else given
        if not windows:
            return j <= i
        return (j <= i) & ((j > i - min(windows)) | (j < (0 if slides else WINDOW_SINKS)))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding [n, heads, D], the halves of a head paired."""
        half = x.shape[-1] // 2
        frequencies, factor = self.layer["rope_theta"] ** (-torch.arange(half) / half), 1.0
        if scaling := self.layer.get("rope_scaling"):
            from transformers import LlamaConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            rope = {"rope_theta": self.layer["rope_theta"], **scaling}
            config = LlamaConfig(head_dim=2 * half, max_position_embeddings=4096, rope_parameters=rope)
            frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config)
        angles = torch.arange(x.shape[0])[:, None] * frequencies
        cos, sin = factor * angles.cos()[:, None], factor * angles.sin()[:, None]
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.layer["rms_norm_eps"])

    def _linear(self, x: torch.Tensor, layer: int, name: str) -> torch.Tensor:
        name = f"layers.{layer}.{name}"
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
