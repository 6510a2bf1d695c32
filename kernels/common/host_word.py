"""This module waits for a word that the host writes into pinned memory while a step runs: a count of committed tokens.

The host writes the data next to the word first, so it belongs to that count. Reads of one address over the bus run one
after another, so a single block waits for the host and tells the others.
"""

from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["await_host", "await_told"]

# Turns, each a trip over the bus to the host, or half of that to the GPU's memory: at least half a minute. So long
# may a host stand still.
HOST_SPIN_LIMIT = 1 << 26


@device_function
def await_host(word: Any, length: Any) -> None:
    """Wait until a word is at least `length`; one thread comes here, and a barrier after it lets others read.

    word  its address, int64. A launch that waits too long ends as a failed one.
    """
    turns = 0
    while ptx.load_acquire_system(word) < length:
        if turns == HOST_SPIN_LIMIT:
            ptx.trap()
        turns += 1


@device_function
def await_told(told: Any) -> None:
    """Wait until the block that waits for the host has counted a uint32 up; one thread comes here.

    told  its address, in the GPU's memory. A launch that waits too long ends as a failed one.
    """
    turns = 0
    while ptx.load_acquire_gpu(told) == uint32(0):
        if turns == HOST_SPIN_LIMIT:
            ptx.trap()
        turns += 1
