"""This module passes numbers between blocks of a launch through global memory, without a barrier between the blocks.

Before the launch their places are filled with a NaN that arithmetic never produces. A reader loads again until no such
NaN is left. So every number shows by itself whether it has been written. No fence is needed, which would wait for all
copies that a block has in flight.

A thread that waits in a loop for another block, here or at a barrier of blocks, counts its turns. After a fixed number
the other block is assumed lost, and the launch ends with an error that reaches the host. Turns are counted, not time,
so that a process that is suspended, or shares its GPU, does not fail.
"""

from typing import Any

from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, uint32

__all__ = ["MISSING", "SPIN_LIMIT", "is_missing", "lacks_one", "next_turn"]

MISSING = 0xFFFFFFFF  # a float32, or two bf16; arithmetic produces the NaNs 0x7FFFFFFF and 0x7FFF
SPIN_LIMIT = 1 << 23  # turns, each with a load that bypasses L1: at least 3 seconds in all, mostly some 7


@device_function
def is_missing(word: Any) -> Any:
    """Return whether a float32 has not been written yet."""
    return word == uint32(MISSING)


@device_function
def lacks_one(word: Any) -> Any:
    """Return whether one of a word's two bf16 has not been written yet: then a half of its complement is zero."""
    rest = uint32(word ^ uint32(MISSING))
    return (uint32(rest - uint32(0x00010001)) & word & uint32(0x80008000)) != uint32(0)


@device_function
def next_turn(turns: Any) -> Any:
    """Count one more turn of a loop that waits for another block; too many turns end the launch with an error."""
    if turns == uint32(SPIN_LIMIT):
        ptx.trap()
    return uint32(turns + uint32(1))
