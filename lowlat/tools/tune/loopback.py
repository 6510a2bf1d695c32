"""This module gives one rank peer memory in which its own messages arrive in place of a peer's.

A launch that adds rows over ranks (`PeerRows`) writes its numbers to each peer's memory, and reads those that peers
wrote to its own. Here a peer's memory is the rank's own, at an offset, so that a number sent to a peer lies where the
rank expects that peer's number. So a thread waits for a word that it has just written itself: a launch can be repeated
any number of times, waits for no peer, and executes all instructions of its all-reduce. Its time lacks only the
transfer between GPUs, which is the same for all plans, and waits for slower peers.

Launches that only exchange have no plan and are not timed, so their memory has no offset.
"""

import torch

from lowlat.executors.distributed.peers import PeerMemory
from lowlat.kernels.collectives.peers.rows import PeerRows

__all__ = ["LoopedMemory", "looped"]


class LoopedMemory(PeerMemory):
    """`PeerMemory` whose rows that kernels add up come back to the rank that sent them."""

    def __init__(self, devices: list[torch.device], rows: dict[int, int]) -> None:
        super().__init__(devices, rows)
        self._looped: dict[tuple[int, int, str], PeerRows] = {}

    def rows(self, rank: int, width: int, kind: str) -> PeerRows:
        """See `PeerMemory.rows`; the memory of a rank is its own alone."""
        key = rank, width, kind
        if key not in self._looped:
            self._looped[key] = looped(super().rows(rank, width, kind))
        return self._looped[key]


def looped(rows: PeerRows) -> PeerRows:
    """The memory of one rank in which what it sends comes back to it.

    A rank's number for peer p goes to part `rank` of p's area, and is awaited in part p of the rank's own: so p's area
    lies p - rank parts after the rank's. Beyond its own area nothing is read or written.
    """
    own, size = rows.areas[rows.rank], rows.size
    part, count = rows.rows * rows.width, own.numel()
    whole = torch.zeros(count + 2 * (size - 1) * part, dtype=own.dtype, device=own.device)
    first = (size - 1 - rows.rank) * part  # of rank 0's
    areas = tuple(whole[first + p * part :][:count].view(own.shape) for p in range(size))
    return PeerRows(rows.rank, areas, rows.abort)
