"""The EAGLE3 draft model, from its geometry and flags. Source: EAGLE-3, arXiv 2503.01840, section 3.

A row takes the embedding of a token and the feature before it. The feature is the fc of captured residual streams
where the target has run, and the draft model's own fed-back state where it has not; fc is never applied to the latter.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lowlat.graphs import BufferSpec, Paging, Role
from lowlat.graphs.program import Stage
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layers import TORCH_DTYPES, Emitter
from lowlat.sequence.paged_kv import cache_specs
from lowlat.speculators.base import StateSizes
from lowlat.speculators.eagle3.windows import draft_kv_windows, effective_window

__all__ = ["Eagle3Emitter", "draft_kv_specs", "layer_name"]


def layer_name(layer: int) -> str:
    """The beginning of the canonical names of a layer's weights."""
    return f"head.layers.{layer}" if layer else "head"


def _caches(layer: int) -> tuple[str, str]:
    """The buffers of a layer's keys and values."""
    return (f"head.k_cache.{layer}", f"head.v_cache.{layer}") if layer else ("head.k_cache", "head.v_cache")


def draft_kv_specs(draft: DraftConfig, sizes: StateSizes, windows: Sequence[int | None]) -> list[BufferSpec]:
    """The KV cache of each of the draft model's layers, [P, G, block, D], and the features at block ends, [P, H], and
    of the last live row of prefill, [1, H]. `windows` are those of its layers, see `Speculator.kv_windows`."""
    dtype, own = sizes.dtype, (draft.num_kv_heads, sizes.block_size, draft.head_dim)
    given = (own, sizes.kv_dtype, (sizes.num_blocks, sizes.windows))
    return [
        *(spec for layer, window in enumerate(windows) for spec in cache_specs(_caches(layer), *given, window)),
        BufferSpec("block_features", (sizes.num_blocks, draft.hidden_size), dtype, Role.STATE, Paging.BLOCKS),
        BufferSpec("prefilled_feature", (1, draft.hidden_size), dtype, Role.STATE),
    ]


