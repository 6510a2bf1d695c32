"""This module emits the DFlash draft model from its geometry. Source: DFlash, z-lab.

For every position that the target has run, keys and values come only from the target's features: captured residual
streams go through fc and a norm, are projected for all layers at once, and are stored at the position. Queries come
from a block of rows: the last known token, followed by mask tokens, each at its position. Every row of the block
attends to all stored positions, or to those of a window, and to the whole block; in a causal layer, not to later rows.
The next step overwrites the block's keys and values. The row at a position drafts the token of that position.
"""

from dataclasses import replace

import torch

from lowlat.graphs import BufferSpec
from lowlat.graphs.program import Stage
from lowlat.models.layers import Emitter, Rows
from lowlat.models.walk import (
    Tables,
    emit_attended,
    emit_ffn,
    emit_heads,
    emit_layer_scale,
    emit_output,
    emit_projection,
    emit_sandwich,
    layer_of,
)
from lowlat.sequence.paged_kv import cache_specs
from lowlat.speculators.base import PrefillScope, Scope, StepScope
from lowlat.speculators.dflash.geometry import DflashConfig, Selector
from lowlat.speculators.draft_parts import BY_SLOT, assign_drafts, emit_accepted_rows, seen_before
from lowlat.speculators.tree.dynamic import DynamicTree
from lowlat.speculators.tree.growth import rank_drafts

__all__ = ["DflashEmitter", "dflash_kv_specs"]


def _caches(layer: int) -> tuple[str, str]:
    return f"draft_model.k_cache.{layer}", f"draft_model.v_cache.{layer}"


def dflash_kv_specs(draft: DflashConfig, dtype: torch.dtype, num_blocks: int, block_size: int) -> list[BufferSpec]:
    """The KV cache buffers of all layers, [P, G, block, D] each."""
    pools: tuple[int, dict[int, int]] = (num_blocks, {})
    return [
        cache
        for layer, spec in draft.attentions.items()
        for cache in cache_specs(_caches(layer), (spec.num_kv_heads, block_size, spec.head_dim), dtype, pools)
    ]


