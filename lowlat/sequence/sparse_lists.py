"""This module declares SpecPV's state beside paged KV: summaries of keys, and the blocks that each slot attends to."""

from dataclasses import dataclass

import torch

from lowlat.graphs import BufferSpec, Paging, Role
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.models.partial_kv import PartialKV
from lowlat.sequence.state import SequenceState

__all__ = ["SparseLists"]


@dataclass(frozen=True)
class SparseLists(SequenceState):
    """SpecPV's state for slots of `table_width` blocks. Each layer without a window has

    key_summary.LAYER  [P, G, parts of a block, 2, D]  compute  largest and smallest key of a part
    block_lists.LAYER  [max_B, G, parts of a slot]     int32    see `lowlat.kernels.reference.attention.partial`

    partial_shifts     [max_B]                         int32    positions that a slot's lists leave out
    All layers share the last one, and the buffers of the host's commands for a refresh. `lowlat.sequence.partial`
    decides when lists are chosen again.
    """

    config: ModelConfig
    partial: PartialKV
    num_blocks: int
    block_size: int
    max_batch: int
    table_width: int

    def specs(self) -> list[BufferSpec]:
        """Return the state of all layers, then the buffers that the host writes."""
        config, batch, ints = self.config, self.max_batch, torch.int32
        parts, dtype = self.block_size // self.partial.block, TORCH_DTYPES[config.dtype]
        specs = [BufferSpec("partial_shifts", (batch,), ints, Role.STATE, by_slot=True)]
        for layer, spec in config.attentions.items():
            if spec.window is None:
                summary = (self.num_blocks, spec.num_kv_heads, parts, 2, spec.head_dim)
                lists = (batch, spec.num_kv_heads, self.table_width * parts)
                specs.append(BufferSpec(f"key_summary.{layer}", summary, dtype, Role.STATE, Paging.BLOCKS))
                specs.append(BufferSpec(f"block_lists.{layer}", lists, ints, Role.STATE, by_slot=True, parts=parts))
        written = {"prefill_span": 2, "prefill_shifts": batch, "prefill_start": 1}
        return [*specs, *(BufferSpec(name, (count,), ints, Role.COMMAND) for name, count in written.items())]
