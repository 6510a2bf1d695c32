"""Numbers that some blocks leave in global memory for others that run already, without a barrier between them.

Before the launch their place is filled with a NaN that arithmetic never gives; whoever reads asks again until none of
it is left. Every number says for itself whether it is there, so that nobody needs a fence, which would wait for all
copies that a block has under way. It knows nothing of what the numbers are.

Where a number has one reader, who can leave its place as it was, numbers are kept as their complements: then zero is
what is not there, as in memory that is new.
"""

from typing import Any

from lowlat.kernels.numba_cuda import device_function, uint32

__all__ = ["MISSING", "complement", "is_missing", "lacks_one"]

MISSING = 0xFFFFFFFF  # a float32, or two bf16; the NaN of arithmetic are 0x7FFFFFFF and 0x7FFF


@device_function
def is_missing(word: Any) -> Any:
    """Whether a float32 is not there."""
    return word == uint32(MISSING)


@device_function
def complement(word: Any) -> Any:
    """What a float32's bits are kept as, and its bits from that: 0 where it is not there."""
    return uint32(word ^ uint32(MISSING))


@device_function
def lacks_one(word: Any) -> Any:
    """Whether one of a word's two bf16 is not there: a half of its complement is zero."""
    rest = uint32(word ^ uint32(MISSING))
    return (uint32(rest - uint32(0x00010001)) & word & uint32(0x80008000)) != uint32(0)
