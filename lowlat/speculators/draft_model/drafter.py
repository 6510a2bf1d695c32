"""This module emits a whole draft model's rows: those of a prompt, of accepted tokens, and one for each deeper draft.

A row is a token at its own position; its keys and values are stored at the same index of the slot's blocks. Rows of
accepted tokens run through all layers, and write exact keys and values over earlier ones; the last row drafts. The
next step overwrites what drafted rows have written, unless it would write the same.
"""

import torch

from lowlat.graphs.program import Stage
from lowlat.models.decoder import emit_decoder, emit_vocabulary
from lowlat.models.layers import Emitter, Rows
from lowlat.speculators.base import PrefillScope, Scope, StepScope
from lowlat.speculators.draft_model.geometry import OWNER, WholeDraftConfig
from lowlat.speculators.draft_parts import BY_SLOT, DRAFT_MAP, assign_drafts, seen_before

__all__ = ["WholeDrafter"]

Place = tuple[int, int]  # the first row's column among the tokens, and its index relative to the slot's length


class WholeDrafter:
    """Appends the operations of a draft model. Shapes: B slots, T rows a slot."""

    def __init__(self, scope: Scope, draft: WholeDraftConfig) -> None:
        self.scope, self.builder, self.draft = scope, scope.builder, draft

    def emit_prefill(self, scope: PrefillScope) -> None:
        """Emit keys and values of a prompt's positions."""
        common = {"block_table": "prefill_table", "chunk": "prefill_chunk"}
        write = {"row_live": "prefill_live", **common}
        rows = Rows(f"prefill.{OWNER}", scope.size, None, "prefill_positions", common, write, scope.chunk)
        self._emit_layers(rows, "prefill_tokens", Stage.PREFILL)

    def emit_extend(self, scope: StepScope) -> str:
        """Emit the accepted rows; returns the residual stream after the last layer, [B * T, N]."""
        given = scope.reads("accepted_tokens", "commit_lens", "draft_live", "dense_lens")
        reads = {"given": given["accepted_tokens"], "counts": given["commit_lens"]}
        reads |= {"live": given["draft_live"], "lens": given["dense_lens"]}
        masks = self.builder.constant(f"{OWNER}seen_before", seen_before(scope.bucket.batch, scope.rows))
        rows, tokens = self._rows(scope, OWNER, scope.rows, (scope.offsets, masks), reads, (0, 1))
        return self._emit_layers(rows, tokens, Stage.DRAFT)

    def emit_draft(self, scope: StepScope, residual: str) -> str:
        """Emit the chain, one row for each draft; returns the drafted nodes."""
        batch, nodes = scope.bucket.batch, scope.draft_nodes()
        rows = Rows("draft.0.", batch, scope.buffer("draft_live"), "", {}, {})
        last = Emitter(self.builder, rows, scope.dtype, Stage.DRAFT)
        stream = last.scratch("residual", batch, self.draft.hidden_size)
        last.emit("take_last", {"x": residual, **scope.reads("commit_lens")}, {"out": stream})
        self._choose(rows, stream, 1)
        alone = self.builder.constant(f"{OWNER}itself", torch.ones(batch, 1, dtype=torch.int64))
        offset = self.builder.constant(f"{OWNER}first", torch.zeros(1, dtype=torch.int32))
        for depth in range(1, scope.topology.depth):
            given = scope.reads("draft_live", "draft_lens")
            reads = {"given": nodes, "live": given["draft_live"], "lens": given["draft_lens"]}
            place = (depth, depth - 1)
            rows, tokens = self._rows(scope, f"draft.{depth}.", 1, (offset, alone), reads, place)
            self._choose(rows, self._emit_layers(rows, tokens, Stage.DRAFT), depth + 1)
        return nodes

    def _rows(
        self, scope: StepScope, prefix: str, count: int, seen: tuple[str, str], reads: dict[str, str], place: Place
    ) -> tuple[Rows, str]:
        """Emit the layout of `count` rows a slot; returns the rows, and the buffer of their tokens.

        seen          the constants of the rows' offsets, and of their masks of each other
        reads, place  arguments of `token_rows`
        """
        batch, scratch = scope.bucket.batch, self.builder.scratch
        made = {name: scratch(f"{prefix}{name}", (batch, count), torch.int32) for name in ("tokens", "positions")}
        made["row_live"] = scratch(f"{prefix}row_live", (batch, count), torch.uint8)
        made["write_lens"] = lens = scratch(f"{prefix}write_lens", (batch,), torch.int32)
        self.builder.emit("token_rows", Stage.DRAFT, reads=reads, writes=made, column=place[0], ahead=place[1])
        offsets, masks = seen
        attention = {**BY_SLOT, "dense_lens": lens, "row_masks": masks}
        write = {**BY_SLOT, "row_live": made["row_live"], "write_lens": lens, "offsets": offsets}
        rows = Rows(prefix, batch * count, made["row_live"], made["positions"], attention, write)
        return rows, made["tokens"]

    def _emit_layers(self, rows: Rows, tokens: str, stage: Stage) -> str:
        """Emit all layers over rows; returns the residual stream after the last one."""
        return emit_decoder(self.builder, self.draft.decoder, rows, tokens, self.scope.tables, stage, owner=OWNER)[-1]

    def _choose(self, rows: Rows, residual: str, node: int) -> None:
        """Emit the choice of the likeliest token after each slot's row, which becomes a node of the chain."""
        level = Emitter(self.builder, rows, self.scope.dtype, Stage.DRAFT_LM_HEAD)
        width = self.draft.draft_vocab_size
        logits = emit_vocabulary(level, self.draft.decoder, residual, width, owner=OWNER)
        tokens = level.scratch("top_tokens", rows.count, 1, dtype=torch.int32)
        reads, weights = {"logits": logits, **level.live()}, {"draft_to_target": DRAFT_MAP}
        level.emit("draft_topk", reads, {"out": tokens}, weights=weights, k=1)
        assign_drafts(level, tokens, [node], [0], [0])
