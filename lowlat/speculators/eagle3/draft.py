"""This module emits drafting: the draft model over the accepted rows, then over one level of the tree after another.

The rows of accepted tokens use the target's true features, and the draft model writes their keys and values. The last
layer's attention and FFN, and the LM head, run only on each slot's last row. Earlier layers, if there are any, run on
all accepted rows, since the next layer's keys and values need their outputs. Deeper levels use the draft model's own
fed-back state; the next step overwrites their keys and values. Source: EAGLE-3, arXiv 2503.01840, section 3.
"""

from collections.abc import Sequence

import torch

from lowlat.graphs.program import Stage
from lowlat.models.layers import Emitter, Rows
from lowlat.speculators.base import StepScope
from lowlat.speculators.draft_parts import BY_SLOT, assign_drafts, emit_accepted_rows, seen_before
from lowlat.speculators.eagle3.emitter import Eagle3Emitter

__all__ = ["Drafter"]


class Drafter:
    """Appends an EAGLE3 draft model's operations after a commit. Shapes: B slots, T rows a slot."""

    def __init__(self, scope: StepScope, eagle: Eagle3Emitter) -> None:
        self.scope, self.eagle = scope, eagle
        self.builder, self.draft_config = scope.builder, eagle.draft
        self.dtype = scope.dtype
        self.batch, self.rows = scope.bucket.batch, scope.rows

    def extend(self) -> tuple[str, str]:
        """Append the pass over accepted rows; returns the last layer's attention input and residual, by row."""
        emitter, hidden = self.accepted()
        emitter.stage = Stage.DRAFT_ATTENTION_FMHA
        return self.eagle.emit_stack(emitter, *self.eagle.emit_input(emitter, "draft_model.tokens", hidden))

    def accepted(self) -> tuple[Emitter, str]:
        """An emitter over the accepted rows, with tokens `draft_model.tokens`, and their features [B * T, H]."""
        batch, rows = self.batch, self.rows
        emit_accepted_rows(self.scope)
        write = {
            **BY_SLOT,
            "row_live": "draft_model.row_live",
            "write_lens": "draft_model.write_lens",
            "offsets": self.scope.offsets,
        }
        before = self.rows_before("draft_model.accepted_before", rows)
        all_rows = Rows("draft_model.", batch * rows, "draft_model.row_live", "draft_model.positions", before, write)
        emitter = Emitter(self.builder, all_rows, self.dtype, Stage.DRAFT_FC)
        return emitter, "prefilled_feature" if self.scope.is_first_token else self._features(emitter)

    def rows_before(self, name: str, count: int) -> dict[str, str]:
        """The arguments of causal attention for `count` rows a slot, from the first accepted row on.

        name  of the constant with the row masks
        """
        if self.draft_config.num_layers == 1:
            return {}  # keys and values alone are made of them
        masks = self.builder.constant(name, seen_before(self.batch, count))
        return {**BY_SLOT, "dense_lens": "draft_model.write_lens", "row_masks": masks}

    def _features(self, emitter: Emitter) -> str:
        """Append fc over the accepted rows' features; those at block ends are kept."""
        draft = self.draft_config
        waited = self.scope.waited
        features = None if waited is None else waited.features
        if features is None:
            captured = [self.scope.boundaries[boundary] for boundary in draft.capture_boundaries]
            features = emitter.scratch("features", emitter.rows.count, len(captured) * draft.target_hidden_size)
            sources = {f"source{k}": name for k, name in enumerate(captured)}
            emitter.emit("gather_features", {"accepted_nodes": "accepted_nodes", **sources}, {"out": features})
        hidden = self.eagle.emit_fc(emitter, features)
        emitter.emit(
            "store_boundary",
            {"hidden": hidden, "positions": "draft_model.positions", "row_live": "draft_model.row_live", **BY_SLOT},
            {"block_features": "block_features"},
            block_size=self.scope.block_size,
        )
        return hidden

    def draft(self, x: str, residual: str) -> str:
        """Append all levels; returns the drafted nodes."""
        nodes = self.scope.draft_nodes()
        level, live = self.first_level(x, residual)
        feedback = self._finish_level(level, 0, live)
        for depth in range(1, self.scope.tree.depth):
            feedback = self._deeper_level(depth, feedback)
        return nodes

    def first_level(self, x: str, residual: str) -> tuple[Emitter, tuple[str, str]]:
        """The root's level: an emitter over each slot's last row, and its last layer's attention input and residual."""
        batch = self.batch
        alone = self.builder.constant("draft_model.no_ancestors", torch.zeros(batch, 1, dtype=torch.int64))
        attention = {**BY_SLOT, "dense_lens": self.scope.buffer("draft_lens"), "row_masks": alone}
        live_rows = self.scope.buffer("draft_live")
        rows = Rows("draft.0.", batch, live_rows, "draft_model.live_positions", attention, {})
        level = Emitter(self.builder, rows, self.dtype, Stage.DRAFT_ATTENTION_FMHA)
        live = {}
        for name, source in (("both", x), ("residual", residual)):
            live[name] = level.scratch(name, batch, self.builder.spec(source).shape[1])
            level.emit("take_last", {"x": source, **self.scope.reads("commit_lens")}, {"out": live[name]})
        return level, (live["both"], live["residual"])

    def _deeper_level(self, depth: int, feedback: str) -> str:
        topology, batch, prefix = self.scope.tree, self.batch, f"draft.{depth}."
        nodes = [branch.node for branch in topology.levels[depth]]
        above = [branch.node for branch in topology.levels[depth - 1]]
        ordinals = [topology.non_leaf_ordinal[node] for node in nodes]
        live = self.ints(f"{prefix}row_live", batch, len(nodes), dtype=torch.uint8)
        masks = self.ints(f"{prefix}row_masks", batch, len(nodes), dtype=torch.int64)
        positions = self.ints(f"{prefix}positions", batch, len(nodes))
        offsets = self.constant(f"{prefix}offsets", ordinals)
        lens = self.scope.buffer("draft_lens")
        attention = {**BY_SLOT, "dense_lens": lens, "row_masks": masks}
        write = {**BY_SLOT, "row_live": live, "write_lens": lens, "offsets": offsets}
        rows = Rows(prefix, batch * len(nodes), live, positions, attention, write)
        level = Emitter(self.builder, rows, self.dtype, Stage.DRAFT_ATTENTION_FMHA)
        tokens = self.ints(f"{prefix}tokens", batch, len(nodes))
        hidden = level.scratch("hidden", batch * len(nodes), self.builder.spec(feedback).shape[1])
        parents = [above.index(topology.parents[node]) for node in nodes]
        ancestors = [topology.draft_masks[ordinal] for ordinal in ordinals]
        level.emit(
            "gather_level",
            {
                "feedback": feedback,
                "draft_nodes": "draft_nodes",
                **self.scope.reads("draft_live", "draft_lens"),
                "nodes": self.constant(f"{prefix}nodes", nodes),
                "parent_rows": self.constant(f"{prefix}parents", parents),
                "masks": self.constant(f"{prefix}masks", ancestors, torch.int64),
            },
            {"hidden": hidden, "tokens": tokens, "row_live": live, "positions": positions, "row_masks": masks},
            depth=depth,
        )
        live_rows = self.eagle.emit_stack(level, *self.eagle.emit_input(level, tokens, hidden))
        return self._finish_level(level, depth, live_rows)

    def _finish_level(self, level: Emitter, depth: int, live: tuple[str, str]) -> str:
        """Append a level's last layer, LM head and children's tokens; returns the result of `finish`."""
        topology = self.scope.tree
        branches = topology.levels[depth]
        children = [child for branch in branches for child in branch.children]
        rows = [row for row, branch in enumerate(branches) for _ in branch.children]
        return self.finish(level, live, topology.max_rank_by_level[depth] + 1, children, rows)

    def finish(
        self, level: Emitter, live: tuple[str, str], num_ranks: int, children: Sequence[int], child_rows: Sequence[int]
    ) -> str:
        """Append the last layer over the rows that draft, and the tokens of `children`, each from its row.

        live       the last layer's attention input and residual, of these rows
        num_ranks  the number of likeliest tokens of a row
        Returns the state that may be fed back.
        """
        logits, feedback = self.logits(level, live)
        tokens = self.eagle.emit_draft(level, logits, num_ranks)
        ranks = [self.scope.tree.ranks[child] for child in children]
        assign_drafts(level, tokens, children, child_rows, ranks)
        return feedback

    def logits(self, level: Emitter, live: tuple[str, str]) -> tuple[str, str]:
        """Append the last layer and the LM head; returns logits [M, Vd], and the state that may be fed back.

        live  the last layer's attention input and residual, of these rows
        """
        middle = self.eagle.emit_attention(level, *live)
        level.stage = Stage.DRAFT_FFN
        return self.eagle.emit_logits(level, self.eagle.emit_ffn(level, middle, self.eagle.last))

    def ints(self, name: str, *shape: int, dtype: torch.dtype = torch.int32) -> str:
        """A scratch buffer of integers."""
        return self.builder.scratch(name, shape, dtype)

    def constant(self, name: str, values: Sequence[int], dtype: torch.dtype = torch.int32) -> str:
        """A constant of integers."""
        return self.builder.constant(name, torch.tensor(values, dtype=dtype))
