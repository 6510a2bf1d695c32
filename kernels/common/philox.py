"""This module has Philox4x32-10 and its uniform numbers as device functions.

The bits are those of `kernels.reference.sampling.random`.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011. The caller makes counters
and keys.
"""

from typing import Any

from lowlat.kernels.reference.sampling import random
from lowlat.kernels.toolchain.numba_cuda import device_function, float32, uint32, uint64

__all__ = ["philox", "uniform"]

ROUNDS = random.ROUNDS
HALF = uint64(32)
WORD = uint64(random.WORD)
FIRST_MULTIPLIER, SECOND_MULTIPLIER = (uint64(value) for value in random.MULTIPLIERS)
FIRST_STEP, SECOND_STEP = (uint64(value) for value in random.KEY_STEPS)
ONE = uint64(1)
SPACING = float32(2.0**-33)
LARGEST = float32(random.LARGEST)


@device_function
def philox(counter0: Any, counter1: Any, counter2: Any, counter3: Any, key0: Any, key1: Any) -> Any:
    """Return four random words for a counter of four words and a key of two, all uint32.

    Time: 20 products of 64 bits. The words are kept in 64 bits with the upper half zero, so no sum wraps.
    """
    c0, c1, c2, c3 = uint64(counter0), uint64(counter1), uint64(counter2), uint64(counter3)
    k0, k1 = uint64(key0), uint64(key1)
    for _ in range(ROUNDS):
        first, second = c0 * FIRST_MULTIPLIER, c2 * SECOND_MULTIPLIER
        c0, c1, c2, c3 = (second >> HALF) ^ c1 ^ k0, second & WORD, (first >> HALF) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + FIRST_STEP) & WORD, (k1 + SECOND_STEP) & WORD
    return uint32(c0), uint32(c1), uint32(c2), uint32(c3)


@device_function
def uniform(word: Any) -> Any:
    """Return a float32 in (0, 1): (2 word + 1) rounded once to float32, times 2**-33, at most 1 - 2**-24."""
    wide = uint64(word)
    value = float32(wide + wide + ONE) * SPACING
    return value if value < LARGEST else LARGEST
