"""This module declares the states of gated delta nets, with pending rows, so that a slot rewinds by its length.

`lowlat.kernels.reference.recurrent.pending` defines what they hold after each step. A prompt's first chunk does not
read the slot's states; the host zeroes those of a request that failed with NaN all the same.
"""

from dataclasses import dataclass, replace

import torch

from lowlat.graphs import BufferSpec, Paging, Role
from lowlat.graphs.program import ProgramBuilder, Stage
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES, Rows
from lowlat.sequence.snapshot_book import MAX_KEPT, PREFILL_STATES, SnapshotBook
from lowlat.sequence.state import SequenceState

__all__ = ["RecurrentState"]

SNAPSHOTS = Paging.ROWS, SnapshotBook.name  # for buffers with a row for each slot, then rows of snapshots
PENDING = Paging.ROWS, ".pending"  # for buffers with rows of slots alone


@dataclass(frozen=True)
class RecurrentState(SequenceState):
    """The states of the target's gated delta nets, R rows: one for each slot, then snapshots. Each such layer has

    conv_state.LAYER       [R, conv_size - 1 + T, C]  compute  a ring of the convolution's last inputs
    delta_state.LAYER      [R, Hv, Dv, Dk]            float32  S transposed
    delta_pending_k.LAYER  [max_B, 2 T, Hk, Dk]       float32  a ring of pending rows' normed keys
    delta_pending_d.LAYER  [max_B, 2 T, Hv, Dv]       float32  pending rows' corrections of S
    delta_pending_g.LAYER  [max_B, 2 T, Hv]           float32  pending rows' decays

    state_lens             [max_B]                    int32    tokens that a slot's states contain, in all layers
    prefill_states         [1, 1 + 2 * MAX_KEPT]      int32    the host's commands: see `SnapshotBook`
    """

    config: ModelConfig
    max_batch: int
    max_rows: int
    num_snapshots: int = 0

    def specs(self) -> list[BufferSpec]:
        """Return the buffers of all layers."""
        batch, compute = self.max_batch, TORCH_DTYPES[self.config.dtype]
        ring, rows = 2 * self.max_rows, batch + self.num_snapshots
        specs = [
            BufferSpec("state_lens", (batch,), torch.int32, Role.STATE, by_slot=True),
            BufferSpec(PREFILL_STATES, (1, 1 + 2 * MAX_KEPT), torch.int32, Role.COMMAND),
        ]
        for layer, spec in self.config.deltas.items():
            inputs = (rows, spec.conv_size - 1 + self.max_rows, spec.num_channels)
            floats = {
                "state": (rows, spec.num_value_heads, spec.value_dim, spec.key_dim),
                "pending_k": (batch, ring, spec.num_key_heads, spec.key_dim),
                "pending_d": (batch, ring, spec.num_value_heads, spec.value_dim),
                "pending_g": (batch, ring, spec.num_value_heads),
            }
            specs.append(BufferSpec(f"conv_state.{layer}", inputs, compute, Role.STATE, *SNAPSHOTS, by_slot=True))
            specs += [
                BufferSpec(
                    f"delta_{name}.{layer}",
                    shape,
                    torch.float32,
                    Role.STATE,
                    *(SNAPSHOTS if name == "state" else PENDING),
                    by_slot=True,
                )
                for name, shape in floats.items()
            ]
        return specs

    def emit_end(self, builder: ProgramBuilder, rows: Rows, stage: Stage) -> None:
        """Emit the operation that sets the number of tokens that the states of all layers contain."""
        kind = "prefill_advance_states" if rows.chunk else "advance_states"
        builder.emit(kind, stage, reads=dict(rows.recurrent), writes={"state_lens": "state_lens"})

    def slot_pools(self) -> tuple[str, ...]:
        """Return the pools of states and of pending rows."""
        return SNAPSHOTS[1], PENDING[1]

    def slot_bytes(self) -> dict[str, int]:
        """Return the bytes of a slot, with its pending rows, and of a snapshot."""
        one = replace(self, max_batch=1, num_snapshots=0).num_bytes
        return {"state_bytes_per_slot": one, "snapshot_bytes": self.snapshot_bytes}

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot."""
        return replace(self, num_snapshots=1).num_bytes - replace(self, num_snapshots=0).num_bytes
