"""A place connects an executor that is one rank of several to the peer memory and to the forwarded commands.

A runtime of one rank has no place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lowlat.executors.distributed.peers import PeerMemory
from lowlat.graphs import BufferSet, Role
from lowlat.kernels.collectives.all_reduce import Channel
from lowlat.kernels.collectives.peers.rows import PeerRows
from lowlat.kernels.collectives.shares import RowShares
from lowlat.kernels.step.forward_commands import STOP, TAIL, CommandChannel, forward_commands
from lowlat.lowering.lower import LoweredGroup

if TYPE_CHECKING:
    from lowlat.executors.kernel_executor import KernelExecutor

__all__ = ["RankPlace"]

COMMANDS = "apply_commands"  # the operation that reads commands


@dataclass
class RankPlace:
    """One rank's place.

    leader  the executor of rank 0, whose commands the other ranks read; None on rank 0
    """

    number: int
    peers: PeerMemory
    leader: "KernelExecutor | None" = None
    _commands: CommandChannel = field(init=False)

    def __post_init__(self) -> None:
        self._commands = self.peers.commands(self.number)

    @property
    def given(self) -> BufferSet | None:
        """The leader's commands, which lie in pinned memory."""
        return None if self.leader is None else self.leader.state.of_role(Role.COMMAND)

    @property
    def command_tail(self) -> torch.Tensor:
        """[1] int64: the forwarded count of commands written so far."""
        return self._commands.forwarded[TAIL : TAIL + 1]

    @property
    def stop_flag(self) -> torch.Tensor:
        """[1] int64: the forwarded flag that ends loops."""
        return self._commands.forwarded[STOP : STOP + 1]

    def channel(self, width: int, whole: bool) -> Channel:
        """The memory for rows of a width, see `PeerMemory.channel`."""
        return self.peers.channel(self.number, width, whole)

    def rows(self, width: int, kind: str) -> PeerRows:
        """The memory for rows of a width that one kind of kernel sums, see `PeerMemory.rows`."""
        return self.peers.rows(self.number, width, kind)

    def shares(self, width: int) -> RowShares:
        """The memory for many rows of a width, see `PeerMemory.shares`."""
        return self.peers.shares(self.number, width)

    def forwarding(self, groups: Sequence[LoweredGroup], written: torch.Tensor) -> tuple[LoweredGroup, ...]:
        """Put a launch that forwards commands before each group that reads commands.

        written  [1] int64: the count of commands that the host has written, in pinned memory; rank 0 reads it
        """
        calls = forward_commands(written, self.peers.stop_flag, channel=self._commands)
        return tuple(
            replace(group, calls=(*calls, *group.calls)) if COMMANDS in {op.kind for op in group.ops} else group
            for group in groups
        )
