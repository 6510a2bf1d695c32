"""This module has the device functions of a step's checks: they find the first failure, report it, and drop the slot.

Of all failures of a slot the one with the lowest code is reported, then with the lowest place. Each thread keeps its
own lowest, and the block takes the lowest of all. Arrays are passed as addresses.
"""

from typing import Any

from lowlat.kernels.common.memory import long_at, set_int, set_long
from lowlat.kernels.reference.step.checks import CODE, ENDS, EXPECTED, PLACE, VALUE, WIDTH
from lowlat.kernels.reference.step.slot_record import DRAFT_LIMIT, NUM_INTS
from lowlat.kernels.toolchain.numba_cuda import device_function, int64

__all__ = ["NOTHING", "PLACES", "THREADS", "drop", "less", "tell"]

THREADS = 256
NOTHING = (1 << 62) - 1  # above any code and place
PLACES = 32  # bits of a place


@device_function
def less(best: Any, fails: Any, code: Any, place: Any, value: Any, expected: Any) -> Any:
    """The lesser of a failure and another one, where that is one: (key, value, expected)."""
    key = int64(code) << PLACES | int64(place)
    known, known_value, known_expected = best
    if fails and key < known:
        return key, int64(value), int64(expected)
    return known, known_value, known_expected


@device_function
def tell(failures: Any, row: Any, key: Any, value: Any, expected: Any) -> None:
    """Write a failure, but whether it ends the request."""
    first = row * WIDTH
    set_long(failures, first + CODE, key >> PLACES)
    set_long(failures, first + PLACE, key & ((int64(1) << PLACES) - 1))
    set_long(failures, first + VALUE, value)
    set_long(failures, first + EXPECTED, expected)


@device_function
def drop(index: Any, slot: Any, falls_back: Any, state: Any, failures: Any) -> None:
    """Take a slot off the list: it goes on without drafts where it may have had some, else it ends."""
    slots, active, num_drafts, slot_ints = state
    limit = slot * NUM_INTS + DRAFT_LIMIT
    goes_on = falls_back and long_at(slot_ints, limit) > 0
    if goes_on:
        set_long(slot_ints, limit, int64(0))
    else:
        set_int(active, slot, int64(0))
    set_int(num_drafts, slot, int64(0))
    set_int(slots, index, int64(-1))
    set_long(failures, slot * WIDTH + ENDS, int64(0) if goes_on else int64(1))
