"""This module emits the EAGLE3 draft model, by its geometry and flags. Source: EAGLE-3, arXiv 2503.01840, section 3.

A row takes the embedding of a token and the feature of the position before. If the target has run there, the feature is
fc of the captured residual streams. Otherwise it is the draft model's own fed-back state, without fc.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lowlat.graphs import BufferSpec, Paging, Role
from lowlat.graphs.program import Stage
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES, Emitter
from lowlat.models.walk import (
    Tables,
    emit_attended,
    emit_ffn,
    emit_gated,
    emit_heads,
    emit_layer_scale,
    emit_output,
    emit_projection,
    emit_sandwich,
    layer_of,
)
from lowlat.sequence.paged_kv import cache_specs
from lowlat.speculators.base import StateSizes
from lowlat.speculators.draft_files.windows import draft_kv_windows, effective_window
from lowlat.speculators.eagle3.geometry import Eagle3Config

__all__ = ["Eagle3Emitter", "draft_kv_specs", "layer_name"]


def layer_name(layer: int) -> str:
    """The prefix of the canonical names of a layer's weights."""
    return f"draft_model.layers.{layer}" if layer else "draft_model"


def _caches(layer: int) -> tuple[str, str]:
    """The buffers of a layer's keys and values."""
    number = f".{layer}" if layer else ""
    return f"draft_model.k_cache{number}", f"draft_model.v_cache{number}"


def draft_kv_specs(draft: Eagle3Config, sizes: StateSizes, windows: Sequence[int | None]) -> list[BufferSpec]:
    """The KV cache of each of the draft model's layers, [P, G, block, D], and the features at block ends, [P, H], and
    of the last live row of prefill, [1, H]. `windows` are those of its layers, see `Speculator.kv_windows`."""
    num_blocks, dtype, pools = sizes.num_blocks, sizes.dtype, (sizes.num_blocks, sizes.windows)
    caches = [
        cache
        for (layer, spec), window in zip(draft.attentions.items(), windows, strict=True)
        for cache in cache_specs(
            _caches(layer), (spec.num_kv_heads, sizes.block_size, spec.head_dim), sizes.kv_dtype, pools, window
        )
    ]
    return [
        *caches,
        BufferSpec("block_features", (num_blocks, draft.hidden_size), dtype, Role.STATE, Paging.BLOCKS),
        BufferSpec("prefilled_feature", (1, draft.hidden_size), dtype, Role.STATE),
    ]


