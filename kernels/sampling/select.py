"""This module distributes a row of float32 numbers over blocks, and finds its largest; device functions.

A row of V numbers is divided into chunks of CHUNK, one block of THREADS threads each. The chunks depend on V alone, not
on the number of rows. Numbers are ordered by an unsigned key (0.0 and -0.0 are equal) and then by the lowest index.
Both are kept as one pair (key, low) with low = 2**32 - 1 - index: the larger pair comes first. (0, 0) means no number.
A key of BROKEN, above every other, means that the row has a forbidden number. The last block of a row to arrive, by a
counter, finishes the row.
"""

import functools
from typing import Any

from lowlat.kernels.sampling.limits import VOCABULARY
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, uint32
from lowlat.kernels.toolchain.ptx import (
    atomic_add_gpu,
    copies_commit,
    copies_wait,
    copy_async_16,
    float_of_bits,
    load_global_64,
    load_global_i32,
    load_shared_128,
    store_global_64,
    store_global_u32,
    store_shared_128,
    store_shared_u32,
    warp_max,
)

__all__ = [
    "BROKEN",
    "CHUNK",
    "EVERY_LANE",
    "FINITE",
    "GROUPS",
    "INFINITY",
    "LARGEST_WORD",
    "MAGNITUDE",
    "MINUS_INFINITY",
    "MINUS_INFINITY_KEY",
    "STRIDE",
    "THREADS",
    "WARPS",
    "best_partial",
    "better",
    "block_best",
    "copies_wait_all",
    "count_chunks",
    "greater",
    "index_of_low",
    "is_last",
    "load_words",
    "make_stage",
    "order_key",
    "row_best",
    "value_of_key",
    "warp_best",
    "words_best",
    "words_broken",
]

THREADS = 256
WARPS = THREADS // 32
GROUPS = 4  # each thread owns the four numbers from 4 * thread + STRIDE * group on
STRIDE = 4 * THREADS
CHUNK = GROUPS * STRIDE
EVERY_LANE = 0xFFFFFFFF
LARGEST_WORD = 0xFFFFFFFF
BROKEN = 0xFFFFFFFF
SIGN = 0x80000000
MAGNITUDE = 0x7FFFFFFF
FINITE = 0x7F7FFFFF  # bits of the largest finite magnitude
INFINITY = 0x7F800000  # bits of infinity: larger magnitudes are NaN
MINUS_INFINITY = 0xFF800000
MINUS_INFINITY_KEY = 0x007FFFFF

copies_wait_all = copies_wait(0)


