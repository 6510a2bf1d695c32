"""This is the interface of what a slot keeps between steps; programs, memory plans and sessions read it.

Which request holds which part of them is the host's to know: `lowlat.sequence.kvcache`.
"""

from abc import ABC, abstractmethod

from lowlat.graphs import BufferSpec, Role
from lowlat.graphs.program import ProgramBuilder, Stage
from lowlat.models.layers import Rows

__all__ = ["SequenceState"]


class SequenceState(ABC):
    """The state that some of a model's layers keep for a slot from one step to the next.

    Rows are appended and rejected on the device, by operations that read and write these buffers. The host's part is
    the book's.
    """

    @abstractmethod
    def specs(self) -> list[BufferSpec]:
        """The buffers that hold it: by position or by block of a pool, by slot, or the host's orders about them."""

    def emit_end(self, builder: ProgramBuilder, rows: Rows, stage: Stage) -> None:
        """Append the operations, after those of all layers, by which these rows are in the state; most have none."""
        return

    @property
    def num_bytes(self) -> int:
        """Its share of the memory plan."""
        return sum(spec.num_bytes for spec in self.specs())

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot, from which another prompt goes on; 0: it needs none, its blocks hold all."""
        return 0

    def slot_bytes(self) -> dict[str, int]:
        """The bytes that a slot takes for good, however long its text: of reports, by name. Of paged state none."""
        return {}

    def slot_pools(self) -> tuple[str, ...]:
        """The pools whose first rows are the slots': the host zeroes the row of a request that failed with NaN.

        Of state in blocks there are none: the book names the blocks to clear.
        """
        return ()

    def saved(self) -> tuple[str, ...]:
        """The buffers whose content makes up a request's state: of paged ones its blocks, of others its slot's row."""
        return tuple(spec.name for spec in self.specs() if spec.role is Role.STATE)
