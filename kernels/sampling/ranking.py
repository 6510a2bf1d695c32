"""This module ranks the likeliest tokens of a row over several blocks; device functions on the pairs of `select`.

Each warp ranks its own numbers, one warp merges the block's ranked lists, and one warp of the last block merges the
row's, in groups if there are many. A list is `stride` pairs of two words each, best first; (0, 0) follows the last.
"""

import functools
from typing import Any

from lowlat.kernels.sampling.select import (
    BROKEN,
    GROUPS,
    STRIDE,
    THREADS,
    WARPS,
    greater,
    is_last,
    order_key,
    warp_best,
)
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, int64, uint32
from lowlat.kernels.toolchain.ptx import load_global_64, load_shared_128, store_global_64

__all__ = ["block_ranks", "count_lists", "make_row_ranks", "merge_lists"]

LARGEST_WORD = 0xFFFFFFFF
GROUP = 64  # lists that a warp merges at once


def count_lists(chunks: int) -> int:
    """Lists that the shared memory of `make_row_ranks` holds: a row's, and one for each group where these are many."""
    return chunks if chunks <= GROUP else chunks + -(-chunks // GROUP)


@device_function
def _below(key: Any, low: Any, bits: Any, index: Any, bound_key: Any, bound_low: Any) -> Any:
    """The better of a pair and a number, if the number comes after the bound."""
    other, its_low = order_key(bits), uint32(int64(LARGEST_WORD) - index)
    if other < bound_key or (other == bound_key and its_low < bound_low):
        return greater(key, low, other, its_low)
    return key, low


@device_function
def _next_best(staged: Any, first: Any, bound_key: Any, bound_low: Any) -> Any:
    """The best pair after the bound among the numbers that a thread owns."""
    key, low = uint32(0), uint32(0)
    for group in range(GROUPS):
        place = int64(group * STRIDE + 4 * cuda.threadIdx.x)
        words = load_shared_128(uint32(staged + 4 * place))
        index = first + place
        key, low = _below(key, low, words[0], index, bound_key, bound_low)
        key, low = _below(key, low, words[1], index + 1, bound_key, bound_low)
        key, low = _below(key, low, words[2], index + 2, bound_key, bound_low)
        key, low = _below(key, low, words[3], index + 3, bound_key, bound_low)
    return key, low


@device_function
def merge_lists(lists: Any, count: Any, stride: Any, ranks: Any, ranked: Any) -> None:
    """Merge up to 64 ranked lists: for one whole warp.

    lists   [count * stride * 2] uint32  shared
    ranks   how many to take, at most stride
    ranked  [ranks * 2] uint32           shared, out
    """
    lane = int64(cuda.threadIdx.x & 31)
    near, far = lane * stride, (lane + 32) * stride
    near_key, near_low, far_key, far_low = uint32(0), uint32(0), uint32(0), uint32(0)
    if lane < count:
        near_key, near_low = lists[2 * near], lists[2 * near + 1]
    if lane + 32 < count:
        far_key, far_low = lists[2 * far], lists[2 * far + 1]
    for rank in range(ranks):
        key, low = greater(near_key, near_low, far_key, far_low)
        key, low = warp_best(key, low)
        if lane == 0:
            ranked[2 * rank], ranked[2 * rank + 1] = key, low
        if low != uint32(0) and near_key == key and near_low == low:
            near += 1
            near_key, near_low = uint32(0), uint32(0)
            if near < (lane + 1) * stride:
                near_key, near_low = lists[2 * near], lists[2 * near + 1]
        elif low != uint32(0) and far_key == key and far_low == low:
            far += 1
            far_key, far_low = uint32(0), uint32(0)
            if far < (lane + 33) * stride:
                far_key, far_low = lists[2 * far], lists[2 * far + 1]
    cuda.syncwarp()


@device_function
def block_ranks(staged: Any, first: Any, stride: Any, ranks: Any, lists: Any, ranked: Any) -> None:
    """Rank a chunk: all threads must come here, and see `ranked` when they return.

    staged  shared address of the chunk, each thread's own words visible to it; pads are minus infinity
    first   index of its first number
    lists   [WARPS * stride * 2] uint32  shared scratch
    ranked  [stride * 2] uint32          shared, out: the first `ranks` pairs
    """
    thread = cuda.threadIdx.x
    lane, mine = thread & 31, int64(thread >> 5) * stride
    key, low = _next_best(staged, first, uint32(BROKEN), uint32(0))
    for rank in range(ranks):
        best_key, best_low = warp_best(key, low)
        if lane == 0:
            lists[2 * (mine + rank)], lists[2 * (mine + rank) + 1] = best_key, best_low
        if low != uint32(0) and key == best_key and low == best_low:
            key, low = _next_best(staged, first, key, low)
    if lane == 0:
        for rank in range(ranks, stride):
            lists[2 * (mine + rank)], lists[2 * (mine + rank) + 1] = uint32(0), uint32(0)
    cuda.syncthreads()
    if thread < 32:
        merge_lists(lists, WARPS, stride, ranks, ranked)
    cuda.syncthreads()


@device_function
def _merge_groups(lists: Any, count: Any, stride: Any, ranks: Any, ranked: Any) -> None:
    """Merge more ranked lists than `merge_lists` takes: for one whole warp, whose arguments these are.

    lists  [count_lists(count) * stride * 2] uint32  shared; what follows the first `count` is scratch
    """
    groups = (count + GROUP - 1) // GROUP
    merged = lists[2 * stride * count :]
    for group in range(groups):
        first = GROUP * group
        mine, target = lists[2 * stride * first :], merged[2 * stride * group :]
        merge_lists(mine, min(count - first, GROUP), stride, ranks, target)
    merge_lists(merged, groups, stride, ranks, ranked)


@functools.cache
def make_row_ranks(chunks: int) -> Any:
    """A device function by which the blocks of a row rank it; specialised by how many they are."""
    merge = merge_lists if chunks <= GROUP else _merge_groups

    @device_function
    def row_ranks(
        ranked: Any, stride: Any, ranks: Any, partials: Any, counter: Any, chunk: Any, lists: Any, flag: Any
    ) -> Any:
        """Hand in a block's ranked list; the last block of the row gets the row's in `ranked`, and True.

        ranked    [stride * 2] uint32          shared, updated
        partials  address of the row's [chunks, stride, 2] uint32
        counter   address of the row's counter, zero before and after
        lists     [count_lists(chunks) * stride * 2] uint32  shared scratch: the chunks' lists are in front
        flag      [1] uint32                    shared scratch
        All threads must come here; all of the last block see `ranked` when they return.
        """
        thread = cuda.threadIdx.x
        if thread < 32:
            for rank in range(thread, ranks, 32):
                at = partials + 8 * (chunk * stride + rank)
                store_global_64(at, ranked[2 * rank], ranked[2 * rank + 1])
            last = is_last(counter, chunks)
            if thread == 0:
                flag[0] = uint32(1) if last else uint32(0)
        cuda.syncthreads()
        if flag[0] == uint32(0):
            return False
        for pair in range(thread, chunks * stride, THREADS):
            key, low = uint32(0), uint32(0)
            if pair % stride < ranks:
                key, low = load_global_64(partials + 8 * int64(pair))
            lists[2 * pair], lists[2 * pair + 1] = key, low
        cuda.syncthreads()
        if thread < 32:
            merge(lists, chunks, stride, ranks, ranked)
        cuda.syncthreads()
        return True

    return row_ranks