def count_chunks(name: str, width: int) -> int:
    """Return the number of blocks that share a row. Raises ShapeError for a width outside of VOCABULARY."""
    VOCABULARY.check(f"{name}: columns", width)
    return -(-width // CHUNK)


@functools.cache
def make_stage(width: int) -> Any:
    """A device function that starts to copy a chunk of 4-byte words into shared memory, `pad` past the row's end.

    Its arguments are: shared address (16-byte aligned), address of the row, first index of the chunk, pad (uint32).
    Copies are 16 bytes wide if rows of `width` words are so aligned. After `copies_wait_all` each thread sees its own
    words; after a further barrier it sees all words.
    """
    wide = width % 4 == 0

    @device_function
    def stage(target: Any, row: Any, first: Any, pad: Any) -> None:
        for group in range(GROUPS):
            place = int64(group * STRIDE + 4 * cuda.threadIdx.x)
            if wide:
                if first + place < width:
                    copy_async_16(uint32(target + 4 * place), row + 4 * (first + place))
                else:
                    store_shared_128(uint32(target + 4 * place), pad, pad, pad, pad)
            else:
                for part in range(4):
                    word = pad
                    if first + place + part < width:
                        word = uint32(load_global_i32(row + 4 * (first + place + part)))
                    store_shared_u32(uint32(target + 4 * (place + part)), word)
        copies_commit()

    return stage


@device_function
def order_key(bits: Any) -> Any:
    """Return the key of a float32 given by its bits: unsigned keys are ordered like the numbers, 0.0 equal to -0.0."""
    if bits > uint32(SIGN):
        return uint32(bits ^ uint32(LARGEST_WORD))
    return uint32(bits | uint32(SIGN))


@device_function
def value_of_key(key: Any) -> Any:
    """Return the number with this key; 0.0 for both zeros."""
    if key >= uint32(SIGN):
        return float_of_bits(uint32(key ^ uint32(SIGN)))
    return float_of_bits(uint32(key ^ uint32(LARGEST_WORD)))


@device_function
def index_of_low(low: Any) -> Any:
    """Return the index that the second half of a pair encodes."""
    return int64(LARGEST_WORD) - int64(low)


@device_function
def better(key: Any, low: Any, bits: Any, index: Any) -> Any:
    """Return the pair, or that of the number if its key is larger; numbers must come in ascending order of indices."""
    other = order_key(bits)
    if other > key:
        return other, uint32(int64(LARGEST_WORD) - index)
    return key, low


@device_function
def load_words(staged: Any) -> Any:
    """Load a thread's own words of a chunk at a shared address, in fours."""
    place = uint32(staged + 16 * uint32(cuda.threadIdx.x))
    return (
        load_shared_128(place),
        load_shared_128(uint32(place + uint32(4 * STRIDE))),
        load_shared_128(uint32(place + uint32(8 * STRIDE))),
        load_shared_128(uint32(place + uint32(12 * STRIDE))),
    )


@device_function
def _best_of_four(key: Any, low: Any, four: Any, index: Any) -> Any:
    key, low = better(key, low, four[0], index)
    key, low = better(key, low, four[1], index + 1)
    key, low = better(key, low, four[2], index + 2)
    return better(key, low, four[3], index + 3)


@device_function
def words_best(words: Any, first: Any) -> Any:
    """Return the best pair among a thread's own words.

    first  index of the chunk's first number; pads must be minus infinity, which loses to the number before it
    """
    index = first + int64(4 * cuda.threadIdx.x)
    key, low = _best_of_four(uint32(0), uint32(0), words[0], index)
    key, low = _best_of_four(key, low, words[1], index + STRIDE)
    key, low = _best_of_four(key, low, words[2], index + 2 * STRIDE)
    return _best_of_four(key, low, words[3], index + 3 * STRIDE)


@device_function
def _worst_of_four(four: Any, index: Any, width: Any) -> Any:
    worst = uint32(four[0] & uint32(MAGNITUDE)) if index < width else uint32(0)
    worst = max(worst, uint32(four[1] & uint32(MAGNITUDE)) if index + 1 < width else uint32(0))
    worst = max(worst, uint32(four[2] & uint32(MAGNITUDE)) if index + 2 < width else uint32(0))
    return max(worst, uint32(four[3] & uint32(MAGNITUDE)) if index + 3 < width else uint32(0))


@device_function
def words_broken(words: Any, first: Any, width: Any, largest: Any) -> Any:
    """Return whether one of a thread's own words of the row has a magnitude above `largest` (bits), without pads."""
    index = first + int64(4 * cuda.threadIdx.x)
    worst = max(_worst_of_four(words[0], index, width), _worst_of_four(words[1], index + STRIDE, width))
    worst = max(worst, _worst_of_four(words[2], index + 2 * STRIDE, width))
    return max(worst, _worst_of_four(words[3], index + 3 * STRIDE, width)) > largest


@device_function
def warp_best(key: Any, low: Any) -> Any:
    """Return the best pair of a warp, in every lane; all lanes must call it."""
    best = warp_max(key)
    mine = low if key == best else uint32(0)
    return best, warp_max(mine)


@device_function
def block_best(key: Any, low: Any, pairs: Any) -> Any:
    """Return the best pair of a block, valid only in its first warp; all threads must call it.

    pairs  [2 * WARPS] uint32, shared memory that no thread uses otherwise during the call
    """
    thread = cuda.threadIdx.x
    key, low = warp_best(key, low)
    if thread & 31 == 0:
        pairs[2 * (thread >> 5)] = key
        pairs[2 * (thread >> 5) + 1] = low
    cuda.syncthreads()
    if thread < 32:
        key, low = uint32(0), uint32(0)
        if thread < WARPS:
            key, low = pairs[2 * thread], pairs[2 * thread + 1]
        key, low = warp_best(key, low)
    return key, low


@device_function
def is_last(counter: Any, chunks: Any) -> Any:
    """Count the arrival of a row's block. Returns whether it is the last of `chunks`, which resets the counter.

    counter  its address. One whole warp calls it; if its block is the last, its lanes see all blocks' earlier writes.
    """
    lane = cuda.threadIdx.x & 31
    before = 0
    cuda.syncwarp()
    if lane == 0:
        before = int64(atomic_add_gpu(counter, uint32(1)))
    before = cuda.shfl_sync(EVERY_LANE, before, 0)
    last = before == chunks - 1
    if last and lane == 0:
        store_global_u32(counter, uint32(0))
    cuda.syncwarp()
    return last


@device_function
def greater(key: Any, low: Any, other_key: Any, other_low: Any) -> Any:
    """Return the better of two pairs."""
    if other_key > key or (other_key == key and other_low > low):
        return other_key, other_low
    return key, low


@device_function
def best_partial(partials: Any, chunks: Any) -> Any:
    """Return the best of a row's pairs, one a chunk, in every lane of a warp.

    partials  address of [chunks, 2] uint32
    """
    key, low = uint32(0), uint32(0)
    for part in range(cuda.threadIdx.x & 31, chunks, 32):
        its_key, its_low = load_global_64(partials + 8 * int64(part))
        key, low = greater(key, low, its_key, its_low)
    return warp_best(key, low)


@device_function
def row_best(key: Any, low: Any, pairs: Any, partials: Any, counter: Any, chunk: Any, chunks: Any) -> Any:
    """Return the best pair of a row from each thread's: (whether this block finishes the row, key, low).

    pairs     as in `block_best`
    partials  address of the row's [chunks, 2] uint32
    counter   address of the row's counter, zero before and after
    All threads of all blocks of the row must call it; only the first warp of one block gets True.
    """
    key, low = block_best(key, low, pairs)
    last = False
    if cuda.threadIdx.x < 32:
        lane = cuda.threadIdx.x
        if lane == 0:
            store_global_64(partials + 8 * int64(chunk), key, low)
        last = is_last(counter, chunks)
        if last:
            key, low = best_partial(partials, chunks)
    return last, key, low