class DflashEmitter:
    """Appends a DFlash draft model's operations to a program. Shapes: B slots, T rows a slot, S drafts."""

    def __init__(self, scope: Scope, draft: DflashConfig, tables: Tables) -> None:
        self.scope, self.draft, self.tables = scope, draft, tables
        self.builder, self.dtype = scope.builder, scope.dtype
        each = [
            layer_of(draft, number, f"draft_model.layers.{number}", _caches(number))
            for number in range(draft.num_layers)
        ]
        self.layers = [replace(layer, kv_window=None) for layer in each]  # windows limit attention, not the cache

    def emit_prefill(self, scope: PrefillScope) -> None:
        """Emit keys and values of a program's positions; the boundaries must have been computed."""
        common = {"block_table": "prefill_table", "chunk": "prefill_chunk"}
        write = {"row_live": "prefill_live", **common}
        rows = Rows("prefill.draft_model.", scope.size, None, "prefill_positions", common, write, scope.chunk)
        emitter = Emitter(self.builder, rows, self.dtype, Stage.PREFILL)
        features = emitter.scratch("features", scope.size, self._feature_width)
        emitter.emit("join_features", self._sources(), {"out": features})
        self._emit_context(emitter, features)

    def emit_extend(self, scope: StepScope) -> None:
        """Emit keys and values of the positions that a step has committed."""
        batch, rows = scope.bucket.batch, scope.rows
        emit_accepted_rows(scope)
        lens = scope.buffer("dense_lens")
        write = {**BY_SLOT, "row_live": "draft_model.row_live", "write_lens": lens, "offsets": scope.offsets}
        context = Rows("draft_model.", batch * rows, "draft_model.row_live", "draft_model.positions", {}, write)
        emitter = Emitter(self.builder, context, self.dtype, Stage.DRAFT_FC)
        features = None if scope.waited is None else scope.waited.features
        if features is None:
            features = emitter.scratch("features", batch * rows, self._feature_width)
            emitter.emit("gather_features", {"accepted_nodes": "accepted_nodes", **self._sources()}, {"out": features})
        self._emit_context(emitter, features)

    @property
    def _feature_width(self) -> int:
        return len(self.draft.capture_boundaries) * self.draft.target_hidden_size

    def _sources(self) -> dict[str, str]:
        boundaries = self.draft.capture_boundaries
        return {f"source{number}": self.scope.boundaries[boundary] for number, boundary in enumerate(boundaries)}

    def _emit_context(self, emitter: Emitter, features: str) -> None:
        draft = self.draft
        hidden = emitter.cast(emitter.linear(features, "draft_model.fc", draft.hidden_size, "fc"), "hidden")
        if emitter.stage is not Stage.PREFILL:
            emitter.stage = Stage.DRAFT_ATTENTION_FMHA
        normed = emitter.norm(hidden, "draft_model.hidden_norm.weight", draft.rms_norm_eps, "context")
        letters, bias = draft.context, draft.attention.qkv_bias
        widths = [len(letters) * layer.attention.kv_size for layer in self.layers]
        product, first = emitter.linear(normed, f"draft_model.context.{letters}", sum(widths), "kv", bias=bias), 0
        for layer, width in zip(self.layers, widths, strict=True):
            own = emitter.scratch("layer.kv", emitter.rows.count, width, dtype=torch.float32)
            emitter.emit("take_columns", {"x": product}, {"out": own}, first=first)
            emit_heads(emitter, layer, own, letters, self.tables)
            first += width

    def emit_draft(self, scope: StepScope) -> str:
        """Emit the block and all its drafts; returns the drafted nodes."""
        draft = self.draft
        level, tokens = self._block(scope, scope.topology.depth + self.first_row)
        table, scale = "draft_model.embed.weight", draft.embedding_scale
        if not draft.own_embedding:  # it was trained with the target's embedding, and so with the target's scale
            table, scale = "embed.weight", scope.config.embedding_scale if scale is None else scale
        stream = level.embed(tokens, table, draft.hidden_size, "embedded", scale=scale)
        for number in range(draft.num_layers):
            stream = self._emit_layer(level, stream, number)
        level.stage = Stage.DRAFT_LM_HEAD
        normed = level.norm(stream, "draft_model.norm.weight", draft.rms_norm_eps, "final")
        head = "draft_model.lm_head" if draft.own_lm_head else "lm_head"
        shard = draft.shard if draft.own_lm_head else scope.config.shard
        cap = draft.logit_softcap
        logits = level.vocabulary(normed, head, draft.draft_vocab_size, "logits", shard, softcap=cap)
        if isinstance(scope.topology, DynamicTree):
            growth = scope.growth()
            growth.from_block(level, rank_drafts(level, logits, growth.tree.top_k), first_row=self.first_row)
            return growth.nodes
        nodes = scope.draft_nodes()
        self.emit_choice(scope, level, tokens, normed, logits)
        return nodes

    @property
    def first_row(self) -> int:
        """The row of the block that drafts first."""
        return 0 if self.draft.anchor_drafts else 1

    def emit_choice(self, scope: StepScope, level: Emitter, tokens: str, normed: str, logits: str) -> None:
        """Emit the choice of the nodes' tokens.

        Each node takes the token of its rank in the row of its depth, whatever its parent took. For a chain with a
        selector, the selector chooses among the likeliest tokens of each row.

        tokens  [B, R] of the block
        normed  [B * R, H] the LM head's input
        logits  [B * R, Vd]
        """
        topology, selector = scope.tree, self.draft.selector
        if selector is not None and topology.is_chain:
            self._emit_walk(level, tokens, normed, logits, selector)
            return
        nodes = range(1, topology.num_nodes)
        drafted = self.emit_ranks(level, logits, max(topology.max_rank_by_level) + 1)
        rows = [topology.depths[node] - 1 + self.first_row for node in nodes]
        assign_drafts(level, drafted, nodes, rows, [topology.ranks[node] for node in nodes])

    def emit_ranks(self, level: Emitter, logits: str, count: int) -> str:
        """Emit the `count` likeliest tokens of these rows, [M, count]."""
        drafted = level.scratch("top_tokens", level.rows.count, count, dtype=torch.int32)
        weights = {"draft_to_target": "draft_model.draft_to_target"}
        level.emit("draft_topk", {"logits": logits, **level.live()}, {"out": drafted}, weights=weights, k=count)
        return drafted

    def _block(self, scope: StepScope, count: int) -> tuple[Emitter, str]:
        """Emit the layout of the block's rows, `count` a slot; returns an emitter, and the tokens [B, count]."""
        batch, scratch = scope.bucket.batch, self.builder.scratch
        outs = {
            "tokens": scratch("draft.0.tokens", (batch, count), torch.int32),
            "positions": scratch("draft.0.positions", (batch, count), torch.int32),
            "row_live": scratch("draft.0.row_live", (batch, count), torch.uint8),
            "write_lens": scratch("draft.0.write_lens", (batch,), torch.int32),
        }
        names = ("accepted_tokens", "commit_lens", "draft_live", "draft_lens")
        self.builder.emit(
            "mask_rows", Stage.DRAFT_FC, reads=scope.reads(*names), writes=outs, mask_token=self.draft.mask_token
        )
        whole = torch.full((batch, count), (1 << count) - 1, dtype=torch.int64)
        offsets = self.builder.constant("draft.0.offsets", torch.arange(count, dtype=torch.int32))
        seen = {"dense_lens": outs["write_lens"], "row_masks": self.builder.constant("draft.0.whole_block", whole)}
        write = {"row_live": outs["row_live"], "write_lens": outs["write_lens"], "offsets": offsets}
        rows = Rows(
            "draft.0.", batch * count, outs["row_live"], outs["positions"], {**BY_SLOT, **seen}, {**BY_SLOT, **write}
        )
        return Emitter(self.builder, rows, self.dtype, Stage.DRAFT_ATTENTION_FMHA), outs["tokens"]

    def _emit_layer(self, level: Emitter, stream: str, number: int) -> str:
        """A layer over the block; returns the residual stream after it."""
        layer = self.layers[number]
        level.stage = Stage.DRAFT_ATTENTION_FMHA
        normed = level.norm(stream, f"{layer.name}.attn_norm.weight", layer.eps, "input.normed")
        normed, kernels = self._emit_conv_in(level, normed, f"{layer.name}.attn_conv")
        letters, name = layer.attention.projected, f"layers.{number}.residual"
        product = emit_projection(level, layer, normed, letters, "qkv")
        query = emit_heads(level, layer, product, letters, self.tables)["q"]
        output = emit_output(level, layer, self._emit_attended(level, query, number))
        output = self._emit_conv_out(level, output, f"{layer.name}.attn_conv", kernels)
        middle = level.add(stream, emit_sandwich(level, layer, output, "post_attn"), f"{name}.middle")
        level.stage = Stage.DRAFT_FFN
        inner = level.norm(middle, f"{layer.name}.ffn_norm.weight", layer.eps, "normed")
        inner, kernels = self._emit_conv_in(level, inner, f"{layer.name}.ffn_conv")
        output = self._emit_conv_out(level, emit_ffn(level, layer, inner), f"{layer.name}.ffn_conv", kernels)
        total = level.add(middle, emit_sandwich(level, layer, output, "post_ffn"), f"{name}.out")
        return emit_layer_scale(level, layer, total, f"{name}.scaled") if layer.spec.scaled else total

    def _emit_attended(self, level: Emitter, query: str, number: int) -> str:
        """Emit the attention of the block's rows in a layer, [M, H * D].

        In a causal layer each row has its own window. Else all rows share the window of the anchor, the first row. The
        operation counts a window from the last row, so the window is wider by the rows in between.
        """
        layer = self.layers[number]
        window = layer.attention.window
        batch, count = self.builder.spec("draft.0.tokens").shape
        if not (self.draft.causal and self.draft.causal[number]):
            wide = None if window is None else window + count - 1
            return emit_attended(level, layer, query, window=wide)
        masks = self.builder.constant("draft.0.seen_before", seen_before(batch, count))
        rows = replace(level.rows, attention={**level.rows.attention, "row_masks": masks})
        return emit_attended(replace(level, rows=rows), layer, query, window=window)

    def _emit_conv_in(self, level: Emitter, normed: str, name: str) -> tuple[str, str]:
        """Emit the convolution of a sublayer's input, [M, H]; also returns the coefficients of both sides.

        Without a convolution returns the input itself.
        """
        conv = self.draft.conv
        if conv is None:
            return normed, ""
        width = 2 * conv.taps * (self.draft.hidden_size // conv.group)
        kernels = level.linear(normed, f"{name}.project", width, "conv.coefficients")
        out = level.scratch("conv.input", level.rows.count, self.draft.hidden_size)
        self._emit_conv(level, normed, name, kernels, out, side=0, group=conv.group)
        return out, kernels

    def _emit_conv_out(self, level: Emitter, output: str, name: str, kernels: str) -> str:
        """Emit the convolution of a sublayer's output, [M, H] float32; without one returns the output itself."""
        conv = self.draft.conv
        if conv is None:
            return output
        out = level.scratch("conv.output", level.rows.count, self.draft.hidden_size, dtype=torch.float32)
        self._emit_conv(level, output, name, kernels, out, side=1, group=conv.group)
        return out

    @staticmethod
    def _emit_conv(level: Emitter, x: str, name: str, kernels: str, out: str, **params: int) -> None:
        reads = {"x": x, "coefficients": kernels, **level.live()}
        level.emit("local_conv", reads, {"out": out}, weights={"weight": f"{name}.base"}, **params)

    def _emit_walk(self, level: Emitter, tokens: str, normed: str, logits: str, selector: Selector) -> None:
        """Emit the selector's choice of a chain through the likeliest tokens of the block's rows."""
        listed = rank_drafts(level, logits, min(selector.top_k, self.draft.draft_vocab_size))
        hidden = level.linear(normed, "draft_model.selector.project", selector.rank, "selector")
        reads = {"candidates": listed["top_tokens"], "scores": listed["top_logprobs"]}
        weights = {f"{part}s": f"draft_model.selector.{part}s" for part in ("predecessor", "successor")}
        level.emit(
            "walk_candidates",
            {**reads, "hidden": hidden, "tokens": tokens},
            {"draft_nodes": "draft_nodes"},
            weights=weights,
            first_row=self.first_row,
        )
