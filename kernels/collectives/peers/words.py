"""Ranks push numbers to each other's memory in words of eight bytes: a float32 and its epoch.

The epoch says whether a word has arrived, so no flag, fence or barrier is needed. Two slots alternate. A rank pushes to
a slot again only after it has received the all-reduce in between from all peers, and these began it after they had read
this slot. So no word is overwritten that a rank still awaits, and the old words of a slot are always two epochs old.
While they wait, ranks read only their own memory.

A wait ends without its words when the word `abort`, which all ranks and the host share, is not zero, or after so many
polls that the peer is considered lost. Then NaN replace the words, and the block does not wait again.
"""

from typing import Any

from lowlat.errors import ConfigError
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.numba_cuda import device_function, int64, uint32

__all__ = [
    "HOST_GAVE_UP",
    "MAX_RANKS",
    "MISSING_BITS",
    "WORD_BYTES",
    "area_of",
    "await_chunk",
    "await_long",
    "await_word",
    "awaited_code",
    "check_rank",
    "push_chunk",
]

MAX_RANKS = 8
WORD_BYTES = 8
ABORT_TURNS = 1 << 12  # polls between reads of `abort`, which lies in the host's memory: some 2 ms
# Polls, each a trip to the L2: at least half a minute. A process may be stopped between the launches of two GPUs.
PEER_SPIN_LIMIT = 1 << 26
MISSING_BITS = 0x7FFFFFFF  # the NaN that arithmetic gives
HOST_GAVE_UP = 1 << 16  # what the host sets `abort` to; ranks set `awaited_code`


def check_rank(rank: int, count: int) -> None:
    """Raise ConfigError for an unsupported number of ranks, and for a rank outside of it."""
    if not 2 <= count <= MAX_RANKS or not 0 <= rank < count:
        raise ConfigError(f"2 to {MAX_RANKS} ranks exchange (tensor_parallel_size), not {rank} of {count}")


def awaited_code(code: int) -> tuple[int, int]:
    """The rank that gave up and the rank that it waited for, decoded from the word `abort`."""
    return (code & 0xFF) - 1, (code >> 8 & 0xFF) - 1


@device_function
def area_of(rank: Any, areas: Any) -> Any:
    """One of MAX_RANKS addresses, without an array in local memory."""
    a, b, c, d, e, f, g, h = areas
    low = a if rank == 0 else b if rank == 1 else c if rank == 2 else d
    high = e if rank == 4 else f if rank == 5 else g if rank == 6 else h
    return int64(low if rank < 4 else high)


@device_function
def push_chunk(place: Any, stride: Any, words: Any, epoch: Any) -> None:
    """Push 8 float32, as bits, to a peer's memory, in pieces `stride` bytes apart, so that warps write runs."""
    a, b, c, d, e, f, g, h = words
    ptx.store_relaxed_system_words(place, a, b, epoch)
    ptx.store_relaxed_system_words(place + stride, c, d, epoch)
    ptx.store_relaxed_system_words(place + stride * 2, e, f, epoch)
    ptx.store_relaxed_system_words(place + stride * 3, g, h, epoch)


@device_function
def _gives_up(turns: Any, abort: Any, code: Any) -> Any:
    """Return 1 if a wait is given up, with its reason in `abort`; else 0."""
    if ptx.load_acquire_system(abort) != int64(0):
        return uint32(1)
    if turns >= uint32(PEER_SPIN_LIMIT):
        ptx.store_release_system(abort, int64(code))
        return uint32(1)
    return uint32(0)


@device_function
def await_chunk(place: Any, stride: Any, epoch: Any, abort: Any, code: Any, lost: Any) -> Any:
    """8 float32, as bits, that a peer leaves here, and whether the wait was given up.

    lost  1 where it was given up before: nothing is awaited then, and all eight are NaN
    """
    turns, waiting = uint32(0), True
    a, b, c, d = uint32(0), uint32(0), uint32(0), uint32(0)
    e, f, g, h = uint32(0), uint32(0), uint32(0), uint32(0)
    while waiting:
        a, epoch_a, b, epoch_b = ptx.load_relaxed_system_words(place)
        c, epoch_c, d, epoch_d = ptx.load_relaxed_system_words(place + stride)
        e, epoch_e, f, epoch_f = ptx.load_relaxed_system_words(place + stride * 2)
        g, epoch_g, h, epoch_h = ptx.load_relaxed_system_words(place + stride * 3)
        first = (epoch_a ^ epoch) | (epoch_b ^ epoch) | (epoch_c ^ epoch) | (epoch_d ^ epoch)
        last = (epoch_e ^ epoch) | (epoch_f ^ epoch) | (epoch_g ^ epoch) | (epoch_h ^ epoch)
        waiting = (first | last) != uint32(0) and lost == uint32(0)
        if waiting:
            turns = uint32(turns + uint32(1))
            if turns & uint32(ABORT_TURNS - 1) == uint32(0):
                lost = _gives_up(turns, abort, code)
    if lost != uint32(0):
        a, b, c, d = uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS)
        e, f, g, h = uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS), uint32(MISSING_BITS)
    return (a, b, c, d, e, f, g, h), lost


@device_function
def await_word(place: Any, epoch: Any, abort: Any, code: Any, lost: Any) -> Any:
    """A float32, as bits, that a peer leaves here, and whether the wait was given up; see above."""
    turns, waiting, word = uint32(0), True, uint32(0)
    while waiting:
        word, found = ptx.load_relaxed_system_word(place)
        waiting = found != epoch and lost == uint32(0)
        if waiting:
            turns = uint32(turns + uint32(1))
            if turns & uint32(ABORT_TURNS - 1) == uint32(0):
                lost = _gives_up(turns, abort, code)
    return uint32(MISSING_BITS) if lost != uint32(0) else word, lost


@device_function
def await_long(place: Any, epoch: Any, abort: Any, code: Any, lost: Any) -> Any:
    """An int64 that a peer leaves here in two words, low and high, and whether the wait was given up; see above."""
    turns, waiting, low, high = uint32(0), True, uint32(0), uint32(0)
    while waiting:
        low, epoch_low, high, epoch_high = ptx.load_relaxed_system_words(place)
        waiting = ((epoch_low ^ epoch) | (epoch_high ^ epoch)) != uint32(0) and lost == uint32(0)
        if waiting:
            turns = uint32(turns + uint32(1))
            if turns & uint32(ABORT_TURNS - 1) == uint32(0):
                lost = _gives_up(turns, abort, code)
    return int64(low) | int64(high) << int64(32), lost
