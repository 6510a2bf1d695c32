"""This module lists a slot's blocks by head: all, or the best by the last queries' scores, between sinks and window.

There are two launches. The first computes the scores of all candidates, with a warp for four blocks of a head at a
time. The second chooses blocks for each head, in order of position. For a slot whose list leaves nothing out nothing is
chosen, and the first launch does nothing.
"""

from functools import cache
from typing import Any

import torch

from lowlat.errors import ShapeError
from lowlat.kernels.attention.limits import LISTED_HEAD_DIM
from lowlat.kernels.common.memory import divide, int_at, set_int, wide_count
from lowlat.kernels.reference.attention import partial as reference
from lowlat.kernels.toolchain import ptx
from lowlat.kernels.toolchain.kernel import H200, Gpu, Kernel, KernelCall, Workspace, WorkspaceShape
from lowlat.kernels.toolchain.launches import Given, launches, launches_with
from lowlat.kernels.toolchain.numba_cuda import cuda, device_function, float32, int32, int64, types, uint32

__all__ = ["choose_blocks", "examples", "list_lens", "scores_workspace"]

SCORERS, BLOCKS = 256, 3  # threads that score, and their blocks an SM
CHOOSERS = 1024
DIGIT_BITS, DIGITS = 8, 256  # of a rank; the least chosen rank is found digit by digit
FULL_WARP = 0xFFFFFFFF
MAX_BATCH = 32


