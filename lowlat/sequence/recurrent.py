"""Recurrent states of gated delta nets, with pending rows: rewinding a slot is setting back its length.

What they hold and when: `lowlat.kernels.reference.recurrent.pending`. A slot's states need no clearing: a prompt's
first chunk reads nothing of them.
"""

from dataclasses import dataclass

import torch

from lowlat.graphs import BufferSpec, Role
from lowlat.models.geometry import ModelConfig
from lowlat.models.layers import TORCH_DTYPES
from lowlat.sequence.state import SequenceState

__all__ = ["RecurrentState"]


@dataclass(frozen=True)
class RecurrentState(SequenceState):
    """The states of the target's gated delta nets, a row a slot: of each such layer

    conv_state.LAYER       [max_B, conv_size - 1 + T, C]  compute  last inputs of the convolution, then of pending rows
    delta_state.LAYER      [max_B, Hv, Dk, Dv]            float32  S
    delta_pending_k.LAYER  [max_B, T, Hk, Dk]             float32  normed keys of pending rows
    delta_pending_d.LAYER  [max_B, T, Hv, Dv]             float32  their corrections of S
    delta_pending_g.LAYER  [max_B, T, Hv]                 float32  their decays

    state_lens             [max_B]                        int32    tokens that a slot's states contain, of all layers
    """

    config: ModelConfig
    max_batch: int
    max_rows: int

    def specs(self) -> list[BufferSpec]:
        """State of all layers."""
        batch, rows, compute = self.max_batch, self.max_rows, TORCH_DTYPES[self.config.dtype]
        specs = [BufferSpec("state_lens", (batch,), torch.int32, Role.STATE)]
        for layer, spec in self.config.deltas.items():
            inputs = (batch, spec.conv_size - 1 + rows, spec.num_channels)
            floats = {
                "state": (batch, spec.num_value_heads, spec.key_dim, spec.value_dim),
                "pending_k": (batch, rows, spec.num_key_heads, spec.key_dim),
                "pending_d": (batch, rows, spec.num_value_heads, spec.value_dim),
                "pending_g": (batch, rows, spec.num_value_heads),
            }
            specs.append(BufferSpec(f"conv_state.{layer}", inputs, compute, Role.STATE))
            specs += [
                BufferSpec(f"delta_{name}.{layer}", shape, torch.float32, Role.STATE) for name, shape in floats.items()
            ]
        return specs

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.num_bytes // self.max_batch

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a slot's states without pending rows: S, and the last inputs of the convolutions."""
        compute = TORCH_DTYPES[self.config.dtype].itemsize
        return sum(
            4 * spec.num_value_heads * spec.key_dim * spec.value_dim
            + compute * (spec.conv_size - 1) * spec.num_channels
            for spec in self.config.deltas.values()
        )