class Eagle3Emitter:
    """Appends the draft model's operations; `emitter.stage` follows a step's stages, and is constant in prefill."""

    def __init__(self, config: ModelConfig, draft: Eagle3Config, tables: Tables, draft_window: int | None) -> None:
        self.draft = draft
        self.dtype = TORCH_DTYPES[config.dtype]
        self.target_eps = config.rms_norm_eps
        self.tables = tables
        self.draft_window = draft_window
        self.last = draft.num_layers - 1
        self.layers = [
            replace(layer_of(draft, number, layer_name(number), _caches(number)), kv_window=window)
            for number, window in enumerate(draft_kv_windows(draft, draft_window))
        ]
        self.embedding = "draft_model.embed.weight" if draft.own_embedding else "embed.weight"
        self.lm_head = "draft_model.lm_head" if draft.own_lm_head else "lm_head"
        self.head_shard = draft.shard if draft.own_lm_head else config.shard  # the target's is cut as it is there

    def emit_fc(self, emitter: Emitter, features: str) -> str:
        """Append fc: captured features [M, F * Ht] to [M, H]; with `final_hidden` the feature is used as it is."""
        draft = self.draft
        if draft.final_hidden:
            return emitter.norm(features, "norm.weight", self.target_eps, "hidden")
        if draft.norm_before_fc:
            features = emitter.norm(features, "draft_model.input_norm.weight", draft.rms_norm_eps, "features.normed")
        if draft.fc_norm:
            normed = emitter.scratch("features.split", *emitter.builder.spec(features).shape)
            count = len(draft.capture_boundaries)
            emitter.emit(
                "split_norms",
                {"x": features, **emitter.live()},
                {"out": normed},
                weights={f"weight{k}": f"draft_model.fc_norm.{k}.weight" for k in range(count)},
                eps=draft.rms_norm_eps,
            )
            features = normed
        product = emitter.linear(features, "draft_model.fc", draft.hidden_size, "fc")
        return emitter.cast(product, "hidden")

    def emit_input(self, emitter: Emitter, tokens: str, hidden: str) -> tuple[str, str]:
        """Append the first layer's input: normed embedding next to normed feature [M, 2H], and the residual [M, H]."""
        draft = self.draft
        width, scale = draft.hidden_size, draft.embedding_scale  # files that have none were trained with plain rows
        embedded = emitter.embed(tokens, self.embedding, width, "embedded", scale=scale)
        both = emitter.scratch("both", emitter.rows.count, 2 * draft.hidden_size)
        normed = emitter.scratch("hidden.normed", emitter.rows.count, draft.hidden_size)
        emitter.emit(
            "concat_norms",
            {"embedded": embedded, "hidden": hidden, **emitter.live()},
            {"out": both, "normed_hidden": normed},
            weights={
                "embed_weight": "draft_model.embed_norm.weight",
                "hidden_weight": "draft_model.hidden_norm.weight",
            },
            eps=draft.rms_norm_eps,
        )
        return both, normed if draft.norm_before_residual else hidden

    def emit_stack(self, emitter: Emitter, both: str, residual: str) -> tuple[str, str]:
        """Append the keys and values of all layers; the layers before the last run over all rows.

        Returns the input of the last layer's attention, [M, H] or of a single layer [M, 2H], and its residual [M, H].
        """
        x = both
        for number, layer in enumerate(self.layers[:-1]):
            letters = layer.attention.projected
            product = emit_projection(emitter, layer, x, letters, "qkv")
            query = emit_heads(emitter, layer, product, letters, self.tables)["q"]
            middle = self._attend(emitter, x, query, residual, number)
            _move(emitter, Stage.DRAFT_FFN)
            residual = self.emit_ffn(emitter, middle, number)
            _move(emitter, Stage.DRAFT_ATTENTION_FMHA)
            x = emitter.norm(residual, f"{layer_name(number + 1)}.attn_norm.weight", layer.eps, "input.normed")
        letters = self.layers[-1].attention.projected.removeprefix("q")
        product = emit_projection(emitter, self.layers[-1], x, letters, "kv")
        emit_heads(emitter, self.layers[-1], product, letters, self.tables, normed="k_normed")
        return x, residual

    def emit_attention(self, emitter: Emitter, x: str, residual: str) -> str:
        """Append the last layer's attention over its cache, and the residual sum [M, H]."""
        layer = self.layers[-1]
        product = emit_projection(emitter, layer, x, "q", "query")
        query = emit_heads(emitter, layer, product, "q", self.tables, normed="q_normed")["q"]
        return self._attend(emitter, x, query, residual, self.last)

    def _attend(self, emitter: Emitter, x: str, query: str, residual: str, number: int) -> str:
        """Append attention with queries from the input x, and the residual sum [M, H]."""
        layer = self.layers[number]
        window, keep_first = effective_window(layer.attention.window, self.draft_window)
        seen: dict[str, Any] = {"first": 1, "window": window}
        if emitter.rows.chunk is None:
            seen["keep_first"] = keep_first
        attended = emit_attended(emitter, layer, query, **seen)
        output = emit_output(emitter, layer, emit_gated(emitter, layer, x, attended))
        return emitter.add(residual, emit_sandwich(emitter, layer, output, "post_attn"), self._stream("middle", number))

    def emit_ffn(self, emitter: Emitter, middle: str, number: int) -> str:
        """Append a layer's FFN and its residual sum [M, H]."""
        layer = self.layers[number]
        normed = emitter.norm(middle, f"{layer.name}.ffn_norm.weight", layer.eps, "normed")
        output = emit_sandwich(emitter, layer, emit_ffn(emitter, layer, normed), "post_ffn")
        total = emitter.add(middle, output, self._stream("out", number))
        return emit_layer_scale(emitter, layer, total, self._stream("scaled", number)) if layer.spec.scaled else total

    def emit_logits(self, emitter: Emitter, residual: str) -> tuple[str, str]:
        """Append the LM head; returns logits [M, Vd] and the state that may be fed back."""
        draft = self.draft
        emitter.stage = Stage.DRAFT_LM_HEAD
        normed = emitter.norm(residual, "draft_model.norm.weight", draft.rms_norm_eps, "final")
        width, cap = draft.draft_vocab_size, draft.logit_softcap
        logits = emitter.vocabulary(normed, self.lm_head, width, "logits", self.head_shard, softcap=cap)
        return logits, normed if draft.norm_output else residual

    def emit_draft(self, emitter: Emitter, logits: str, num_ranks: int) -> str:
        """Append the choice of the k likeliest ids, mapped to target ids: tokens [M, k]."""
        tokens = emitter.scratch("top_tokens", emitter.rows.count, num_ranks, dtype=torch.int32)
        emitter.emit(
            "draft_topk",
            {"logits": logits, **emitter.live()},
            {"out": tokens},
            weights={"draft_to_target": "draft_model.draft_to_target"},
            k=num_ranks,
        )
        return tokens

    def _stream(self, part: str, layer: int) -> str:
        """The name of a layer's residual stream; the last layer's is the draft model's."""
        return f"residual.{part}" if layer == self.last else f"layers.{layer}.residual.{part}"


def _move(emitter: Emitter, stage: Stage) -> None:
    """Set the stage of the operations that follow; in prefill it stays."""
    if emitter.rows.chunk is None:
        emitter.stage = stage
