"""This module emits the operations that grow a dynamic tree, level by level or from the lists of a block."""

from dataclasses import dataclass

import torch

from lowlat.graphs.program import ProgramBuilder
from lowlat.models.layers import Emitter
from lowlat.speculators.tree.dynamic import DynamicTree

__all__ = ["Growth", "LevelRows", "rank_drafts"]

PARTS = (("tokens", torch.int32), ("scores", torch.float32), ("parents", torch.int32))


def rank_drafts(emitter: Emitter, logits: str, top_k: int) -> dict[str, str]:
    """Emit the top K of each row: the tokens as target ids, and their log-probabilities, [M, K] each."""
    names = {"top_tokens": torch.int32, "top_logprobs": torch.float32}
    found = {name: emitter.scratch(name, emitter.rows.count, top_k, dtype=dtype) for name, dtype in names.items()}
    weights = {"draft_to_target": "draft_model.draft_to_target"}
    emitter.emit("draft_topk_logprobs", {"logits": logits, **emitter.live()}, found, weights=weights, k=top_k)
    return found


@dataclass(frozen=True)
class LevelRows:
    """The buffers of a level's rows: the draft model's inputs, and each row's path score, entry and mask, [B, W]."""

    hidden: str
    tokens: str
    row_live: str
    positions: str
    scores: str
    entries: str
    masks: str


class Growth:
    """Emits a dynamic tree in a step of B slots, from its first drafts to the choice of the nodes to verify.

    nodes, parents  [B, T] int32  the buffers that give the chosen nodes to the next step
    """

    def __init__(self, builder: ProgramBuilder, tree: DynamicTree, batch: int, nodes: str, parents: str) -> None:
        self.builder, self.tree, self.batch = builder, tree, batch
        self.nodes = nodes
        self._chosen = {"draft_nodes": nodes, "draft_parents": parents}

    def begin(self) -> dict[str, str]:
        """Declare the buffers of entries, and return the root's score, entry and mask: the first level's only row."""
        size = (self.batch, self.tree.num_entries)
        self._entries = {f"tree_{part}": self.builder.scratch(f"tree.{part}", size, dtype) for part, dtype in PARTS}
        root = (("scores", 0, torch.float32), ("entries", -1, torch.int32), ("masks", 0, torch.int64))
        return {
            name: self.builder.constant(f"tree.root.{name}", torch.full((self.batch, 1), value, dtype=dtype))
            for name, value, dtype in root
        }

    def next_level(
        self, emitter: Emitter, ranked: dict[str, str], above: dict[str, str], feedback: str, depth: int
    ) -> LevelRows:
        """Emit the entry of a level's drafts into the tree; returns the best of them as the next level's rows."""
        top_k, prefix = self.tree.top_k, f"draft.{depth}."
        width = self.builder.spec(feedback).shape[1]
        scratch, by_row = self.builder.scratch, (self.batch, top_k)
        rows = LevelRows(
            hidden=scratch(f"{prefix}hidden", (self.batch * top_k, width), emitter.dtype),
            tokens=scratch(f"{prefix}tokens", by_row, torch.int32),
            row_live=scratch(f"{prefix}row_live", by_row, torch.uint8),
            positions=scratch(f"{prefix}positions", by_row, torch.int32),
            scores=scratch(f"{prefix}scores", by_row, torch.float32),
            entries=scratch(f"{prefix}entries", by_row, torch.int32),
            masks=scratch(f"{prefix}row_masks", by_row, torch.int64),
        )
        outs = {"hidden": rows.hidden, "tokens": rows.tokens, "row_live": rows.row_live, "positions": rows.positions}
        outs |= {"next_scores": rows.scores, "next_entries": rows.entries, "next_masks": rows.masks}
        reads = {**ranked, **{f"row_{name}": buffer for name, buffer in above.items()}}
        reads |= {"feedback": feedback, "draft_lens": "draft_lens"}
        emitter.emit("grow_tree", reads, {**self._entries, **outs}, depth=depth)
        return rows

    def finish(self, emitter: Emitter, ranked: dict[str, str], above: dict[str, str]) -> None:
        """Emit the entry of the last level's drafts, and the choice of the nodes."""
        reads = {**ranked, "row_scores": above["scores"], "row_entries": above["entries"]}
        emitter.emit("choose_nodes", reads, {**self._entries, **self._chosen})

    def from_block(self, emitter: Emitter, ranked: dict[str, str], first_row: int) -> None:
        """Emit the choice of the nodes from a block's top-K lists; that of `first_row` has the root's children."""
        emitter.emit("grow_block_tree", ranked, self._chosen, first_row=first_row)
