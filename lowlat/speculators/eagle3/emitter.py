"""The EAGLE3 draft model, from its geometry and flags. Source: EAGLE-3, arXiv 2503.01840, section 3.

A row takes the embedding of a token and the feature before it. The feature is the fc of captured residual streams
where the target has run, and the draft model's own fed-back state where it has not; fc is never applied to the latter.
"""

import torch

from lowlat.graphs import BufferSpec, Paging, Role
from lowlat.models.geometry import DraftConfig, ModelConfig
from lowlat.models.layers import TORCH_DTYPES, Emitter
from lowlat.models.program import Stage

__all__ = ["Eagle3Emitter", "draft_kv_specs"]

DRAFT_CACHES = ("head.k_cache", "head.v_cache")
WINDOW_KEEPS_FIRST = 4


def draft_kv_specs(draft: DraftConfig, dtype: torch.dtype, num_blocks: int, block_size: int) -> list[BufferSpec]:
    """The draft model's KV cache, [P, G, block, D], and the features at block ends, [P, H], and of the last live row of
    prefill, [1, H]."""
    shape = (num_blocks, draft.num_kv_heads, block_size, draft.head_dim)
    return [
        *(BufferSpec(name, shape, dtype, Role.STATE, Paging.POSITIONS) for name in DRAFT_CACHES),
        BufferSpec("block_features", (num_blocks, draft.hidden_size), dtype, Role.STATE, Paging.BLOCKS),
        BufferSpec("prefilled_feature", (1, draft.hidden_size), dtype, Role.STATE),
    ]


class Eagle3Emitter:
    """Appends the draft model's operations; `emitter.stage` moves with the parts of the step."""

    def __init__(
        self, config: ModelConfig, draft: DraftConfig, tables: tuple[str, str], draft_window: int | None
    ) -> None:
        self.draft = draft
        self.dtype = TORCH_DTYPES[config.dtype]
        self.tables = tables
        self.draft_window = draft_window
        self.embedding = "head.embed.weight" if draft.own_embedding else "embed.weight"
        self.lm_head = "head.lm_head" if draft.own_lm_head else "lm_head"

    def emit_fc(self, emitter: Emitter, features: str) -> str:
        """Captured features [M, F * Ht] to the draft model's hidden width [M, H]."""
        draft = self.draft
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

    def emit_kv(self, emitter: Emitter, both: str) -> None:
        """Keys and values of all rows, written to the draft model's cache."""
        draft = self.draft
        product = emitter.linear(both, "head.kv", 2 * draft.kv_size, "kv", bias=draft.qkv_bias)
        if draft.qk_norm:
            product = emitter.qk_norm(product, "head", (0, draft.num_kv_heads), draft.head_dim, draft.rms_norm_eps)
        counts = {"k": draft.num_kv_heads, "v": draft.num_kv_heads}
        parts = emitter.rotate(product, counts, draft.head_dim, self.tables)
        emitter.kv_write(parts["k"], parts["v"], DRAFT_CACHES)

    def emit_attention(self, emitter: Emitter, both: str, residual: str) -> str:
        """Queries of these rows against the draft model's cache, and the residual sum [M, H]."""
        draft = self.draft
        product = emitter.linear(both, "head.q", draft.query_size, "query", bias=draft.qkv_bias)
        if draft.qk_norm:
            product = emitter.qk_norm(product, "head", (draft.num_heads, 0), draft.head_dim, draft.rms_norm_eps)
        query = emitter.rotate(product, {"q": draft.num_heads}, draft.head_dim, self.tables)["q"]
        attended = emitter.attention(
            query,
            DRAFT_CACHES,
            draft.query_size,
            scale=draft.head_dim**-0.5,
            first=1,
            window=self.draft_window,
            keep_first=WINDOW_KEEPS_FIRST if self.draft_window else 0,
        )
        output = emitter.linear(attended, "head.o", draft.hidden_size, "output", bias=draft.output_bias)
        return emitter.add(residual, output, "residual.middle")

    def emit_ffn(self, emitter: Emitter, middle: str) -> str:
        """The gated FFN and its residual sum [M, H]."""
        draft = self.draft
        normed = emitter.norm(middle, "head.ffn_norm.weight", draft.rms_norm_eps, "normed")
        inner, width = draft.intermediate_size, draft.hidden_size
        output = emitter.gated_ffn(normed, "head", inner, width, bias=draft.mlp_bias)
        return emitter.add(middle, output, "residual.out")

    def emit_draft(self, emitter: Emitter, residual: str, num_ranks: int) -> tuple[str, str]:
        """LM head and the likeliest ids, mapped to target ids; returns tokens [M, k] and the fed-back state."""
        draft = self.draft
        emitter.stage = Stage.EAGLE_DRAFT_LM_HEAD
        normed = emitter.norm(residual, "head.norm.weight", draft.rms_norm_eps, "final")
        logits = emitter.linear(normed, self.lm_head, draft.draft_vocab_size, "logits")
        tokens = emitter.scratch("top_tokens", emitter.rows.count, num_ranks, dtype=torch.int32)
        emitter.emit(
            "draft_topk",
            {"logits": logits, **emitter.live()},
            {"out": tokens},
            weights={"draft_to_target": "head.draft_to_target"},
            k=num_ranks,
        )
        return tokens, normed if draft.norm_output else residual

    def _round(self, emitter: Emitter, product: str, name: str) -> str:
        out = emitter.scratch(name, *emitter.builder.spec(product).shape)
        emitter.emit("cast", {"x": product}, {"out": out})
        return out
