"""This module emits drafting of a dynamic tree: over the root, then over the best drafts of each level.

Source: EAGLE-2, arXiv 2406.16858, section 4. A level's rows attend to their own ancestors. Their keys and values are
stored after the committed ones, level by level; the next step overwrites them.
"""

from lowlat.graphs.program import Stage
from lowlat.models.layers import Emitter, Rows
from lowlat.speculators.draft_parts import BY_SLOT
from lowlat.speculators.eagle3.draft import Drafter
from lowlat.speculators.tree.dynamic import DynamicTree
from lowlat.speculators.tree.growth import LevelRows, rank_drafts

__all__ = ["DynamicDrafter"]


class DynamicDrafter(Drafter):
    """Appends an EAGLE3 draft model's operations after a commit for dynamic trees. Shapes: B slots, K rows a level."""

    def draft(self, x: str, residual: str) -> str:
        """Append all levels; returns the drafted nodes."""
        growth = self.scope.growth()
        tree, above = growth.tree, growth.begin()
        level, live = self.first_level(x, residual)
        for depth in range(1, tree.depth):
            ranked, feedback = self._rank(level, live, tree)
            rows = growth.next_level(level, ranked, above, feedback, depth)
            level = self._level(rows, tree, depth)
            live = self.eagle.emit_stack(level, *self.eagle.emit_input(level, rows.tokens, rows.hidden))
            above = {"scores": rows.scores, "entries": rows.entries, "masks": rows.masks}
        ranked, _ = self._rank(level, live, tree)
        growth.finish(level, ranked, above)
        return growth.nodes

    def _rank(self, level: Emitter, live: tuple[str, str], tree: DynamicTree) -> tuple[dict[str, str], str]:
        """Append the choice of a level's likeliest ids; returns them with their probabilities, and the state."""
        logits, feedback = self.logits(level, live)
        return rank_drafts(level, logits, tree.top_k), feedback

    def _level(self, rows: LevelRows, tree: DynamicTree, depth: int) -> Emitter:
        """An emitter over the rows of a deeper level."""
        prefix, places = f"draft.{depth}.", range((depth - 1) * tree.top_k, depth * tree.top_k)
        attention = {**BY_SLOT, "dense_lens": "draft_lens", "row_masks": rows.masks}
        offsets = self.constant(f"{prefix}offsets", places)
        write = {**BY_SLOT, "row_live": rows.row_live, "write_lens": "draft_lens", "offsets": offsets}
        every = Rows(prefix, self.batch * tree.top_k, rows.row_live, rows.positions, attention, write)
        return Emitter(self.builder, every, self.dtype, Stage.DRAFT_ATTENTION_FMHA)
