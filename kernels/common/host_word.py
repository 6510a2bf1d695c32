"""This module waits for a word that the host writes into pinned memory while a step runs: a count of committed tokens.

The host writes the data next to the word first, so it belongs to that count. Reads of one address over the bus run one
after another, so a single block waits for the host and tells the others.
"""

from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["await_host", "await_told"]

# Turns, each an access over the bus to the host, or half as long to the GPU's memory: at least half a minute in all. A
# host may be suspended for so long.
HOST_SPIN_LIMIT = 1 << 26


@device_function
def await_host(word: Any, length: Any) -> None:
    """Wait until a word is at least `length`. One thread calls it; after a barrier the others may read, too.

    word  its address, int64. A launch that waits too long ends with an error.
    """
    turns = 0
    while ptx.load_acquire_system(word) < length:
        if turns == HOST_SPIN_LIMIT:
            ptx.trap()
        turns += 1


@device_function
def await_told(told: Any) -> None:
    """Wait until the block that waits for the host has increased a uint32. One thread calls it.

    told  its address, in the GPU's memory. A launch that waits too long ends with an error.
    """
    turns = 0
    while ptx.load_acquire_gpu(told) == uint32(0):
        if turns == HOST_SPIN_LIMIT:
            ptx.trap()
        turns += 1