class Eagle3Emitter:
    """Appends the draft model's operations; `emitter.stage` moves with the parts of a step, and stays in prefill."""

    def __init__(
        self, config: ModelConfig, draft: DraftConfig, tables: tuple[str, str], draft_window: int | None
    ) -> None:
        self.draft = draft
        self.dtype = TORCH_DTYPES[config.dtype]
        self.target_eps = config.rms_norm_eps
        self.tables = tables
        self.draft_window = draft_window
        self.windows = draft_kv_windows(draft, draft_window)
        self.last = draft.num_layers - 1
        self.name = layer_name(self.last)
        self.embedding = "head.embed.weight" if draft.own_embedding else "embed.weight"
        self.lm_head = "head.lm_head" if draft.own_lm_head else "lm_head"
        self.head_shard = draft.shard if draft.own_lm_head else config.shard  # the target's is cut as it is there

    def emit_fc(self, emitter: Emitter, features: str) -> str:
        """Captured features [M, F * Ht] to the draft model's hidden width [M, H]; the final hidden state is it."""
        draft = self.draft
        if draft.final_hidden:
            return emitter.norm(features, "norm.weight", self.target_eps, "hidden")
        if draft.norm_before_fc:
            features = emitter.norm(features, "head.input_norm.weight", draft.rms_norm_eps, "features.normed")
        if draft.fc_norm:
            normed = emitter.scratch("features.split", *emitter.builder.spec(features).shape)
            count = len(draft.capture_boundaries)
            emitter.emit(
                "split_norms",
                {"x": features, **emitter.live()},
                {"out": normed},
                weights={f"weight{k}": f"head.fc_norm.{k}.weight" for k in range(count)},
                eps=draft.rms_norm_eps,
            )
            features = normed
        product = emitter.linear(features, "head.fc", draft.hidden_size, "fc")
        return self._round(emitter, product, "hidden")

    def emit_input(self, emitter: Emitter, tokens: str, hidden: str) -> tuple[str, str]:
        """Normed embedding beside normed hidden [M, 2H], and the residual [M, H]."""
        draft = self.draft
        embedded = emitter.embed(tokens, self.embedding, draft.hidden_size, "embedded")
        both = emitter.scratch("both", emitter.rows.count, 2 * draft.hidden_size)
        normed = emitter.scratch("hidden.normed", emitter.rows.count, draft.hidden_size)
        emitter.emit(
            "concat_norms",
            {"embedded": embedded, "hidden": hidden, **emitter.live()},
            {"out": both, "normed_hidden": normed},
            weights={"embed_weight": "head.embed_norm.weight", "hidden_weight": "head.hidden_norm.weight"},
            eps=draft.rms_norm_eps,
        )
        return both, normed if draft.norm_before_residual else hidden

    def emit_stack(self, emitter: Emitter, both: str, residual: str) -> tuple[str, str]:
        """Keys and values of all layers, for which the layers before the last run over all rows.

        Returns the input of the last layer's attention, [M, H] or of a single layer [M, 2H], and its residual [M, H].
        """
        draft, x = self.draft, both
        for layer in range(self.last):
            middle = self._emit_layer_attention(emitter, x, residual, layer)
            _move(emitter, Stage.EAGLE_DRAFT_FFN)
            residual = self.emit_ffn(emitter, middle, layer)
            _move(emitter, Stage.EAGLE_DRAFT_ATTENTION_FMHA)
            x = emitter.norm(residual, f"{layer_name(layer + 1)}.attn_norm.weight", draft.rms_norm_eps, "input.normed")
        product = emitter.linear(x, f"{self.name}.kv", 2 * draft.kv_size, "kv", bias=draft.qkv_bias)
        if draft.qk_norm:
            product = self._normed_heads(emitter, product, "k_normed", self.last, (0, draft.num_kv_heads))
        counts = {"k": draft.num_kv_heads, "v": draft.num_kv_heads}
        parts = emitter.rotate(product, counts, draft.head_dim, self.tables)
        emitter.kv_write(parts["k"], parts["v"], _caches(self.last), self.windows[self.last])
        return x, residual

    def emit_attention(self, emitter: Emitter, x: str, residual: str) -> str:
        """Queries of these rows against the last layer's cache, and the residual sum [M, H]."""
        draft = self.draft
        product = emitter.linear(x, f"{self.name}.q", draft.query_size, "query", bias=draft.qkv_bias)
        if draft.qk_norm:
            product = self._normed_heads(emitter, product, "q_normed", self.last, (draft.num_heads, 0))
        query = emitter.rotate(product, {"q": draft.num_heads}, draft.head_dim, self.tables)["q"]
        return self._attend(emitter, query, residual, self.last)

    def _emit_layer_attention(self, emitter: Emitter, x: str, residual: str, layer: int) -> str:
        """Attention of a layer before the last, whose queries, keys and values are of the same rows: [M, H]."""
        draft, name, heads = self.draft, layer_name(layer), (self.draft.num_heads, self.draft.num_kv_heads)
        width = draft.query_size + 2 * draft.kv_size
        product = emitter.linear(x, f"{name}.qkv", width, "qkv", bias=draft.qkv_bias)
        if draft.qk_norm:
            product = self._normed_heads(emitter, product, "qk_normed", layer, heads)
        counts = {"q": heads[0], "k": heads[1], "v": heads[1]}
        parts = emitter.rotate(product, counts, draft.head_dim, self.tables)
        emitter.kv_write(parts["k"], parts["v"], _caches(layer), self.windows[layer])
        return self._attend(emitter, parts["q"], residual, layer)

    def _normed_heads(self, emitter: Emitter, product: str, name: str, layer: int, heads: tuple[int, int]) -> str:
        draft = self.draft
        return emitter.qk_norm(product, layer_name(layer), heads, draft.head_dim, draft.rms_norm_eps, name)

    def _attend(self, emitter: Emitter, query: str, residual: str, layer: int) -> str:
        draft = self.draft
        window, keep_first = effective_window(draft.windows[layer], self.draft_window)
        seen: dict[str, Any] = {"scale": draft.head_dim**-0.5, "first": 1, "window": window}
        if emitter.rows.chunk is None:
            seen["keep_first"] = keep_first
        attended = emitter.attention(query, _caches(layer), draft.query_size, shard=draft.shard, **seen)
        name, width = f"{layer_name(layer)}.o", draft.hidden_size
        output = emitter.output(attended, name, width, draft.shard, bias=draft.output_bias)
        return emitter.add(residual, output, self._stream("middle", layer))

    def emit_ffn(self, emitter: Emitter, middle: str, layer: int) -> str:
        """The gated FFN and its residual sum [M, H]."""
        draft, name = self.draft, layer_name(layer)
        normed = emitter.norm(middle, f"{name}.ffn_norm.weight", draft.rms_norm_eps, "normed")
        inner, width = draft.intermediate_size, draft.hidden_size
        output = emitter.gated_ffn(normed, name, inner, width, bias=draft.mlp_bias, shard=draft.shard)
        return emitter.add(middle, output, self._stream("out", layer))

    def emit_logits(self, emitter: Emitter, residual: str) -> tuple[str, str]:
        """LM head; returns logits [M, Vd] and the state that may be fed back."""
        draft = self.draft
        emitter.stage = Stage.EAGLE_DRAFT_LM_HEAD
        normed = emitter.norm(residual, "head.norm.weight", draft.rms_norm_eps, "final")
        logits = emitter.vocabulary(normed, self.lm_head, draft.draft_vocab_size, "logits", self.head_shard)
        return logits, normed if draft.norm_output else residual

    def emit_draft(self, emitter: Emitter, logits: str, num_ranks: int) -> str:
        """The likeliest ids, mapped to target ids: tokens [M, k]."""
        tokens = emitter.scratch("top_tokens", emitter.rows.count, num_ranks, dtype=torch.int32)
        emitter.emit(
            "draft_topk",
            {"logits": logits, **emitter.live()},
            {"out": tokens},
            weights={"draft_to_target": "head.draft_to_target"},
            k=num_ranks,
        )
        return tokens

    def _stream(self, part: str, layer: int) -> str:
        """The name of a layer's residual stream: the last one's is the draft model's."""
        return f"residual.{part}" if layer == self.last else f"layers.{layer}.residual.{part}"

    def _round(self, emitter: Emitter, product: str, name: str) -> str:
        out = emitter.scratch(name, *emitter.builder.spec(product).shape)
        emitter.emit("cast", {"x": product}, {"out": out})
        return out


def _move(emitter: Emitter, stage: Stage) -> None:
    """Let the operations that follow belong to another stage of the step."""
    if emitter.rows.chunk is None:
        emitter.stage = stage
