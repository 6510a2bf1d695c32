"""This module emits drafting in one pass: the accepted rows, and after them a row for each deeper draft.

The last accepted row drafts the next token. Each further row takes the mask's token and the mask's state, because its
own token and feature are unknown. It has the position of the unknown token, attends to the rows before it, and drafts
the token after. So S drafts take S - 1 more rows, and no second pass. A tree's node takes the token of its rank at its
depth, whatever its parent drafted.

The rows write keys and values at the positions of the next step's accepted rows, which overwrite them.
"""

import torch

from lowlat.graphs.program import Stage
from lowlat.models.layers import Emitter, Rows
from lowlat.speculators.draft_parts import BY_SLOT
from lowlat.speculators.eagle3.draft import Drafter
from lowlat.speculators.peagle.geometry import PeagleConfig
from lowlat.speculators.tree.dynamic import DynamicTree
from lowlat.speculators.tree.growth import rank_drafts

__all__ = ["MASK_STATE", "BlockDrafter"]

MASK_STATE = "draft_model.mask_state"


class BlockDrafter(Drafter):
    """Emits a P-EAGLE draft model's work after a commit. Shapes: B slots, T rows a slot, R rows of the block."""

    def extend(self) -> tuple[str, str]:
        """Emit keys and values of the accepted rows and of the drafting rows after them; see `Drafter.extend`."""
        depth = self.scope.topology.depth
        if depth < 2:
            return super().extend()
        accepted, hidden = self.accepted()
        batch, config = self.batch, self.draft_config
        if not isinstance(config, PeagleConfig):
            raise ValueError("a P-EAGLE draft model has a token for its mask")
        most = self.rows if self.scope.waited is not None else min(self.rows, depth + 1)
        count = most + depth - 1
        offsets = self.constant("block.offsets", range(count))
        outs = {
            "out": accepted.builder.scratch("block.hidden", (batch * count, self.draft_config.hidden_size), self.dtype),
            "block_tokens": self.ints("block.tokens", batch, count),
            "block_live": self.ints("block.row_live", batch, count, dtype=torch.uint8),
            "block_positions": self.ints("block.positions", batch, count),
            "drafting_live": self.ints("draft.0.row_live", batch, depth, dtype=torch.uint8),
            "drafting_positions": self.ints("draft.0.positions", batch, depth),
        }
        names = ("commit_lens", "draft_live", "dense_lens")
        accepted.emit(
            "block_rows",
            {"tokens": "draft_model.tokens", "hidden": hidden, **self.scope.reads(*names)},
            outs,
            weights={"mask_state": MASK_STATE},
            mask_token=config.mask_token,
        )
        write = {**BY_SLOT, "row_live": outs["block_live"], "write_lens": "draft_model.write_lens", "offsets": offsets}
        before = self.rows_before("block.before", count)
        rows = Rows("block.", batch * count, outs["block_live"], outs["block_positions"], before, write)
        block = Emitter(self.builder, rows, self.dtype, Stage.DRAFT_ATTENTION_FMHA)
        return self.eagle.emit_stack(block, *self.eagle.emit_input(block, outs["block_tokens"], outs["out"]))

    def draft(self, x: str, residual: str) -> str:
        """Emit all drafts at once; returns the drafted nodes."""
        batch, depth = self.batch, self.scope.topology.depth
        if depth < 2:
            return super().draft(x, residual)
        before = torch.tensor([(1 << row) - 1 for row in range(depth)], dtype=torch.int64).repeat(batch, 1)
        masks = self.builder.constant("draft.0.before", before)
        attention = {**BY_SLOT, "dense_lens": self.scope.buffer("draft_lens"), "row_masks": masks}
        rows = Rows("draft.0.", batch * depth, "draft.0.row_live", "draft.0.positions", attention, {})
        level = Emitter(self.builder, rows, self.dtype, Stage.DRAFT_ATTENTION_FMHA)
        live = {}
        for name, source in (("both", x), ("residual", residual)):
            live[name] = level.scratch(name, batch * depth, self.builder.spec(source).shape[1])
            level.emit("take_block", {"x": source, **self.scope.reads("commit_lens")}, {"out": live[name]})
        both = (live["both"], live["residual"])
        if isinstance(self.scope.topology, DynamicTree):
            growth = self.scope.growth()
            logits, _ = self.logits(level, both)
            growth.from_block(level, rank_drafts(level, logits, growth.tree.top_k), first_row=0)
            return growth.nodes
        topology = self.scope.tree
        nodes, drafted = self.scope.draft_nodes(), range(1, topology.num_nodes)
        num_ranks = max(topology.max_rank_by_level) + 1
        own = [topology.depths[node] - 1 for node in drafted]
        self.finish(level, both, num_ranks, drafted, own)
        return nodes
