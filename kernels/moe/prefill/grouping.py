"""This module sorts (row, expert) pairs by expert and divides them into tiles for grouped GEMMs.

It is a counting sort, in a launch of one block. Each warp counts the experts of its own run of pairs. The counts are
summed over warps and experts, and each warp then stores its pairs at their places. Pairs of an expert stay in order, so
the result is the same for any number of warps.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.elementwise.norm import check_dtype
from lowlat.kernels.moe.prefill.pair_tiles import TILE_WORDS, most_tiles
from lowlat.kernels.reference.shapes import check_shape
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import Kernel, KernelCall
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = ["examples", "group_pairs"]

MAX_EXPERTS = 513  # with a shared one, whose counts, of every warp, fit the shared memory of a block of any GPU
MAX_WARPS = 32
RANK_BITS = 16
MAX_PAIRS = MAX_WARPS << RANK_BITS  # of which a warp ranks no more than its bits count
FULL_WARP = 0xFFFFFFFF


def group_pairs(
    *, expert_ids: torch.Tensor, num_experts: int, tile_pairs: int, order: torch.Tensor, tiles: torch.Tensor
) -> list[KernelCall]:
    """Sort the pairs of M rows and k experts each by expert and cut each expert's into tiles.

    expert_ids  [M, k]  int32: no expert twice in a row; -1 dead
    order       [M * k] int32, out: pairs by expert, those of an expert in order; row * k + i is the pair of a row and
                        its i-th expert; dead pairs have no place, and what is left of the list is not written
    tiles       [n, 4]  int32, out, n as `most_tiles` has it: expert, place of its first pair in the list, how many
                        pairs, zero; in order of experts; no pairs in tiles after the last. As few of an expert as can
                        be, and these as equal as multiples of 8 pairs are
    One block: some microseconds for some thousand pairs. Captured: yes.
    Raises ShapeError for shapes that do not fit, more than 513 experts or more than 2,097,152 pairs.
    """
    num_pairs = expert_ids.numel()
    check_shape("order", order, num_pairs)
    check_shape("tiles", tiles, most_tiles(num_pairs, num_experts, tile_pairs), TILE_WORDS)
    check_dtype(torch.int32, expert_ids=expert_ids, order=order, tiles=tiles)
    if not 0 < num_experts <= MAX_EXPERTS:
        raise ShapeError(f"{num_experts} experts; pairs are grouped by at most {MAX_EXPERTS}")
    if not 0 < num_pairs <= MAX_PAIRS or tile_pairs < 1:
        raise ShapeError(
            f"{num_pairs} pairs in tiles of {tile_pairs}; one of each is needed, and {MAX_PAIRS} pairs at most"
        )
    warps = min(MAX_WARPS, -(-num_pairs // 32))
    kernel = _make(warps, num_experts, -(-num_pairs // (32 * warps)))
    return [KernelCall(kernel, (1, 1, 1), (expert_ids, order, tiles, num_pairs, tile_pairs, tiles.shape[0]))]


@device_function
def _inclusive(value: Any, lane: Any) -> Any:
    """Of each lane the sum of its value and of those of all lanes below."""
    for power in range(5):
        distance = int32(1) << int32(power)
        other = cuda.shfl_sync(FULL_WARP, int32(value), max(int32(lane) - distance, int32(0)))
        if int32(lane) >= distance:
            value = uint32(value + uint32(other))
    return value


def _make_rank_pairs(num_experts: int, rounds: int) -> Any:
    """A function of a warp: of each of its pairs, 32 a round, the expert, shifted by RANK_BITS, and how many pairs of
    that expert come before it; it counts those of each expert."""

    @device_function
    def rank_pairs(ids: Any, counts: Any, count: Any, warp: Any, lane: Any, pairs: Any) -> None:
        below = uint32(uint32(uint32(1) << lane) - uint32(1))
        for turn in range(rounds):  # all at once, for each is a trip to memory
            pair, expert = uint32(uint32(warp * uint32(rounds) + uint32(turn)) * uint32(32) + lane), uint32(num_experts)
            if pair < count:
                expert = min(expert, uint32(ptx.load_global_i32(ids + int64(pair) * int64(4))))
            pairs[turn] = expert
        for turn in range(rounds):
            expert = pairs[turn]
            same = ptx.lanes_of_same(expert)
            earlier = uint32(ptx.count_bits(uint32(same & below)))
            mine, known = uint32(counts + expert * uint32(4)), uint32(0)
            if expert < uint32(num_experts):
                known = ptx.load_shared_u32(mine)
            pairs[turn] = uint32(uint32(expert << uint32(RANK_BITS)) | uint32(known + earlier))
            ptx.sync_warp()
            if earlier == uint32(0) and expert < uint32(num_experts):
                ptx.store_shared_u32(mine, uint32(known + ptx.count_bits(same)))
            ptx.sync_warp()

    return rank_pairs


def _make_place_pairs(num_experts: int, rounds: int) -> Any:
    """A device function of a warp that stores its pairs at their places, which follow those of the warps before it."""

    @device_function
    def place_pairs(order: Any, counts: Any, firsts: Any, warp: Any, lane: Any, pairs: Any) -> None:
        for turn in range(rounds):
            expert, rank = uint32(pairs[turn] >> uint32(RANK_BITS)), uint32(pairs[turn] & uint32((1 << RANK_BITS) - 1))
            if expert < uint32(num_experts):
                pair = uint32(uint32(warp * uint32(rounds) + uint32(turn)) * uint32(32) + lane)
                first = ptx.load_shared_u32(uint32(firsts + expert * uint32(4)))
                before = ptx.load_shared_u32(uint32(counts + expert * uint32(4)))
                ptx.store_global_i32(order + int64(uint32(first + before + rank)) * int64(4), int32(pair))

    return place_pairs


def _make_scan(warps: int, num_experts: int) -> Any:
    """A device function of the first warp that finds the start of each expert's pairs and tiles, and counts tiles."""

    @device_function
    def scan(totals: Any, firsts: Any, tile_firsts: Any, tile_pairs: Any, lane: Any) -> Any:
        pairs, tiles = uint32(0), uint32(0)
        for start in range(0, num_experts, 32):
            expert, own = uint32(uint32(start) + lane), uint32(0)
            if expert < uint32(num_experts):
                own = ptx.load_shared_u32(uint32(totals + expert * uint32(4)))
            own_tiles = uint32(uint32(own + tile_pairs - uint32(1)) // tile_pairs)
            up_to, tiles_up_to = _inclusive(own, lane), _inclusive(own_tiles, lane)
            if expert < uint32(num_experts):
                ptx.store_shared_u32(uint32(firsts + expert * uint32(4)), uint32(pairs + up_to - own))
                ptx.store_shared_u32(uint32(tile_firsts + expert * uint32(4)), uint32(tiles + tiles_up_to - own_tiles))
            pairs = uint32(pairs + uint32(cuda.shfl_sync(FULL_WARP, int32(up_to), 31)))
            tiles = uint32(tiles + uint32(cuda.shfl_sync(FULL_WARP, int32(tiles_up_to), 31)))
        return tiles

    return scan


@cache
def _make(warps: int, num_experts: int, rounds: int) -> Kernel:
    """Shared memory: each warp's counts, then of each expert how many pairs, its first one, its first tile; tiles.

    rounds  in which a warp's lanes take a pair each
    """
    threads, row_bytes = warps * 32, num_experts * 4
    rank_pairs = _make_rank_pairs(num_experts, rounds)
    place_pairs, scan = _make_place_pairs(num_experts, rounds), _make_scan(warps, num_experts)

    def experts_grouping(ids: Any, order: Any, tiles: Any, count: Any, tile_pairs: Any, capacity: Any) -> None:
        base = ptx.shared_address(cuda.shared.array(shape=0, dtype=float32))
        pairs = cuda.local.array(rounds, uint32)
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        totals = uint32(base + uint32(warps * row_bytes))
        firsts, tile_firsts = uint32(totals + uint32(row_bytes)), uint32(totals + uint32(2 * row_bytes))
        counted, counts = uint32(totals + uint32(3 * row_bytes)), uint32(base + warp * uint32(row_bytes))
        count, tile_pairs, capacity = uint32(count), uint32(tile_pairs), uint32(capacity)
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        for place in range(thread, uint32(warps * num_experts), uint32(threads)):
            ptx.store_shared_u32(uint32(base + uint32(place) * uint32(4)), uint32(0))
        cuda.syncthreads()
        rank_pairs(ids, counts, count, warp, lane, pairs)
        cuda.syncthreads()
        for expert in range(thread, uint32(num_experts), uint32(threads)):
            at, total = uint32(base + uint32(expert) * uint32(4)), uint32(0)
            for each in range(warps):
                own = ptx.load_shared_u32(uint32(at + uint32(each * row_bytes)))
                ptx.store_shared_u32(uint32(at + uint32(each * row_bytes)), total)
                total = uint32(total + own)
            ptx.store_shared_u32(uint32(totals + uint32(expert) * uint32(4)), total)
        cuda.syncthreads()
        if warp == uint32(0):
            found = scan(totals, firsts, tile_firsts, tile_pairs, lane)
            if lane == uint32(0):
                ptx.store_shared_u32(counted, found)
        cuda.syncthreads()
        for expert in range(thread, uint32(num_experts), uint32(threads)):
            left = ptx.load_shared_u32(uint32(totals + uint32(expert) * uint32(4)))
            first = ptx.load_shared_u32(uint32(firsts + uint32(expert) * uint32(4)))
            at = tiles + int64(ptx.load_shared_u32(uint32(tile_firsts + uint32(expert) * uint32(4)))) * int64(16)
            own = max(uint32(1), uint32(uint32(left + tile_pairs - uint32(1)) // tile_pairs))
            even = uint32(uint32(left + own - uint32(1)) // own)
            size = min(tile_pairs, uint32(uint32(even + uint32(7)) & uint32(0xFFFFFFF8)))
            while left > uint32(0):
                here = min(left, size)
                ptx.store_global_128(at, uint32(expert), first, here, uint32(0))
                left, first, at = uint32(left - here), uint32(first + here), at + int64(16)
        none = uint32(0)
        for tile in range(uint32(ptx.load_shared_u32(counted) + thread), capacity, uint32(threads)):
            ptx.store_global_128(tiles + int64(tile) * int64(16), none, none, none, none)
        place_pairs(order, counts, firsts, warp, lane, pairs)

    name = f"experts_grouping_{num_experts}x{warps}x{rounds}"
    signature = (*(types.int64,) * 6,)
    return Kernel(name, experts_grouping, signature, threads, 1, (warps + 3) * row_bytes + 4)


def examples() -> list[Kernel]:
    """Specialisations that stand for all, to compile without a GPU."""
    return [_make(MAX_WARPS, 128, 8), _make(MAX_WARPS, MAX_EXPERTS, 20)]
