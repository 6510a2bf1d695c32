"""This is the interface of the state that a slot keeps between steps; programs, memory plans and sessions use it.

The host's books know which request holds which blocks and rows of it: see `lowlat.sequence.kvcache`.
"""

from abc import ABC, abstractmethod

from lowlat.graphs import BufferSpec, Role
from lowlat.graphs.program import ProgramBuilder, Stage
from lowlat.models.layers import Rows

__all__ = ["SequenceState"]


class SequenceState(ABC):
    """The state that some of a model's layers keep for a slot from one step to the next.

    Operations of the step append and reject rows on the device, in these buffers. The host's books assign the buffers'
    blocks and rows to requests.
    """

    @abstractmethod
    def specs(self) -> list[BufferSpec]:
        """Return its buffers: by position, block or slot, and those of the host's commands about them."""

    def emit_end(self, builder: ProgramBuilder, rows: Rows, stage: Stage) -> None:
        """Emit the operations after all layers that record these rows in the state; most kinds have none."""
        return

    @property
    def num_bytes(self) -> int:
        """Its share of the memory plan."""
        return sum(spec.num_bytes for spec in self.specs())

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot, from which another prompt can go on; 0 for state in blocks, which needs none."""
        return 0

    def slot_bytes(self) -> dict[str, int]:
        """Return the bytes that a slot takes at any length, by name, for reports; none for paged state."""
        return {}

    def slot_pools(self) -> tuple[str, ...]:
        """Return the pools that begin with a row a slot; the host zeroes a slot's row if its request fails with NaN.

        State in blocks has none: its book names the blocks to clear.
        """
        return ()

    def saved(self) -> tuple[str, ...]:
        """Return the buffers that a session saves: the request's blocks of paged buffers, its slot's row of others."""
        return tuple(spec.name for spec in self.specs() if spec.role is Role.STATE)