@launches_with(reference.choose_blocks)
def choose_blocks(given: Given, *, workspace: Workspace, gpu: Gpu = H200) -> list[KernelCall]:
    """Launch `choose_blocks` of the reference; q and summaries are bf16, with heads of 64 or 128.

    workspace  see `scores_workspace`
    Time: a read of the summaries, and a few thousand steps of a block for each head. Captured: yes. Raises ShapeError
    for arguments that do not fit.
    """
    rows, heads, dim, kv_heads, parts, table_width, width = given.sizes("c", "H", "D", "G", "parts", "blocks", "n")
    if given["q"].dtype != torch.bfloat16 or not LISTED_HEAD_DIM.takes(dim) or heads % kv_heads:
        raise ShapeError(f"choose_blocks takes bfloat16 and heads of {LISTED_HEAD_DIM}, got {given['q'].dtype}, {dim}")
    wide_count("q", given["q"])
    block, num_queries, num_sinks, num_retrieved = given.sizes("block", "num_queries", "num_sinks", "num_retrieved")
    sizes = (kv_heads, parts, block, num_sinks, num_retrieved)
    scores = workspace(*scores_workspace(kv_heads, width))
    grid = (BLOCKS * gpu.num_multiprocessors, 1, 1)
    group, queries = heads // kv_heads, min(num_queries, rows)
    names = ("q", "key_summary", "block_table", "chunk", "slot", "shifts")
    kernel = _score(dim, group, kv_heads, -(-queries * group // 16), *sizes[1:])
    score = KernelCall(kernel, grid, (*given.take(*names), scores, width, queries))
    own = (*given.take("block_table", "slot", "shifts"), scores, given["block_lists"], width, table_width * parts)
    return [score, KernelCall(_choose(*sizes), (kv_heads, 1, 1), own)]


def scores_workspace(kv_heads: int, width: int) -> WorkspaceShape:
    """Return the workspace of `choose_blocks`, the scores of every block, for these numbers of heads and entries."""
    return ("choose_blocks.scores", (kv_heads, width), torch.float32)


@device_function
def _kept(words: Any, is_live: Any) -> Any:
    """Four words, or zeros."""
    a, b, c, d = words
    zero = uint32(0)
    return (a, b, c, d) if is_live else (zero, zero, zero, zero)


@cache
def _score(
    dim: int, group: int, kv_heads: int, tiles: int, parts: int, block: int, num_sinks: int, num_retrieved: int
) -> Kernel:
    """Make the kernel of scores: a warp multiplies 16 queries at a time, `tiles` times, by four blocks' keys.

    A block has two keys, the largest and the smallest. Lane 4 r + p has the p-th quarter of the dimensions of queries r
    and r + 8 and of row r of the keys. Of the products it has those of both keys of block p.
    """
    pieces, quarter_bytes, row_bytes = dim // 32, dim // 2, 2 * dim
    first, fixed = num_sinks, num_retrieved

    @device_function
    def query(n: Any, q: Any, head: Any, before: Any) -> Any:
        """Return the address of a query of a head, by its number among those of the last rows."""
        row, member = divide(n, group)
        return q + (((before + row) * int64(kv_heads) + head) * int64(group) + member) * int64(row_bytes)

    def block_scores_kernel(
        q: Any, summary: Any, table: Any, chunk: Any, slot: Any, shifts: Any, scores: Any, width: Any, queries: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        left_out, _ = divide(int_at(shifts, int_at(slot, int64(0))), block)
        if left_out == 0:
            return
        lane = int64(cuda.threadIdx.x) & int64(31)
        row, part_of_row = lane >> int64(2), (lane & int64(3)) * int64(quarter_bytes)
        count, live = left_out + int64(fixed), int_at(chunk, int64(1))
        taken = min(int64(queries), live)
        before, num_queries = live - taken, taken * int64(group)
        item = int64(cuda.blockIdx.x) * int64(SCORERS // 32) + (int64(cuda.threadIdx.x) >> int64(5))
        while item < ((count + int64(3)) >> int64(2)) * int64(kv_heads):  # the same for all lanes of a warp
            four, head = divide(item, kv_heads)
            base = four * int64(4)
            index, part = divide(min(base + (row >> int64(1)), count - 1) + int64(first), parts)
            owner = int_at(table, index) * int64(kv_heads) + head
            key = ((owner * int64(parts) + part) * int64(2) + (row & int64(1))) * int64(row_bytes)
            keys, total = summary + key + part_of_row, float32(0)
            for tile in range(tiles):
                top, low = int64(tile * 16) + row, int64(tile * 16 + 8) + row
                has_top, has_low = top < num_queries, low < num_queries
                upper = query(top if has_top else int64(0), q, head, before) + part_of_row
                lower = query(low if has_low else int64(0), q, head, before) + part_of_row
                a, b, c, d = float32(0), float32(0), float32(0), float32(0)
                for piece in range(pieces):
                    k0, k1, k2, k3 = ptx.load_global_128(keys + piece * 16)
                    t0, t1, t2, t3 = _kept(ptx.load_global_128(upper + piece * 16), has_top)
                    l0, l1, l2, l3 = _kept(ptx.load_global_128(lower + piece * 16), has_low)
                    a, b, c, d = ptx.mma_bf16(a, b, c, d, t0, l0, t1, l1, k0, k1)
                    a, b, c, d = ptx.mma_bf16(a, b, c, d, t2, l2, t3, l3, k2, k3)
                total = ptx.add_rn(total, ptx.add_rn(max(a, b), max(c, d)))
            distance = 4
            while distance < 32:
                total = ptx.add_rn(total, cuda.shfl_xor_sync(FULL_WARP, total, distance))
                distance *= 2
            if lane < 4 and base + lane < count:
                ptx.store_global_f32(scores + (head * int64(width) + base + lane) * 4, total)
            item += int64(cuda.gridDim.x) * int64(SCORERS // 32)

    name = f"block_scores_{dim}x{group}x{kv_heads}_{tiles}_b{block}x{parts}_{num_sinks}_{num_retrieved}"
    return Kernel(name, block_scores_kernel, (types.int64,) * 9, SCORERS, min_blocks=BLOCKS)


@device_function
def _rank_of(scores: Any, number: Any) -> Any:
    """Convert a score to an integer with the same order."""
    bits = uint32(ptx.load_global_i32(scores + number * 4))
    return uint32(bits ^ (uint32(0xFFFFFFFF) if bits >> uint32(31) else uint32(0x80000000)))


@device_function
def _entry(table: Any, logical: Any, parts: Any, held: Any) -> Any:
    """Return the entry of a slot's block by its place in the text; 0 after the table's end."""
    index, part = divide(min(logical, held - 1), parts)
    return int_at(table, index) * int64(parts) + part if logical < held else int64(0)


@device_function
def _count_digits(scores: Any, count: Any, thread: Any, chosen: Any, shift: Any, bins: Any) -> None:
    """Count in bins [DIGITS] the digits at `shift` of the ranks whose higher digits are those of `chosen`."""
    if thread < DIGITS:
        bins[thread] = int32(0)
    cuda.syncthreads()
    number = thread
    while number < count:
        rank = _rank_of(scores, number)
        # by two shifts: one shift by 32 would not shift at all
        if ((rank ^ chosen) >> uint32(shift)) >> uint32(DIGIT_BITS) == uint32(0):
            digit = uint32(rank >> uint32(shift)) & uint32(DIGITS - 1)
            cuda.atomic.add(bins, int32(digit), int32(1))
        number += int64(CHOOSERS)
    cuda.syncthreads()


@device_function
def _add_up(bins: Any, thread: Any) -> None:
    """Add to each bin those of all higher digits."""
    distance = 1
    while distance < DIGITS:
        other = bins[thread + distance] if thread + distance < DIGITS else int32(0)
        cuda.syncthreads()
        if thread < DIGITS:
            bins[thread] += other
        cuda.syncthreads()
        distance *= 2


@device_function
def _threshold(scores: Any, count: Any, wanted: Any, thread: Any, bins: Any, found: Any) -> Any:
    """Find the least chosen rank, digit by digit, and the number of scores with a higher rank. All threads call it.

    At least `wanted` scores have this rank or a higher one.

    bins, found  [DIGITS] and [1] int32 of shared memory
    """
    threshold, above = uint32(0), int64(0)
    for step in range(32 // DIGIT_BITS):
        shift = 32 - DIGIT_BITS * (step + 1)
        _count_digits(scores, count, thread, threshold, shift, bins)
        _add_up(bins, thread)
        if thread < DIGITS:
            more = int64(bins[thread + 1]) if thread + 1 < DIGITS else int64(0)
            if above + more < wanted <= above + int64(bins[thread]):
                found[0] = int32(thread)
        cuda.syncthreads()
        digit = found[0]
        above += int64(bins[digit + 1]) if digit + 1 < DIGITS else int64(0)
        threshold = uint32(threshold | (uint32(digit) << uint32(shift)))
        cuda.syncthreads()
    return threshold, above


@cache
def _choose(kv_heads: int, parts: int, block: int, num_sinks: int, num_retrieved: int) -> Kernel:
    """A block a head. `held` is the number of entries that a slot's table gives, `width` that of a list."""
    window = num_sinks + num_retrieved

    def choose_blocks_kernel(
        table: Any, slot: Any, shifts: Any, all_scores: Any, lists: Any, width: Any, held: Any
    ) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        above, equal = cuda.shared.array(32, int32), cuda.shared.array(32, int32)
        bins, found = cuda.shared.array(DIGITS, int32), cuda.shared.array(1, int32)
        head, thread = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
        lane, warp = int32(thread) & int32(31), int32(thread) >> int32(5)
        own = int_at(slot, int64(0))
        left_out, _ = divide(int_at(shifts, own), block)
        lists += (own * int64(kv_heads) + head) * width * 4
        scores = all_scores + head * width * 4
        place = thread
        while place < width:
            if left_out == 0 or place < num_sinks:
                set_int(lists, place, _entry(table, place, parts, held))
            elif place >= window:
                set_int(lists, place, _entry(table, place + left_out, parts, held))
            place += int64(CHOOSERS)
        if left_out == 0:
            return
        count = left_out + int64(num_retrieved)
        threshold, num_above = _threshold(scores, count, int64(num_retrieved), thread, bins, found)
        most_equal = int64(num_retrieved) - num_above  # the remaining number, of the last rank, first ones first
        seen_above, seen_equal, base = int64(0), int64(0), int64(0)
        while base < count:
            number = base + thread
            rank = _rank_of(scores, min(number, count - 1))
            more, same = number < count and rank > threshold, number < count and rank == threshold
            lanes_above = uint32(cuda.ballot_sync(FULL_WARP, more))
            lanes_equal = uint32(cuda.ballot_sync(FULL_WARP, same))
            if lane == 0:
                above[warp], equal[warp] = int32(cuda.popc(lanes_above)), int32(cuda.popc(lanes_equal))
            cuda.syncthreads()
            lower = uint32((uint32(1) << uint32(lane)) - uint32(1))
            before_above = seen_above + int64(cuda.popc(lanes_above & lower))
            before_equal = seen_equal + int64(cuda.popc(lanes_equal & lower))
            for each in range(CHOOSERS // 32):
                if each < warp:
                    before_above += int64(above[each])
                    before_equal += int64(equal[each])
                seen_above += int64(above[each])
                seen_equal += int64(equal[each])
            if more or (same and before_equal < most_equal):
                target = int64(num_sinks) + before_above + min(before_equal, most_equal)
                set_int(lists, target, _entry(table, number + int64(num_sinks), parts, held))
            cuda.syncthreads()
            base += int64(CHOOSERS)

    name = f"choose_blocks_{kv_heads}_b{block}x{parts}_{num_sinks}_{num_retrieved}"
    return Kernel(name, choose_blocks_kernel, (types.int64,) * 7, CHOOSERS)


@launches(reference.list_lens)
def list_lens(given: Given) -> list[KernelCall]:
    """`list_lens` of the reference. Raises ShapeError for arguments that do not fit, and more than MAX_BATCH slots."""
    (batch,) = given.sizes("B")
    if batch > MAX_BATCH:
        raise ShapeError(f"list_lens takes at most {MAX_BATCH} slots, got {batch}")
    return [KernelCall(_lens(), (1, 1, 1), (*given.take("dense_lens", "slots", "shifts", "out"), batch))]


@cache
def _lens() -> Kernel:
    def list_lens_kernel(dense_lens: Any, slots: Any, shifts: Any, out: Any, batch: Any) -> None:
        ptx.wait_for_previous_kernel()
        ptx.let_next_kernel_start()
        index = int64(cuda.threadIdx.x)
        if index < batch:
            slot = int_at(slots, index)
            shift = int_at(shifts, max(slot, int64(0)))
            set_int(out, index, int_at(dense_lens, index) - (shift if slot >= 0 else int64(0)))

    return Kernel("list_lens", list_lens_kernel, (types.int64,) * 5, MAX_BATCH)


def examples() -> list[Kernel]:
    """Specialisations that CI compiles: Llama-8B's with SpecPV's defaults, scores of gpt-oss's heads."""
    sizes = (8, 2, 16, 2, 256)
    return [_score(128, 4, 8, 1, *sizes[1:]), _choose(*sizes), _lens(), _score(64, 8, 8, 2, *sizes[1:])]
