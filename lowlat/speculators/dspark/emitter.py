"""This module emits the choice of DSpark's drafts, level by level, after DFlash's block.

A row's logits do not depend on drafts. At each depth a bias that depends on the previous draft is added to the row's
logits: W2 W1[token], of low rank. In a gated head a sigmoid of the row's state and W1[token] scales W1[token]. In a
tree each node has the bias of its parent's token. The likeliest tokens of a level are the parents of the next.
Source: DSpark, arXiv 2607.05147.
"""

import torch

from lowlat.graphs.program import Stage
from lowlat.models.layers import Emitter, Rows
from lowlat.models.walk import Tables
from lowlat.speculators.base import Scope, StepScope
from lowlat.speculators.dflash.emitter import DflashEmitter
from lowlat.speculators.draft_parts import assign_drafts
from lowlat.speculators.dspark.geometry import DsparkConfig

__all__ = ["DsparkEmitter"]

MARKOV = "draft_model.markov"


class DsparkEmitter(DflashEmitter):
    """Appends a DSpark draft model's operations to a program. Shapes: B slots, R rows of a block, W parents a level."""

    def __init__(self, scope: Scope, config: DsparkConfig, tables: Tables) -> None:
        super().__init__(scope, config, tables)
        self.config = config

    def emit_choice(self, scope: StepScope, level: Emitter, tokens: str, normed: str, logits: str) -> None:
        """Emit one level of the tree after another; each needs the tokens of the level above."""
        rank = self.config.markov_rank
        if not rank:
            super().emit_choice(scope, level, tokens, normed, logits)
            return
        gate = ""
        if self.config.markov_gated:
            gate = level.linear(normed, f"{MARKOV}.state_gate", rank, "state_gate", bias=True)
        for depth in range(scope.topology.depth):
            parents, known = self._emit_parents(scope, tokens, depth, rank)
            self._emit_level(scope, parents, self._gated(parents, known, gate, depth), logits, depth)

    def _emit_parents(self, scope: StepScope, tokens: str, depth: int, rank: int) -> tuple[Emitter, str]:
        """Emit a level's rows, one for each parent node; returns an emitter and the tokens' vectors [B * W, r]."""
        topology, batch, prefix = scope.tree, scope.bucket.batch, f"draft.0.level.{depth}."
        nodes = [branch.node for branch in topology.levels[depth]]
        parents = self.builder.scratch(f"{prefix}tokens", (batch, len(nodes)), torch.int32)
        live = self.builder.scratch(f"{prefix}row_live", (batch, len(nodes)), torch.uint8)
        rows = Rows(prefix, batch * len(nodes), live, "", {}, {})
        level = Emitter(self.builder, rows, self.dtype, Stage.DRAFT_LM_HEAD)
        level.emit(
            "parent_tokens",
            {
                "tokens": tokens,
                **({"draft_nodes": "draft_nodes"} if depth else {}),
                "nodes": self.builder.constant(f"{prefix}nodes", torch.tensor(nodes, dtype=torch.int32)),
            },
            {"parents": parents, "row_live": live},
        )
        return level, level.embed(parents, f"{MARKOV}.tokens.weight", rank, "known")

    def _gated(self, level: Emitter, known: str, gate: str, depth: int) -> str:
        """Emit the gate of the tokens' vectors, from which the bias is made; without a gate return them as they are."""
        if not gate:
            return known
        width = self.builder.spec(known).shape[1]
        product = level.linear(known, f"{MARKOV}.token_gate", width, "token_gate")
        gated = level.scratch("gated", level.rows.count, width)
        reads = {"x": known, "token_gate": product, "state_gate": gate, **level.live()}
        level.emit("markov_gate", reads, {"out": gated}, row=depth + self.first_row)
        return gated

    def _emit_level(self, scope: StepScope, level: Emitter, latent: str, logits: str, depth: int) -> None:
        """Emit the logits of a level's parents, and the tokens of their children."""
        topology = scope.tree
        bias = level.linear(latent, f"{MARKOV}.bias", self.draft.draft_vocab_size, "bias")
        biased = level.scratch("logits", level.rows.count, self.draft.draft_vocab_size, dtype=torch.float32)
        reads = {"logits": logits, "bias": bias, **level.live()}
        level.emit("bias_rows", reads, {"out": biased}, row=depth + self.first_row)
        drafted = self.emit_ranks(level, biased, topology.max_rank_by_level[depth] + 1)
        children = [(child, row) for row, each in enumerate(topology.levels[depth]) for child in each.children]
        nodes, rows = [child for child, _ in children], [row for _, row in children]
        assign_drafts(level, drafted, nodes, rows, [topology.ranks[child] for child in nodes])
