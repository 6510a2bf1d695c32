"""This module has the interface of the state that a slot keeps between steps, for programs, memory plans and sessions.

The host's book in `lowlat.sequence.kvcache` knows which request holds which part of the buffers.
"""

from abc import ABC, abstractmethod

from lowlat.graphs import BufferSpec, Role
from lowlat.graphs.program import ProgramBuilder, Stage
from lowlat.models.layers import Rows

__all__ = ["SequenceState"]


class SequenceState(ABC):
    """The state that some of a model's layers keep for a slot from one step to the next.

    Operations on the device append and reject rows in these buffers. The host's books give blocks and rows to requests.
    """

    @abstractmethod
    def specs(self) -> list[BufferSpec]:
        """The buffers of the state: by position or by block of a pool, by slot, or the host's commands about them."""

    def emit_end(self, builder: ProgramBuilder, rows: Rows, stage: Stage) -> None:
        """Append the operations that complete the state for these rows, after those of all layers; most have none."""
        return

    @property
    def num_bytes(self) -> int:
        """Its share of the memory plan."""
        return sum(spec.num_bytes for spec in self.specs())

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot, from which another prompt continues; 0: it needs none, since its blocks hold all."""
        return 0

    def slot_bytes(self) -> dict[str, int]:
        """The bytes that a slot always takes, however long its text is, by name, for reports; paged state has none."""
        return {}

    def slot_pools(self) -> tuple[str, ...]:
        """The pools whose first rows belong to slots: the host zeroes the row of a request that failed with NaN.

        State in blocks has none: the book names the blocks to clear.
        """
        return ()

    def saved(self) -> tuple[str, ...]:
        """The buffers with a request's state: its blocks of paged ones, its slot's row of others."""
        return tuple(spec.name for spec in self.specs() if spec.role is Role.STATE)
